"""`athanor lmms-eval`: a task for lmms-eval, which asks an exported model what our own evaluation has asked it.

Asks nothing itself: lmms-eval has an environment of its own, and the command that is printed is typed there.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import absolute, is_local, location, side_dir
from flows.recipe import Recipe, load_recipe
from flows.stage_graph import plan_stages
from flows.text_table import print_table
from stages.answer_plan import heldout_samples
from stages.artifact import Artifact
from stages.lmms_eval_task import HELDOUT, INSTALL, METRICS, MIN_PIXELS, LmmsEvalTask, WrittenTask, write_lmms_eval_task
from stages.predictions import counted, read_predictions
from stages.scoring.contract import Judged
from stages.scoring.names import OVERALL
from stages.scoring.summary import SCORE
from stages.scoring.table import get_metric
from stages.train import hf_dir_of

TASK = "athanor_heldout"
OTHERWISE = "exact_match"  # in lmms-eval, where our headline metric is not
_COLUMNS = ("key", "turn", "subset", "question", "references", "answer", "metric", "contaminated")
_HEADS = ("subset", "answers", "metric", "score", "in lmms-eval", "expected there")

Row = Mapping[str, Any]


def lmms_eval_command(args: argparse.Namespace) -> int:
    """Write the task; print what it is scored by, our own scores, and the command that runs it."""
    recipe = load_recipe(args.recipe, args.overrides)
    made = _made(recipe, args)
    directory = _out_dir(args.out, side_dir(args.root) / "lmms-eval" / made["evaluate"].dir.name)
    rows = counted(read_predictions(made["evaluate"].dir, _COLUMNS)).to_pylist()
    headlines = {row["subset"]: row["metric"] for row in rows}
    task = LmmsEvalTask(
        name=TASK,
        max_new_tokens=recipe.config.evaluate.max_new_tokens,
        metrics={subset: name if name in METRICS else OTHERWISE for subset, name in headlines.items()},
        asked={(row["key"], row["turn"]) for row in rows},
    )
    hf_dir = hf_dir_of(made["export"]).resolve()
    written = write_lmms_eval_task(directory, hf_dir, heldout_samples(made["convert"]), task)
    shown = score_rows(rows, task.metrics, made["evaluate"].manifest.stats["scores"])
    print_table("Our own evaluation", _HEADS, shown, sys.stdout.isatty())
    print(f"\n{_scored_otherwise(headlines, task.metrics)}")
    _print_how(written, directory)
    return 0


def _print_how(written: WrittenTask, directory: Path) -> None:
    questions = f"{written.num_questions} questions"
    if written.num_small:
        small = f"{written.num_small} of {questions} show a picture of fewer than {MIN_PIXELS:,} pixels"
        print(f"{small}, which lmms-eval enlarges: their scores cannot be compared.")
    print(f"Task:  {directory}  ({questions})")
    print(f"\nRun it where lmms-eval is ({INSTALL}, in an environment of its own);")
    print(f"without a GPU add ,device=cpu,device_map=cpu to the value of --model_args:\n\n{written.command}")


def _made(recipe: Recipe, args: argparse.Namespace) -> dict[str, Artifact]:
    """The artifacts of a run with these settings, by the names of their stages.

    Raises:
        InputError: the evaluation, or a stage before it, is not there.
    """
    planned, _ = plan_stages(recipe.config, args.root)
    made = {}
    for stage in planned:
        if stage.artifact is None:
            sets = [word for override in args.overrides for word in ("--set", override)]
            run = shlex.join(["athanor", "run", args.recipe, *sets, "--root", str(args.root)])
            raise InputError(f"{stage.name} of recipe {recipe.name} is not there yet ({stage.why}); make it by: {run}")
        made[stage.name] = stage.artifact
        if stage.name == "evaluate":
            break
    return made


def _out_dir(asked: str | None, default: Path) -> Path:
    """Where the task is written.

    Raises:
        InputError: no directory of this machine, or one with files of others that would be written over.
    """
    if asked is None:
        return default
    out = absolute(location(asked))
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
    """A row a subset, then those of all answers: ours, and what lmms-eval should find for the same answers.

    Args:
        rows: of predictions.parquet.
        metrics: subset -> its metric in lmms-eval.
        scores: of our own evaluation; its `overall` is the mean of the subsets, lmms-eval's that of a metric's answers.
    """
    found = []
    for subset, metric in sorted(metrics.items()):
        own = [row for row in rows if row["subset"] == subset]
        ours, name = own[0]["metric"], f"{metric}_{subset}"
        found.append((subset, str(len(own)), ours, _number(scores[subset].get(ours)), name, _score(metric, own)))
    found.append((OVERALL, str(len(rows)), SCORE, _number(scores[OVERALL].get(SCORE)), "", ""))
    for metric in sorted(set(metrics.values())):
        own = [row for row in rows if metrics[row["subset"]] == metric]
        found.append(("", str(len(own)), "", "", metric, _score(metric, own)))
    return found


def _score(metric: str, rows: Iterable[Row]) -> str:
    judged = [Judged(question=r["question"], references=tuple(r["references"]), answer=r["answer"]) for r in rows]
    return _number(get_metric(metric).score(judged))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _scored_otherwise(headlines: Mapping[str, str], metrics: Mapping[str, str]) -> str:
    """The line that says which subsets have another metric there."""
    others = [f"{subset} ({name})" for subset, name in sorted(headlines.items()) if metrics[subset] != name]
    if not others:
        return "lmms-eval scores every subset by the same metric."
    return f"lmms-eval scores by {OTHERWISE}, for want of our metric: {', '.join(others)}."
