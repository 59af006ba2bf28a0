"""`athanor lmms-eval`: write a task for lmms-eval that asks an exported model the questions of athanor's evaluation.

The command does not run lmms-eval. lmms-eval is installed in an environment of its own, and the user runs the printed
command there.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset_builders.errors import InputError
from dataset_builders.storage.store import absolute, is_local, location, side_dir
from flows.cli.text_table import print_table
from flows.pipeline.graph import plan_stages
from flows.pipeline.recipe import Recipe, load_recipe
from flows.tracking.notes import score_text
from stages.answer.plan import heldout_samples
from stages.artifacts.artifact import Artifact
from stages.evaluate.lmms_eval.task import (
    HELDOUT,
    INSTALL,
    METRICS,
    MIN_PIXELS,
    LmmsEvalTask,
    WrittenTask,
    write_lmms_eval_task,
)
from stages.evaluate.predictions import counted, read_predictions
from stages.inputs.hf_directory import hf_dir_of
from stages.scoring.metrics.contract import Judged
from stages.scoring.names import OVERALL
from stages.scoring.summary import SCORE
from stages.scoring.table import get_metric

TASK = "athanor_heldout"
OTHERWISE = "exact_match"  # the metric for subsets whose headline metric lmms-eval lacks
_COLUMNS = ("key", "turn", "subset", "question", "references", "answer", "metric", "contaminated")
_HEADS = ("subset", "answers", "metric", "score", "in lmms-eval", "expected there")

Row = Mapping[str, Any]


def lmms_eval_command(args: argparse.Namespace) -> int:
    """Write the task. Print athanor's scores, the metrics of the task, and the command that runs it."""
    recipe = load_recipe(args.recipe, args.overrides)
    artifacts = _artifacts(recipe, args)
    evaluated = artifacts["evaluate"]
    directory = _out_dir(args.out, side_dir(args.root) / "lmms-eval" / evaluated.dir.name)
    rows = counted(read_predictions(evaluated.dir, _COLUMNS)).to_pylist()
    headlines = {row["subset"]: row["metric"] for row in rows}
    task = LmmsEvalTask(
        name=TASK,
        max_new_tokens=recipe.config.evaluate.max_new_tokens,
        metrics={subset: name if name in METRICS else OTHERWISE for subset, name in headlines.items()},
        questions={(row["key"], row["turn"]) for row in rows},
    )
    hf_dir = hf_dir_of(artifacts["export"]).resolve()
    written = write_lmms_eval_task(directory, hf_dir, heldout_samples(artifacts["convert"]), task)
    table = score_rows(rows, task.metrics, evaluated.manifest.stats["scores"])
    print_table("Our own evaluation", _HEADS, table, sys.stdout.isatty())
    print(f"\n{_scored_otherwise(headlines, task.metrics)}")
    _print_how(written, directory)
    return 0


def _print_how(written: WrittenTask, directory: Path) -> None:
    questions = f"{written.num_questions} questions"
    if written.num_small:
        small = f"{written.num_small} of {questions} show a picture of fewer than {MIN_PIXELS:,} pixels"
        print(f"{small}, which lmms-eval enlarges: their scores cannot be compared.")
    print(f"Task:  {directory}  ({questions})")
    print(f"\nRun it where lmms-eval is installed ({INSTALL}, in an environment of its own);")
    print(f"without a GPU add ,device=cpu,device_map=cpu to the value of --model_args:\n\n{written.command}")


def _artifacts(recipe: Recipe, args: argparse.Namespace) -> dict[str, Artifact]:
    """Return stage -> its artifact in a run with these settings, up to the stage `evaluate`.

    Raises:
        InputError: the evaluation or a stage before it is not made yet.
    """
    planned, _ = plan_stages(recipe.config, args.root)
    artifacts = {}
    for stage in planned:
        if stage.artifact is None:
            sets = [word for override in args.overrides for word in ("--set", override)]
            run = shlex.join(["athanor", "run", args.recipe, *sets, "--root", str(args.root)])
            raise InputError(f"{stage.name} of recipe {recipe.name} is not made yet ({stage.why}); make it by: {run}")
        artifacts[stage.name] = stage.artifact
        if stage.name == "evaluate":
            break
    return artifacts


def _out_dir(option: str | None, default: Path) -> Path:
    """Return the directory of `--out`, or the default.

    Raises:
        InputError: `--out` is not a directory of this machine, or it holds files of something other than a task.
    """
    if option is None:
        return default
    out = absolute(location(option))
    if not is_local(out):
        raise InputError(f"--out {out}: lmms-eval reads a task from this machine's disk; give a local directory")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / HELDOUT).is_file():
        raise InputError(f"--out {out} holds other files than a task; give a new directory")
    return out


def score_rows(
    rows: Sequence[Row], metrics: Mapping[str, str], scores: Mapping[str, Mapping[str, float]]
) -> list[tuple[str, ...]]:
    """Return the table's rows: one per subset, then the overall score, then one per metric of lmms-eval.

    A row shows athanor's score, and the score that lmms-eval gives to the same answers.

    Args:
        rows: rows of predictions.parquet.
        metrics: subset -> its metric in lmms-eval.
        scores: scores of athanor's evaluation. Its `overall` is the mean over the subsets; the overall value of
            lmms-eval is the mean over all answers of a metric.
    """
    table = []
    for subset, metric in sorted(metrics.items()):
        own = [row for row in rows if row["subset"] == subset]
        ours, name = own[0]["metric"], f"{metric}_{subset}"
        table.append((subset, str(len(own)), ours, score_text(scores[subset].get(ours)), name, _score(metric, own)))
    table.append((OVERALL, str(len(rows)), SCORE, score_text(scores[OVERALL].get(SCORE)), "", ""))
    for metric in sorted(set(metrics.values())):
        own = [row for row in rows if metrics[row["subset"]] == metric]
        table.append(("", str(len(own)), "", "", metric, _score(metric, own)))
    return table


def _score(metric: str, rows: Iterable[Row]) -> str:
    judged = [Judged(question=r["question"], references=tuple(r["references"]), answer=r["answer"]) for r in rows]
    return score_text(get_metric(metric).score(judged))


def _scored_otherwise(headlines: Mapping[str, str], metrics: Mapping[str, str]) -> str:
    """Return the line that names the subsets that lmms-eval scores by another metric."""
    others = [f"{subset} ({name})" for subset, name in sorted(headlines.items()) if metrics[subset] != name]
    if not others:
        return "lmms-eval scores every subset by the same metric."
    return f"lmms-eval scores by {OTHERWISE}, as it lacks our metric: {', '.join(others)}."
