"""The table of benchmark scores, for the terminal and as a page."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from dataset_builders.storage.files import write_json, write_text
from flows.bench.asking import Question
from flows.tracking.config import BENCH
from flows.tracking.notes import markdown_table, score_text
from flows.tracking.record import BenchScore
from stages.evaluate.lmms_eval.task import LMMS_EVAL

HEADS = ("task", "metric", "questions", "before", "after", "gain", "our own evaluation")
REPORT, JSON = "benchmarks.md", "benchmarks.json"


def score_rows(scores: Mapping[str, BenchScore], ours: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return one row per score: its name, the values before and after with the interval, the gain with its interval.

    Args:
        ours: names of scores -> the score by the same metric of the answers in our own evaluation.
    """
    rows = []
    for name, score in scores.items():
        task, _, metric = name.removeprefix(f"{BENCH}/").partition("/")
        number = str(score.questions) if score.questions else ""
        after = score_text(score.value, _ends(score.low, score.high))
        gain = "" if score.gain is None else f"{score.gain:+.4f}{_signed(score.gain_low, score.gain_high)}"
        rows.append((task, metric, number, score_text(score.before), after, gain, score_text(ours.get(name))))
    return rows


def write_report(
    directory: Path,
    scores: Mapping[str, BenchScore],
    ours: Mapping[str, float],
    question: Question,
    models: Mapping[str, Path | None],
) -> Path:
    """Write benchmarks.md and benchmarks.json, and return the path of the first.

    Args:
        models: "before" and "after" -> directory of the model; None: it was not asked.
    """
    commands = {
        name: shlex.join([str(question.python), *question.arguments(model)])
        for name, model in models.items()
        if model is not None
    }
    part = f" The first {question.limit} questions of each task." if question.limit is not None else ""
    lines = [
        "# Benchmarks",
        f"Asked by lmms-eval (tested with {LMMS_EVAL}).{part} Intervals hold 95%: bootstrap over the questions where a "
        "score is their mean, paired for the gain; otherwise from lmms-eval's standard error.",
        markdown_table(HEADS, score_rows(scores, ours), numbers=range(2, len(HEADS))),
        *(f"{name}, {models[name]}, in {directory / name}:\n\n    {command}" for name, command in commands.items()),
    ]
    write_text(directory / REPORT, "\n\n".join(lines) + "\n")
    values = {name: score.model_dump() for name, score in scores.items()}
    write_json(directory / JSON, {"lmms_eval": LMMS_EVAL, "commands": commands, "scores": values})
    return directory / REPORT


def _ends(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)


def _signed(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" ({low:+.2f} to {high:+.2f})"
