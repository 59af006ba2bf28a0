"""`athanor bench`: lmms-eval's tasks asked of a model before and after training, by lmms-eval's own command.

The scores of a model of this root go into its MLflow run and its gates: a model that was not registered, because a gate
on a benchmark was not measured, is registered then. One of the tasks, `heldout`, has the questions of our own
evaluation; lmms-eval asks them from a local file.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, local_dir, side_dir
from flows.bench.asking import Question, ask_tasks, check_model_type
from flows.bench.environment import lmms_eval_python
from flows.bench.report import HEADS, score_rows, write_report
from flows.bench.results import bench_scores
from flows.bench.run_of_model import RunOfModel, run_of_model
from flows.cli.closing import registration
from flows.cli.text_table import print_table
from flows.tracking.config import BENCH, refusals
from flows.tracking.record import BenchScore, TrackedRun, find_place, with_benchmarks
from flows.tracking.tracker import Tracker
from stages.answer.plan import heldout_samples
from stages.artifacts.artifact import Artifact
from stages.evaluate.lmms_eval.task import LMMS_EVAL, METRICS, MIN_PIXELS, LmmsEvalTask, write_lmms_eval_task
from stages.evaluate.predictions import counted, read_predictions
from stages.inputs.hf_directory import check_hf_dir, resolve_hf_dir
from stages.release.hub import push_to_hub
from stages.scoring.metrics.contract import Judged
from stages.scoring.names import SAME_ANSWERS, flat_scores
from stages.scoring.table import get_metric

HELDOUT = "heldout"  # name of the task with our own held-out questions
_OTHERWISE = "exact_match"  # the metric for subsets whose headline metric lmms-eval lacks
_COLUMNS = ("key", "turn", "subset", "question", "references", "answer", "metric", "contaminated")

Row = Mapping[str, Any]


def bench_command(args: argparse.Namespace) -> int:
    """Ask the tasks of the model before training and of the trained model. Print, record and register."""
    run = run_of_model(args.model, args.root)
    tasks = tuple(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    after, before = _models(args, run, tasks)
    for hf_dir in filter(None, (after, before)):
        check_hf_dir(hf_dir)
        check_model_type(hf_dir)
    work = side_dir(args.root).resolve() / "bench"
    python = lmms_eval_python(args.python, work / f"lmms-eval-{LMMS_EVAL}")
    work /= run.evaluated.dir.name if run is not None else after.name
    labels, ours, task_dir = {}, {}, None
    if HELDOUT in tasks:
        labels, ours, task_dir = _write_heldout(run, work / "task")
        ours = ours if args.limit is None else {}
    question = Question(
        python=python,
        tasks=tasks,
        heldout=task_dir,
        is_offline=tasks == (HELDOUT,),
        limit=args.limit,
        model_args=args.model_args or "",
    )
    results = {}
    for name, hf_dir in (("before", before), ("after", after)):
        if hf_dir is not None:
            print(f"lmms-eval asks {', '.join(tasks)} of {hf_dir} (log: {work / name / 'lmms-eval.log'})", flush=True)
            results[name] = ask_tasks(question, hf_dir, work / name)
    scores = bench_scores(results["after"], results.get("before"), labels)
    print_table("Benchmarks", HEADS, score_rows(scores, ours), sys.stdout.isatty())
    report = write_report(work, scores, ours, question, {"before": before, "after": after})
    print(f"\nReport: {report}")
    return _record(args, run, scores, report)


def _models(args: argparse.Namespace, run: RunOfModel | None, tasks: Sequence[str]) -> tuple[Path, Path | None]:
    """Return the directories of the trained model and of the model before training, None if it is not to be asked.

    Raises:
        InputError: there is no task; the held-out task is asked of a model of no run; a directory does not exist.
    """
    if not tasks:
        raise InputError("--tasks is empty; name tasks of lmms-eval, or heldout")
    if HELDOUT in tasks and run is None:
        raise InputError(
            f"--tasks {HELDOUT}: no run in {args.root} made the model {args.model}; give the directory that "
            "`athanor run` printed, or other tasks"
        )
    before = resolve_hf_dir(args.before, "--before") if args.before else None
    if run is None:
        return resolve_hf_dir(args.model), before
    return run.hf_dir, before or run.base_dir


def _write_heldout(run: RunOfModel, directory: Path) -> tuple[dict[str, list[str]], dict[str, float], Path]:
    """Write the held-out task.

    Returns:
        task -> key of each question's sample; bench/heldout/METRIC -> the score by the same metric of the answers in
        our own evaluation; the task's directory.
    """
    rows = counted(read_predictions(run.evaluated.dir, _COLUMNS)).to_pylist()
    headlines = {row["subset"]: row["metric"] for row in rows}
    metrics = {subset: name if name in METRICS else _OTHERWISE for subset, name in headlines.items()}
    task = LmmsEvalTask(
        name=HELDOUT,
        max_new_tokens=run.max_new_tokens,
        metrics=metrics,
        questions={(row["key"], row["turn"]) for row in rows},
    )
    written = write_lmms_eval_task(directory, run.hf_dir, heldout_samples(run.samples), task)
    if written.num_small:
        small = f"{written.num_small} of {written.num_questions} held-out questions show an image of fewer than"
        print(
            f"{small} {MIN_PIXELS:,} pixels, which lmms-eval enlarges: their scores differ from our own evaluation's."
        )
    return {HELDOUT: list(written.keys)}, own_scores(rows, metrics), directory


def own_scores(rows: Sequence[Row], metrics: Mapping[str, str]) -> dict[str, float]:
    """Return bench/heldout/METRIC and bench/heldout/METRIC_SUBSET -> the score of the answers in our own evaluation.

    Args:
        rows: rows of predictions.parquet.
        metrics: subset -> its metric in lmms-eval.
    """
    parts: dict[str, list[Row]] = {}
    for row in rows:
        metric = metrics[row["subset"]]
        for name in (metric, f"{metric}_{row['subset']}"):
            parts.setdefault(name, []).append(row)
    return {f"{BENCH}/{HELDOUT}/{name}": _score(metrics[part[0]["subset"]], part) for name, part in parts.items()}


def _score(metric: str, rows: Sequence[Row]) -> float:
    judged = [Judged(question=r["question"], references=tuple(r["references"]), answer=r["answer"]) for r in rows]
    return get_metric(metric).score(judged)


def _record(args: argparse.Namespace, run: RunOfModel | None, scores: Mapping[str, BenchScore], report: Path) -> int:
    """Bring the scores into the run's MLflow run and gates, and print what came of it. Return the exit status."""
    if run is None or args.limit is not None:
        why = "no run of this root made the model" if run is None else "--limit asks only a part of the questions"
        print(f"Not recorded in MLflow or in gates: {why}.")
        return 0
    tracker = Tracker(args.root, run.key)
    was_refused = run.record.registration is not None and bool(run.record.registration.refusals)
    failed = gate_refusals(args.root, run.record, scores)
    is_sent = tracker.benchmarked(scores, report, lambda record: gate_refusals(args.root, record, scores))
    print(f"Recorded in the MLflow run {run.record.opening.name}" + ("" if is_sent else ", as soon as MLflow answers"))
    registered = run.record.registration
    if registered is not None:
        for line in registration(registered.name, failed, True, tracker.learnt(), is_sent):
            print(line)
    push_to = run.record.opening.registry.push_to
    if push_to is not None and was_refused and not failed:
        page = push_to_hub(local_dir(run.hf_dir), push_to, run.record.opening.registry.push_private)
        print(f"The model is at {page}")
    return 0


def gate_refusals(root: StorePath, record: TrackedRun, scores: Mapping[str, BenchScore]) -> list[str]:
    """Return one line per gate of a run that fails with new benchmark scores."""
    if record.registration is None:
        return []
    stats = {
        stage: Artifact.load(find_place(root, record.stages[stage].dir)).manifest.stats
        for stage in ("compare", "reload")
        if stage in record.stages
    }
    gains = stats["compare"]["gains"] if "compare" in stats else None
    why = {SAME_ANSWERS: stats["reload"]["reason"]} if "reload" in stats else {}
    measured = with_benchmarks(flat_scores(record.registration.scores), gains, {**record.benchmarks, **scores})
    return refusals(record.opening.registry.gates, *measured, why)
