"""compare: two evaluations of the same samples -> differences with intervals, and the answers that differ.

    comparison.parquet   one row per question: both answers, both scores (more is better), the image; the largest
                         differences first
    report.json, report.html

The model before training is "base", the trained one "tuned".
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.errors import InputError
from dataset_builders.storage.files import atomic_path
from stages.answer.heldout import heldout_samples
from stages.compare.difference import Comparison, compare_predictions
from stages.compare.report import shown_keys, write_comparison_report
from stages.evaluate.config import CompareConfig
from stages.evaluate.predictions import COMPARISON, counted, read_predictions
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.scoring.intervals import Bootstrap
from stages.shared.scoring.summary import upward_rows, upwards

VERSION = 3  # 2: contaminated samples are excluded; 3: all images of a sample on the page
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
        ("base_score", pa.float64()),
        ("tuned_score", pa.float64()),
        ("gain", pa.float64()),
        ("image", pa.binary()),
    ]
)


def _run(config: CompareConfig, inputs: Mapping[str, Artifact], work: Path, resources: object) -> StageOutput:
    """Run the stage. Inputs: "base" and "tuned", two evaluations; "samples", the samples that both answered."""
    base, tuned = (counted(read_predictions(inputs[name].dir)) for name in ("base", "tuned"))
    overrides = _metrics(inputs)
    bootstrap = Bootstrap(resamples=config.resamples, level=config.level, seed=config.seed)
    comparison = compare_predictions(base, tuned, overrides, bootstrap)
    table = _table(base, tuned, comparison)
    with atomic_path(work / COMPARISON) as tmp:
        pq.write_table(table, tmp)
    write_comparison_report(work, comparison, table, _pictures(inputs["samples"], shown_keys(table)))
    return StageOutput(stats=_stats(comparison))


def _pictures(samples: Artifact, keys: set[str]) -> dict[str, Sequence[bytes]]:
    """Return key -> all images of that held-out sample."""
    images_of: dict[str, Sequence[bytes]] = {}
    for sample in heldout_samples(samples):
        if images_of.keys() == keys:
            break
        if sample.key in keys:
            images_of[sample.key] = sample.images
    return images_of


def _metrics(inputs: Mapping[str, Artifact]) -> Mapping[str, list[str]]:
    base, tuned = (inputs[name].manifest.config.get("metrics", {}) for name in ("base", "tuned"))
    if base != tuned:
        raise InputError(f"evaluate.metrics of the two evaluations differ: {base} and {tuned}; evaluate both alike")
    return tuned


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
    columns = {name: tuned[name] for name in ("key", "turn", "subset", "question", "references", "image")}
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


STAGE = Stage("compare", VERSION, _run, on_disk=True, digested=(COMPARISON,))
