"""quarantine.jsonl: the samples that a stage left out, a line each, and the same as a table of its report."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.files import write_text
from stages.report import Table

QUARANTINE = "quarantine.jsonl"
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sample that was left out.

    Attributes:
        key: the sample's.
        reason: one of SKIP_REASONS.
        detail: what was found.
    """

    key: str
    reason: str
    detail: str


def write_quarantine(directory: Path, left_out: Sequence[LeftOut]) -> None:
    """Write quarantine.jsonl: {"key", "reason", "detail"} a line, in the order given; empty when there is nothing."""
    lines = (json.dumps(dataclasses.asdict(item), ensure_ascii=False) for item in left_out)
    write_text(directory / QUARANTINE, "".join(f"{line}\n" for line in lines))


def count_reasons(left_out: Sequence[LeftOut]) -> dict[str, int]:
    """Reason -> samples, sorted by reason."""
    return dict(sorted(Counter(item.reason for item in left_out).items()))


def left_out_table(left_out: Sequence[LeftOut]) -> Table:
    """The first of them, for a report."""
    shown = left_out[:_SHOWN]
    title = "Left out" if len(shown) == len(left_out) else f"Left out, the first {len(shown)} of {len(left_out)}"
    return Table(title, ["key", "reason", "detail"], [[item.key, item.reason, item.detail] for item in shown])
