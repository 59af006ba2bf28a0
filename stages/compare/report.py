"""The page of a comparison: the differences, then images with both answers, the largest differences first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.pictures.images import preview_png
from stages.compare.difference import Comparison
from stages.shared.pages.report import Pictures, Section, Table, write_report
from stages.shared.scoring.intervals import Difference, Interval
from stages.shared.scoring.names import OVERALL
from stages.shared.scoring.summary import upwards

_PICTURES = 48
_ROWS = 200
_THUMBNAIL_SIDE = 160  # pixels


def shown_keys(table: pa.Table) -> set[str]:
    """Return the keys of the samples whose images are on the page."""
    return {row["key"] for part in _parts(table) for row in _shown(part)}


def write_comparison_report(
    directory: Path, comparison: Comparison, table: pa.Table, pictures: Mapping[str, Sequence[bytes]]
) -> None:
    """Write report.json.

    Args:
        table: the rows of comparison.parquet, in its order.
        pictures: key of a sample -> all its encoded images; for the `shown_keys`.
    """
    worse, better = _parts(table)
    sections: list[Section] = [
        _differences(comparison),
        _gallery("Worse than before", worse, pictures),
        _gallery("Better than before", better, pictures),
        _others(table),
    ]
    write_report(directory, title="Before and after training", summary=_summary(comparison), sections=sections)


def _summary(comparison: Comparison) -> dict[str, object]:
    whole = comparison.differences[OVERALL]
    before, after = (
        sum(upwards(scores) for scores in side.values()) / len(side) for side in (comparison.base, comparison.tuned)
    )
    return {
        "score before": before,
        "score after": after,
        "gain": whole.difference,
        "gain, interval": f"{whole.low:+.4f} to {whole.high:+.4f}",
        "answers": {"better": whole.wins, "worse": whole.losses, "alike": whole.ties},
    }


def _differences(comparison: Comparison) -> Table:
    columns = ["subset", "metric", "before", "after", "difference", "better", "worse", "alike", "p"]
    rows: list[Sequence[object]] = []
    for name, change in comparison.differences.items():
        before, after = comparison.base.get(name), comparison.tuned.get(name)
        values = ["mean of the headlines", "", ""]
        if after is not None:
            values = [after.metrics.headline, _interval(before.headline), _interval(after.headline)]
        rows.append(
            [name, *values, _difference(change), change.wins, change.losses, change.ties, round(change.p_value, 4)]
        )
    level = next(iter(comparison.tuned.values())).headline.level
    return Table(f"Scores with {level:.0%} intervals, from resampled samples", columns, rows)


def _interval(score: Interval) -> str:
    return f"{score.value:.4f} ({score.low:.4f} to {score.high:.4f})"


def _difference(change: Difference) -> str:
    sure = "" if change.excludes_zero else ", may be chance"
    return f"{change.difference:+.4f} ({change.low:+.4f} to {change.high:+.4f}{sure})"


def _parts(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the answers that are worse than before, and the answers that are better."""
    return table.filter(pc.less(table["gain"], 0)), table.filter(pc.greater(table["gain"], 0))


def _shown(table: pa.Table) -> list[dict[str, Any]]:
    return table.filter(pc.is_valid(table["image"])).slice(0, _PICTURES).to_pylist()


def _gallery(title: str, table: pa.Table, pictures: Mapping[str, Sequence[bytes]]) -> Pictures:
    shown = [(preview_png(pictures[row["key"]], _THUMBNAIL_SIDE), _caption(row)) for row in _shown(table)]
    return Pictures(f"{title} ({table.num_rows} in all; the first with pictures)", shown)


def _caption(row: dict[str, Any]) -> str:
    references = " | ".join(dict.fromkeys(row["references"]))
    return "\n".join(
        [
            row["question"],
            f"reference: {references}",
            f"before ({row['base_score']:.3g}): {row['base']}",
            f"after ({row['tuned_score']:.3g}): {row['tuned']}",
            row["key"],
        ]
    )


def _others(table: pa.Table) -> Table:
    """Return the table of the answers that changed and are in neither gallery."""
    shown = {(row["key"], row["turn"]) for part in _parts(table) for row in _shown(part)}
    columns = ["key", "turn", "metric", "question", "references", "base", "tuned", "base_score", "tuned_score"]
    changed = table.filter(pc.not_equal(table["gain"], 0)).select(columns).to_pylist()
    others = [row for row in changed if (row["key"], row["turn"]) not in shown]
    rows = [[" | ".join(v) if isinstance(v, list) else v for v in row.values()] for row in others[:_ROWS]]
    return Table(f"Changed too, {len(rows)} of the {len(others)} others", columns, rows)
