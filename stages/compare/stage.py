"""compare: two evaluations of the same samples -> differences with intervals, and the answers that differ.

    comparison.parquet   one row per question: both answers, both scores (more is better), the image; the largest
                         differences first
    report.json, report.html

The model before training is "base", the trained one "tuned".
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataset_builders.contracts.boxes import TrueBoxes
from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.storage.files import atomic_path
from stages.answer.heldout import heldout_samples
from stages.compare.comparison import Comparison, compare_predictions
from stages.evaluate.answer_pictures import answer_layer, answer_picture
from stages.evaluate.config import CompareConfig
from stages.evaluate.predictions import COMPARISON, counted, read_predictions
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.pages.report import Picture, Pictures, Section, Table, write_report
from stages.shared.pages.shown_numbers import show_gain, show_value
from stages.shared.scoring.intervals import Bootstrap
from stages.shared.scoring.names import OVERALL
from stages.shared.scoring.subsets import read_metrics
from stages.shared.scoring.summary import upward_rows, upwards

# 2: contaminated samples are excluded; 3: all images of a sample on the page; 4: what they show; 5: boxes
VERSION = 5
COMPARISON_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("turn", pa.int32()),
        ("subset", pa.string()),
        ("metric", pa.string()),
        ("question", pa.string()),
        ("references", pa.list_(pa.string())),
        ("base", pa.string()),
        ("tuned", pa.string()),
        ("boxes", pa.string()),  # as in predictions.parquet
        ("base_score", pa.float64()),
        ("tuned_score", pa.float64()),
        ("gain", pa.float64()),
        ("image", pa.binary()),
    ]
)
_PICTURES = 48  # of each gallery
_ROWS = 200
_THUMBNAIL_SIDE = 160  # pixels


def compare(config: CompareConfig, inputs: Mapping[str, Artifact], work: Path, resources: object) -> StageOutput:
    """Run the stage. Inputs: "base" and "tuned", two evaluations; "samples", the samples that both answered."""
    base, tuned = (counted(read_predictions(inputs[name].dir)) for name in ("base", "tuned"))
    of_base, of_tuned = (inputs[name].manifest.config.get("metrics", {}) for name in ("base", "tuned"))
    if of_base != of_tuned:
        raise InputError(
            f"evaluate.metrics of the two evaluations differ: {of_base} and {of_tuned}; evaluate both alike"
        )
    bootstrap = Bootstrap(resamples=config.resamples, level=config.level, seed=config.seed)
    comparison = compare_predictions(base, tuned, read_metrics(inputs["tuned"].manifest.stats), bootstrap)
    table = _table(base, tuned, comparison)
    with atomic_path(work / COMPARISON) as tmp:
        pq.write_table(table, tmp)
    keys, samples_of = shown_keys(table), {}
    for sample in heldout_samples(inputs["samples"], None):
        if samples_of.keys() == keys:
            break
        if sample.key in keys:
            samples_of[sample.key] = sample
    write_comparison_report(work, comparison, table, samples_of)
    return StageOutput(stats=_stats(comparison))


def _table(base: pa.Table, tuned: pa.Table, comparison: Comparison) -> pa.Table:
    """Return one row per question; the largest differences first, in either direction."""
    subsets = np.array(tuned["subset"].to_pylist(), dtype=object)
    scores = {"base_score": np.zeros(len(subsets)), "tuned_score": np.zeros(len(subsets))}
    metrics = np.empty(len(subsets), dtype=object)
    for name, tuned_scores in comparison.tuned.items():
        here = subsets == name
        scores["base_score"][here] = upward_rows(comparison.base[name])
        scores["tuned_score"][here] = upward_rows(tuned_scores)
        metrics[here] = tuned_scores.metrics.headline
    columns = {name: tuned[name] for name in ("key", "turn", "subset", "question", "references", "boxes", "image")}
    columns |= {"base": base["answer"], "tuned": tuned["answer"], "metric": metrics, "gain": comparison.rows, **scores}
    table = pa.table({name: columns[name] for name in COMPARISON_SCHEMA.names}, schema=COMPARISON_SCHEMA)
    return table.take(np.argsort(-np.abs(comparison.rows), kind="stable"))


def _stats(comparison: Comparison) -> dict[str, object]:
    """Return the figures for the manifest: both headlines of every subset with intervals, and their difference."""
    stats: dict[str, dict[str, object]] = {}
    for name, difference in comparison.differences.items():
        stats[name] = {"difference": asdict(difference)}
        if name in comparison.tuned:
            before, after = comparison.base[name], comparison.tuned[name]
            stats[name] |= {
                "metric": after.metrics.headline,
                "base": asdict(before.headline),
                "tuned": asdict(after.headline),
                "base_score": upwards(before),
                "tuned_score": upwards(after),
            }
    gains = {name: list(ends) for name, ends in comparison.gains().items()}
    return {"subsets": stats, "gains": gains}


def write_comparison_report(
    directory: Path, comparison: Comparison, table: pa.Table, samples_of: Mapping[str, Sample]
) -> None:
    """Write report.json: the differences, then images with both answers, the largest differences first.

    Args:
        table: the rows of comparison.parquet, in its order.
        samples_of: key -> the sample, for the `shown_keys`.
    """
    whole = comparison.differences[OVERALL]
    before, after = (
        sum(upwards(scores) for scores in side.values()) / len(side) for side in (comparison.base, comparison.tuned)
    )
    summary = {
        "score before": before,
        "score after": after,
        "gain": whole.difference,
        "gain, interval": f"{show_gain(whole.low)} to {show_gain(whole.high)}",
        "answers": {"better": whole.wins, "worse": whole.losses, "alike": whole.ties},
    }
    sections: list[Section] = [_differences(comparison)]
    shown: set[tuple[str, int]] = set()
    for title, answers in zip(("Worse than before", "Better than before"), _worse_and_better(table)):
        rows = _with_image(answers)
        shown |= {(row["key"], row["turn"]) for row in rows}
        items = [_picture(row, samples_of[row["key"]]) for row in rows]
        sections.append(Pictures(f"{title} ({answers.num_rows} in all; the first with pictures)", items))
    columns = ["key", "turn", "metric", "question", "references", "base", "tuned", "base_score", "tuned_score"]
    changed = table.filter(pc.not_equal(table["gain"], 0)).select(columns).to_pylist()
    others = [row for row in changed if (row["key"], row["turn"]) not in shown]
    rows = [[" | ".join(v) if isinstance(v, list) else v for v in row.values()] for row in others[:_ROWS]]
    sections.append(Table(f"Changed too, {len(rows)} of the {len(others)} others", columns, rows))
    write_report(directory, title="Before and after training", summary=summary, sections=sections)


def shown_keys(table: pa.Table) -> set[str]:
    """Return the keys of the samples whose images are on the page."""
    return {row["key"] for answers in _worse_and_better(table) for row in _with_image(answers)}


def _picture(row: dict[str, Any], sample: Sample) -> Picture:
    caption, layers, truth = _caption(row), [], None
    if row["boxes"] is not None:
        truth = TrueBoxes.from_json(row["boxes"])
        layers.append(answer_layer("before", "before", row["base"], truth))
        layers.append(answer_layer("after", "answer", row["tuned"], truth))
    boxed = answer_picture(sample, row["turn"], truth, layers, caption)
    return boxed or Picture.of_sample(sample, _THUMBNAIL_SIDE, caption)


def _worse_and_better(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    return table.filter(pc.less(table["gain"], 0)), table.filter(pc.greater(table["gain"], 0))


def _with_image(answers: pa.Table) -> list[dict[str, Any]]:
    return answers.filter(pc.is_valid(answers["image"])).slice(0, _PICTURES).to_pylist()


def _differences(comparison: Comparison) -> Table:
    columns = ["subset", "metric", "before", "after", "difference", "better", "worse", "alike", "p"]
    rows: list[Sequence[object]] = []
    for name, change in comparison.differences.items():
        values = ["mean of the headlines", "", ""]
        if name in comparison.tuned:
            sides = comparison.base[name].headline, comparison.tuned[name].headline
            values = [f"{show_value(side.value)} ({show_value(side.low)} to {show_value(side.high)})" for side in sides]
            values = [comparison.tuned[name].metrics.headline, *values]
        sure = "" if change.excludes_zero else ", may be chance"
        gain = f"{show_gain(change.difference)} ({show_gain(change.low)} to {show_gain(change.high)}{sure})"
        rows.append([name, *values, gain, change.wins, change.losses, change.ties, round(change.p_value, 4)])
    level = next(iter(comparison.tuned.values())).headline.level
    return Table(f"Scores with {level:.0%} intervals, from resampled samples", columns, rows)


def _caption(row: dict[str, Any]) -> str:
    references = " | ".join(dict.fromkeys(row["references"]))
    return "\n".join(
        [
            row["question"],
            f"reference: {references}",
            f"before ({show_value(row['base_score'])}): {row['base']}",
            f"after ({show_value(row['tuned_score'])}): {row['tuned']}",
            row["key"],
        ]
    )


STAGE = Stage("compare", VERSION, compare, on_disk=True, digested=(COMPARISON,))
