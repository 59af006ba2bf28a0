"""The samples that a stage left out: their file, the limit on their share, and their table in the report."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dataset_builders.contracts.sample import SKIP_REASONS
from dataset_builders.errors import InputError
from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath
from stages.shared.pages.report import Table

QUARANTINE = "quarantine.jsonl"  # one record per line
_SHOWN = 200
MIN_LOST = 3  # rows; the limit on the share does not apply below this number of lost rows


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sample that was left out.

    Attributes:
        key: the sample's key.
        reason: one of SKIP_REASONS.
        detail: the fault.
        file: the raw file that holds it; None if the stage reads no raw files.
        row: its row in that file, from 0.
    """

    key: str
    reason: str
    detail: str
    file: str | None = None
    row: int | None = None

    def record(self) -> dict[str, object]:
        """Return field -> value; without file and row if there is no file."""
        record: dict[str, object] = {"key": self.key, "reason": self.reason, "detail": self.detail}
        return record if self.file is None else {**record, "file": self.file, "row": self.row}


def write_left_out(directory: StorePath, left_out: Iterable[LeftOut]) -> int:
    """Write quarantine.jsonl, one record per line in the same order; the file is empty if there are no records.

    Returns:
        The number of lines.
    """
    lines = 0
    # Text that UTF-8 cannot store (half a surrogate pair) becomes \udXXX, JSON's escape.
    with (
        atomic_path(directory / QUARANTINE) as tmp,
        tmp.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        for item in left_out:
            file.write(json.dumps(item.record(), ensure_ascii=False) + "\n")
            lines += 1
    return lines


def count_reasons(left_out: Iterable[LeftOut]) -> dict[str, int]:
    """Return reason -> number of samples, sorted by reason."""
    return dict(sorted(Counter(item.reason for item in left_out).items()))


def reason_words(skips: Mapping[str, int]) -> str:
    """Return reasons with their numbers, the most frequent first: `image_not_found 30, empty_target 2`."""
    return ", ".join(f"{reason} {number}" for reason, number in Counter(skips).most_common())


def check_lost(
    skips: Mapping[str, int],
    num_samples: int,
    limit: tuple[str, float],
    source: StorePath | str,
    where: str,
    left_out: Iterable[LeftOut] = (),
) -> None:
    """Check that a stage does not lose too large a share of its samples.

    Args:
        skips: reason -> number of samples that are lost.
        num_samples: number of samples read, including the lost ones.
        limit: name of the field that bounds the share of lost samples, and its value.
        source: where the samples come from, for the message.
        where: the file that lists the lost samples, for the message.
        left_out: the lost samples. The message names the first one with the commonest reason; without them it explains
            the reason.

    Raises:
        InputError: at least 3 samples and more than the allowed share are lost, or all samples are lost.
    """
    num_lost, (field, fraction) = sum(skips.values()), limit
    if num_lost < num_samples and (num_lost < MIN_LOST or num_lost <= fraction * num_samples):
        return
    worst = max(skips, key=skips.__getitem__, default="")
    first = next((f"the first of {worst}: {each.key}: {each.detail}" for each in left_out if each.reason == worst), "")
    meaning = f"{first or f'{worst}: {SKIP_REASONS[worst]}'}; " if worst else ""
    raise InputError(
        f"{num_lost} of {num_samples} samples of {source} cannot be used ({reason_words(skips)}), and "
        f"{field}={fraction:g} allows {int(fraction * num_samples)}; {meaning}mend the data or raise the limit; "
        f"each is named in {where}"
    )


def left_out_table(left_out: Sequence[LeftOut], total: int | None = None) -> Table:
    """Return a report's table of the first of these samples; `total` is the number of all, if not all were passed."""
    total = len(left_out) if total is None else total
    shown = [list(item.record().values()) for item in left_out[:_SHOWN]]
    columns = list(left_out[0].record()) if left_out else ["key", "reason", "detail"]
    title = "Left out" if len(shown) == total else f"Left out: the first {len(shown)} of {total}, all in {QUARANTINE}"
    return Table(title, columns, shown)
