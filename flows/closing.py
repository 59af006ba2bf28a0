"""What a run prints at its end: stages, scores, where the model is, and the next commands to type."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dataset_builders.contracts.store import StorePath, local_copy, location, side_dir
from flows.recipe import Recipe
from flows.text_table import print_table
from stages.predictions import PREDICTIONS
from stages.reference_loss import PERPLEXITY
from stages.report import REPORT_HTML
from stages.tracking import server_command


def print_closing(
    result: dict[str, Any],
    root: StorePath,
    recipe: Recipe,
    again: Sequence[str],
    seconds: float,
    is_terminal: bool,
) -> None:
    """Print the tables and the next commands.

    Args:
        again: arguments of `athanor run` that ask for the same: the recipe, and what is set.
    """
    rows = [
        (r["stage"], "reused" if r["reused"] else "made", f"{r['seconds']:.1f}", _below(r["dir"], root))
        for r in result["stages"]
    ]
    print_table(f"Stages, in {shorten(root)}", ("stage", "", "seconds", "directory"), rows, is_terminal)
    print_scores(result["scores"], result["counts"], is_terminal)
    made = sum(not r["reused"] for r in result["stages"])
    print(f"\n{made} of {len(rows)} stages made, {len(rows) - made} reused, {seconds:.0f} s in all.")
    print(f"Model:  {shorten(location(result['hf_dir']))}  (loads with transformers' from_pretrained)")
    for text in registration(result["registered_name"], result["refused"], is_told=result["mlflow_run"] is not None):
        print(text)
    print("\nNext:")
    for text, command in next_commands(result, root, recipe, again):
        print(f"  {text}\n    {command}")


def registration(name: str, refused: Sequence[str], is_told: bool) -> list[str]:
    """Whether the model is registered, in lines.

    Args:
        refused: why the gates do not let it pass.
        is_told: there is a journal of what MLflow is told.
    """
    reasons = [*refused, *([] if is_told else ["what MLflow is told could not be written; see the warning above"])]
    return [f"Not registered as {name}: {reason}" for reason in reasons] or [f"Registered as {name} in MLflow."]


def print_scores(scores: dict[str, dict[str, float]], counts: dict[str, dict[str, int]], is_terminal: bool) -> None:
    """A row a subset, a column a metric."""
    metrics = list(dict.fromkeys(metric for values in scores.values() for metric in values))
    metrics = [metric for metric in metrics if not metric.startswith("mean_") and metric != PERPLEXITY]  # in MLflow
    kinds = list(dict.fromkeys(kind for values in counts.values() for kind, count in values.items() if count))
    rows = [
        (
            subset,
            *(str(counts.get(subset, {}).get(kind, "")) for kind in kinds),
            *("" if values.get(m) is None else f"{values[m]:.4f}" for m in metrics),
        )
        for subset, values in scores.items()
    ]
    print_table("Scores on held-out samples", ("subset", *kinds, *metrics), rows, is_terminal)


def next_commands(
    result: dict[str, Any], root: StorePath, recipe: Recipe, again: Sequence[str]
) -> list[tuple[str, str]]:
    """(what for, command) pairs that can be typed as they are."""
    dirs = {r["stage"]: location(r["dir"]) for r in result["stages"]}
    athanor = program("athanor")
    picture, question = example_question(dirs["evaluate"], root)
    model = quoted(location(result["hf_dir"]))
    ask = f"{athanor} ask {model} {quoted(picture) if picture else '-'} {shlex.quote(question)}"
    commands = [("see which tokens were learnt (open in a browser)", shorten(dirs["tokenize"] / REPORT_HTML))]
    if result["mlflow_url"]:
        command = server_command(root, program("mlflow"))
        page = ("see the run in MLflow", result["mlflow_url"])
        commands.append((f"see the run in MLflow: {result['mlflow_url']}", command) if command else page)
    if result["compare_url"]:
        commands.append(("set it beside the run before (with MLflow's server running)", result["compare_url"]))
    commands.append(("ask the model about a picture", ask))
    lower = f"--set train.optim.lr={recipe.config.train.optim.lr / 2:g}"  # of two the last counts
    change = " ".join([f"{athanor} run", *map(shlex.quote, again), f"--root {quoted(root)}", lower])
    commands.append(("change one setting; only what depends on it is made again", change))
    return commands


def example_question(evaluate_dir: StorePath, root: StorePath) -> tuple[Path | None, str]:
    """A held-out picture, written below the root, and a question about it alone; None where there is no such pair."""
    table = pq.read_table(local_copy(evaluate_dir / PREDICTIONS), columns=["question", "turn", "num_images", "image"])
    for row in table.to_pylist():
        if row["num_images"] == 1 and row["turn"] == 0:
            path = side_dir(root) / "example.png"
            path.write_bytes(row["image"])
            return path, row["question"].strip()
    return None, table["question"][0].as_py() if len(table) else "Hello?"


def program(name: str) -> str:
    """How to call a program of this environment from a shell here."""
    if shutil.which(name):
        return name
    return quoted(Path(sys.executable).parent / name)


def shorten(path: StorePath) -> str:
    """Relative to the current directory where that is shorter."""
    return _below(str(path), Path.cwd())


def _below(path: str, directory: StorePath) -> str:
    return path.removeprefix(str(directory).rstrip("/") + "/")


def quoted(path: StorePath) -> str:
    return shlex.quote(shorten(path))
