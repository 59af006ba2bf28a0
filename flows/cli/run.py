"""`athanor run` and `athanor sweep`: run one recipe, or one for every combination of a grid of values, in this process.

Both show their progress, and print tables and the next commands to type at the end.
"""

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from dataset_builders.storage.store import StorePath, local_copy, location, side_dir
from flows.cli.terminal import print_table, raw_stdout
from flows.pipeline.flow import vlm_sft
from flows.pipeline.plan import Plan, first_lines
from flows.pipeline.progress import shown
from flows.pipeline.recipe import DEFAULT_RECIPE
from flows.pipeline.temporary_server import ends_with_server, start_prefect
from flows.service.reconcile import reconcile
from flows.service.sweep import check_grid, sweep
from flows.tracking.notes import score_text
from flows.tracking.record import MlflowState
from flows.tracking.servers import read_service
from flows.tracking.store import has_own_database
from stages.evaluate.predictions import PREDICTIONS
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.left_out import QUARANTINE, reason_words
from stages.shared.pages.report import REPORT_HTML
from stages.shared.scoring.names import PERPLEXITY
from trainer.contract.names import EXIT_FAILED


def run_command(args: argparse.Namespace) -> int:
    """Run a recipe to its end."""
    is_terminal = sys.stdout.isatty()
    for line in first_lines(args.plan):
        print(line, flush=True)
    grace = args.plan.config.execution.cluster.stop_grace_seconds
    with shown(raw_stdout() if is_terminal else None) as display:
        start_prefect()
        with ends_with_server(grace, display.close):
            reconcile(args.root)  # ends the flow runs of this root whose process was killed
            result = vlm_sft(args.plan)
    seconds = time.time() - psutil.Process().create_time()  # with the imports, since the user waited for them too
    recipe_words = [] if args.recipe == DEFAULT_RECIPE else [args.recipe]
    arguments = [*recipe_words, *(f"--set={text}" for text in args.overrides)]
    print_closing(result, args.plan, arguments, seconds, is_terminal)
    return 0


def sweep_command(args: argparse.Namespace) -> int:
    """Check every run of the grid, run them all and print the table. Return 1 if a run failed, else 0."""
    variants = check_grid(args.recipe, args.overrides, args.grid)
    print(f"{len(variants)} runs of recipe {variants[0].recipe.name}:")
    for variant in variants:
        print(f"  {variant.name}")
    is_terminal = sys.stdout.isatty()
    grace = max(variant.recipe.config.execution.cluster.stop_grace_seconds for variant in variants)
    with shown(raw_stdout() if is_terminal else None) as display:
        start_prefect()
        with ends_with_server(grace, display.close):
            result = sweep(args.recipe, args.overrides, args.grid, str(args.root))
    print_table("Sweep", result["columns"], result["rows"], is_terminal)
    if result["url"]:
        command = service_command(args.root)
        print(f"\nCompare them in MLflow: {result['url']}")
        if command:
            print(f"  which this command serves: {command}")
    if result["errors"]:
        print("\nFailed:")
        for line in result["errors"]:
            print(f"  {line}")
        print(f"{len(result['errors'])} of {len(variants)} runs failed; the same command runs those again.")
        return EXIT_FAILED
    return 0


def print_closing(
    result: dict[str, Any],
    plan: Plan,
    arguments: Sequence[str],
    seconds: float,
    is_terminal: bool,
) -> None:
    """Print the tables and the next commands.

    Args:
        arguments: the arguments of `athanor run` that repeat this run: the recipe and its settings.
    """
    root = plan.root
    rows = [
        (r["stage"], "reused" if r["reused"] else "made", f"{r['seconds']:.1f}", _below(r["dir"], root))
        for r in result["stages"]
    ]
    print_table(f"Stages, in {shorten(root)}", ("stage", "", "seconds", "directory"), rows, is_terminal)
    print_scores(result["scores"], result["counts"], is_terminal, result["headlines"])
    num_made = sum(not r["reused"] for r in result["stages"])
    lines = [*(f"Warning: {line}" for line in result["warnings"]), *left_out_lines(result["stages"])]
    print("".join(f"\n{line}" for line in lines))
    print(f"{num_made} of {len(rows)} stages made, {len(rows) - num_made} reused, {seconds:.0f} s in all.")
    print(f"Model:  {shorten(location(result['hf_dir']))}  (loads with transformers' from_pretrained)")
    learnt = result["learnt"]
    has_record, is_sent = result["mlflow_run"] is not None, result["is_sent"]
    for text in registration(result["registered_name"], result["refusals"], has_record, learnt, is_sent):
        print(text)
    print("\nNext:")
    for text, command in next_commands(result, plan, arguments):
        print(f"  {text}\n    {command}")


def left_out_lines(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each data stage that left out rows: their number, the reasons, the file that lists them.

    Args:
        stages: the name and the directory of each stage of the run, in order.
    """
    lines, kept = [], 0
    for stage in stages:
        manifest, quarantine = Artifact.load(location(stage["dir"])).manifest, location(stage["dir"]) / QUARANTINE
        if not quarantine.is_file():
            continue
        lost = sum(manifest.skips.values())
        kept = manifest.num_samples if manifest.shards else kept - lost  # plan_bins copies no samples
        if lost:
            noun = "rows" if manifest.stats.get("raw_rows") == kept + lost else "samples"
            counts = f"{lost} of {kept + lost} {noun} ({reason_words(manifest.skips)})"
            lines.append(f"{stage['stage']} left out: {counts}, each named in {shorten(quarantine)}")
    return lines


def registration(
    name: str, refusals: Sequence[str], has_record: bool, learnt: MlflowState, is_sent: bool = True
) -> list[str]:
    """Return the lines that say whether the model is registered.

    Args:
        refusals: one line per gate that failed.
        has_record: whether the run has a record, from which it is sent to MLflow.
        learnt: the answers that MLflow has given so far.
        is_sent: whether MLflow holds the whole run.
    """
    reasons = [*refusals, *([] if has_record else ["the run's record could not be written; see the warning above"])]
    if reasons:
        return [f"Not registered as {name}: {reason}" for reason in reasons]
    if not is_sent:
        return [f"Not registered as {name} yet: MLflow does not hold all of the run; see the warning above."]
    verdict = f": {learnt.verdict}" if learnt.verdict else ""
    return [f"Registered as {name} in MLflow{verdict}."]


def print_scores(
    scores: Mapping[str, Mapping[str, float]],
    counts: Mapping[str, Mapping[str, int]],
    is_terminal: bool,
    headlines: Mapping[str, Mapping[str, Any]],
) -> None:
    """Print one row per subset and one column per metric. The headline metric of a subset is shown with its interval.

    Args:
        headlines: subset -> its headline metric and the ends of the interval, under "metric", "low" and "high".
    """
    names = dict.fromkeys(metric for values in scores.values() for metric in values)
    metrics = [name for name in names if not name.startswith("mean_") and name != PERPLEXITY]  # those are in MLflow
    kinds = list(dict.fromkeys(kind for values in counts.values() for kind, count in values.items() if count))
    rows = []
    for subset, values in scores.items():
        head = headlines.get(subset)
        ends = {} if head is None else {head["metric"]: (head["low"], head["high"])}
        cells = [str(counts.get(subset, {}).get(kind, "")) for kind in kinds]
        rows.append((subset, *cells, *(score_text(values.get(metric), ends.get(metric)) for metric in metrics)))
    print_table("Scores on held-out samples", ("subset", *kinds, *metrics), rows, is_terminal)


def next_commands(result: dict[str, Any], plan: Plan, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs; the commands can be typed as they are."""
    dirs, root = {r["stage"]: location(r["dir"]) for r in result["stages"]}, plan.root
    athanor = program("athanor")
    picture, question = example_question(dirs["evaluate"], root)
    model = quoted(location(result["hf_dir"]))
    ask = f"{athanor} ask {model} {quoted(picture) if picture else '-'} {shlex.quote(question)}"
    commands = [("see which tokens were trained on (open in a browser)", shorten(dirs["tokenize"] / REPORT_HTML))]
    if result["mlflow_url"]:
        command = service_command(root)
        page = ("see the run in MLflow", result["mlflow_url"])
        commands.append((f"serve MLflow's pages; the run is then at {page[1]}", command) if command else page)
        if result["compare_url"]:
            when = ", at the same server" if command else ""
            text = f"compare it with the newest other run on the same data{when}"
            commands.append((text, result["compare_url"]))
    without = "ask the model (write the file of an image or a video in place of -, if the question is about one)"
    commands.append(("ask the model about an image" if picture else without, ask))
    lower = f"--set train.optim.lr={plan.config.train.optim.lr / 2:g}"  # the last --set of a field counts
    change = " ".join([f"{athanor} run", *map(shlex.quote, arguments), f"--root {quoted(root)}", lower])
    commands.append(("change one setting; only the stages that depend on it run again", change))
    return commands


def example_question(evaluate_dir: StorePath, root: StorePath) -> tuple[Path | None, str]:
    """Return the path of a held-out image, which is written below the root, and a question about only that image.

    The path is None if no held-out question has exactly one image.
    """
    table = pq.read_table(local_copy(evaluate_dir / PREDICTIONS), columns=["question", "turn", "num_images", "image"])
    for row in table.to_pylist():
        if row["num_images"] == 1 and row["turn"] == 0:
            path = side_dir(root) / "example.png"
            path.write_bytes(row["image"])
            return path, row["question"].strip()
    return None, table["question"][0].as_py() if len(table) else "Hello?"


def service_command(root: StorePath) -> str | None:
    """Return the command that serves the runs of a root to a browser. Return None if a server is already running, or
    if the runs are in a database of the user's, whose server athanor does not know."""
    is_unserved = has_own_database() and read_service(root) is None
    return f"{program('athanor')} up --root {quoted(root)}" if is_unserved else None


def program(name: str) -> str:
    """Return the command that starts a program of this environment from the current shell."""
    if shutil.which(name):
        return name
    return quoted(Path(sys.executable).parent / name)


def shorten(path: StorePath) -> str:
    """Return the path, relative to the current directory if it is below that directory."""
    return _below(str(path), Path.cwd())


def _below(path: str, directory: StorePath) -> str:
    return path.removeprefix(str(directory).rstrip("/") + "/")


def quoted(path: StorePath) -> str:
    return shlex.quote(shorten(path))
