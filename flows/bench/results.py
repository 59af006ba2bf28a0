"""The results that lmms-eval writes: scores, with intervals, and the gain of the tuned model over the base model.

    <date>_results.json           results: task -> "metric,filter" -> value; standard errors; which way is better
    <date>_samples_<task>.jsonl   one line per question: doc_id, and its score by each metric

A metric that is the mean of the questions' scores gets the interval of our own evaluation (bootstrap, paired for the
gain). For another metric lmms-eval's own standard error gives an interval of the normal distribution. A metric that has
neither has no interval.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataset_builders.errors import InputError
from flows.tracking.config import BENCH
from flows.tracking.record import BenchScore
from stages.scoring.intervals import Bootstrap, Subset, difference, interval
from stages.scoring.metrics.contract import Judged, MeanMetric

_SPREADS = ("_stderr", "_stderr_clt", "_stderr_clustered")
_NO_FILTER = "none"
_NORMAL = 1.959964  # half width of the 95% interval of a normal distribution, in standard errors
_ROUNDING = 1e-6


class _Mean(MeanMetric):
    name = "mean"
    definition = "mean of the scores that lmms-eval gives to single questions"
    source = "lmms-eval"

    def score_one(self, answer: Judged) -> float:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The results of one task for one model.

    Attributes:
        scores: metric -> value over all questions.
        errors: metric -> lmms-eval's standard error; without metrics that have none.
        is_higher_better: metric -> which way is better; without metrics for which lmms-eval does not say it.
        questions: metric -> doc_id -> score of that question.
    """

    scores: dict[str, float]
    errors: dict[str, float]
    is_higher_better: dict[str, bool]
    questions: dict[str, dict[int, float]]


def read_results(directory: Path) -> dict[str, TaskResult]:
    """Return task -> its results, of the newest results.json below a directory.

    Raises:
        InputError: there is none, or it holds no score.
    """
    files = sorted(directory.rglob("*_results.json"))
    if not files:
        raise InputError(f"lmms-eval wrote no results below {directory}")
    document = json.loads(files[-1].read_text(encoding="utf-8"))
    date = files[-1].name.removesuffix("_results.json")
    ways = document.get("higher_is_better", {})
    tasks = {}
    for task, values in document["results"].items():
        samples = files[-1].with_name(f"{date}_samples_{task}.jsonl")
        if (result := _task(values, ways.get(task) or {}, _lines(samples))).scores:
            tasks[task] = result
    if not tasks:
        raise InputError(f"{files[-1]} holds no score; see lmms-eval's log")
    return tasks


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def _task(values: Mapping[str, Any], ways: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> TaskResult:
    scores, errors, questions = {}, {}, {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not filtered or not _is_number(value) or metric.endswith(_SPREADS):
            continue
        name = metric if filtered == _NO_FILTER else f"{metric}-{filtered}"
        scores[name] = float(value)
        error = values.get(f"{metric}_stderr,{filtered}")
        if _is_number(error):
            errors[name] = float(error)
        mine = [row for row in rows if row.get("filter", filtered) == filtered and _is_number(row.get(metric))]
        questions[name] = {int(row["doc_id"]): float(row[metric]) for row in mine}
    better = {name: bool(ways[name]) for name in scores if isinstance(ways.get(name), bool)}
    return TaskResult(scores, errors, better, questions)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def bench_scores(
    after: Mapping[str, TaskResult],
    before: Mapping[str, TaskResult] | None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, BenchScore]:
    """Return bench/TASK/METRIC -> the score with its interval and the gain over the model before training.

    Args:
        before: results of the model before training; None: it was not asked.
        groups: task -> label of each question in the order of doc_id; questions with one label are drawn together.
    """
    scores = {}
    for task, result in after.items():
        labels = (groups or {}).get(task)
        base = None if before is None else before.get(task)
        for metric in result.scores:
            scores[f"{BENCH}/{task}/{metric}"] = _score(metric, result, base, labels)
    return scores


def _score(metric: str, after: TaskResult, before: TaskResult | None, labels: Sequence[str] | None) -> BenchScore:
    value, rows = after.scores[metric], after.questions[metric]
    fields: dict[str, Any] = {"value": value, "questions": len(rows)}
    fields["higher_is_better"] = after.is_higher_better.get(metric, True)
    if _is_mean(after, metric):
        bounds = interval(_subset(rows, labels), Bootstrap())
        fields |= {"low": bounds.low, "high": bounds.high}
    elif metric in after.errors:
        fields |= _around("", value, after.errors[metric])
    if before is None or metric not in before.scores:
        return BenchScore(**fields)
    fields |= {"before": before.scores[metric], "gain": value - before.scores[metric]}
    same = rows.keys() == before.questions[metric].keys()
    if same and _is_mean(after, metric) and _is_mean(before, metric):
        change = difference(_subset(before.questions[metric], labels), _subset(rows, labels), Bootstrap())
        fields |= {"gain_low": change.low, "gain_high": change.high}
    elif metric in after.errors and metric in before.errors:
        fields |= _around("gain_", fields["gain"], math.hypot(after.errors[metric], before.errors[metric]))
    return BenchScore(**fields)


def _is_mean(result: TaskResult, metric: str) -> bool:
    """Whether the score is the mean of the scores of single questions."""
    rows = result.questions[metric]
    return bool(rows) and abs(math.fsum(rows.values()) / len(rows) - result.scores[metric]) < _ROUNDING


def _subset(rows: Mapping[int, float], labels: Sequence[str] | None) -> Subset:
    order = sorted(rows)
    statistics = np.array([(rows[number], 1.0) for number in order])
    return Subset(metric=_Mean(), statistics=statistics, groups=labels and [labels[number] for number in order])


def _around(name: str, value: float, error: float) -> dict[str, float]:
    return {f"{name}low": value - _NORMAL * error, f"{name}high": value + _NORMAL * error}
