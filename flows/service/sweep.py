"""A sweep: several runs of one recipe with a grid of overrides, one after the other, and a table of all runs.

Every run is a whole `vlm-sft` with an MLflow run of its own. The first run makes the stages that several runs share,
and the later runs reuse them.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect import flow, get_run_logger
from prefect.states import Completed, Failed, State

from dataset_builders.contracts.manifest import fingerprint, flatten
from dataset_builders.errors import InputError, first_line
from dataset_builders.storage.store import StorePath, location
from flows.pipeline.flow import vlm_sft
from flows.pipeline.plan import Plan
from flows.pipeline.prefect_pages import publish_sweep
from flows.pipeline.progress import display
from flows.pipeline.recipe import Recipe, expand, load_recipe, parse_grid
from flows.tracking.notes import run_name, score_text
from flows.tracking.tracker import compare_page
from stages.shared.artifacts.artifact import Artifact
from stages.shared.scoring.names import OVERALL


@dataclass(frozen=True, slots=True)
class Variant:
    """One point of the grid.

    Attributes:
        point: dotted field -> value of the checked configuration.
        recipe: the checked configuration. Its `differs` starts with the point's fields, and so does the run's name.
    """

    point: dict[str, object]
    recipe: Recipe

    @property
    def name(self) -> str:
        return run_name("", self.point).strip()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run that `vlm_sft` returned, or the one line that says why the run failed."""

    variant: Variant
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def make_variants(recipes: Sequence[tuple[dict[str, object], Recipe]]) -> list[Variant]:
    """Make the variants of a grid from its points and their checked configurations.

    Raises:
        InputError: two points are the same run, because their values are equal or their fields change no result.
    """
    variants, names = [], {}
    for raw_point, recipe in recipes:
        values = flatten({"config": recipe.config.model_dump(mode="json")})
        point = {dotted: values.get(f"config.{dotted}", value) for dotted, value in raw_point.items()}
        rest = {key: value for key, value in recipe.differs.items() if key not in point}
        variants.append(Variant(point, Recipe(recipe.name, recipe.config, {**point, **rest})))
        identity = repr(recipe.config.identity())
        if identity in names:
            raise InputError(
                f"grid: {variants[-1].name} and {names[identity]} are the same run; give each value once, and vary "
                "fields that change the result (those of execution do not)"
            )
        names[identity] = variants[-1].name
    return variants


def sweep_name(variants: Sequence[Variant]) -> str:
    """Return the name that all runs of a sweep have as a tag in MLflow: recipe, fields, and a digest of all points."""
    digest = fingerprint([variant.recipe.config.identity() for variant in variants])[:8]
    return f"{variants[0].recipe.name} by {', '.join(variants[0].point)} {digest}"


def run_variants(variants: Sequence[Variant], root: StorePath) -> list[Outcome]:
    """Run the variants one after the other. A failed run does not stop the later ones; SIGTERM and Ctrl-C do."""
    logger, outcomes, name = get_run_logger(), [], sweep_name(variants)
    for number, variant in enumerate(variants, 1):
        label, start = f"run {number} of {len(variants)}: {variant.name}", time.monotonic()
        logger.info("%s starts", label)
        display().started(label)
        try:
            result = vlm_sft(Plan.open(variant.recipe, root, name))
            outcomes.append(Outcome(variant, result))
        except Exception as error:
            outcomes.append(Outcome(variant, error=first_line(error)))
            logger.error("%s failed: %s", label, first_line(error))
        outcome = outcomes[-1]
        is_reused = not outcome.error and all(stage["reused"] for stage in outcome.result["stages"])
        failure = f"failed: {outcome.error}" if outcome.error else ""
        display().ended(label, is_reused, time.monotonic() - start, failure)
    return outcomes


def tabulate(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Return the columns, and one row per run: point, state, overall scores, last losses, stages made, seconds. The
    score by which models are compared is the first, and the best run; failed runs are the last."""
    fields = list(outcomes[0].variant.point)
    name, _, subset = outcomes[0].variant.recipe.config.execution.registry.metric.partition("/")

    def place(outcome: Outcome) -> tuple[bool, float]:
        score = outcome.result.get("scores", {}).get(subset or OVERALL, {}).get(name)
        return bool(outcome.error), math.inf if score is None else -score

    outcomes = sorted(outcomes, key=place)
    overall = [outcome.result.get("scores", {}).get(OVERALL, {}) for outcome in outcomes]
    metrics = [m for m in dict.fromkeys(m for scores in overall for m in scores) if not m.startswith("mean_")]
    metrics.sort(key=lambda metric: metric != name)
    rows = []
    for outcome, scores in zip(outcomes, overall):
        stages = outcome.result.get("stages", [])
        training = next((stage for stage in stages if stage["stage"] == "train"), None)
        losses = Artifact.load(location(training["dir"])).manifest.stats if training else {}
        rows.append(
            [
                *(str(outcome.variant.point[name]) for name in fields),
                "failed" if outcome.error else "finished",
                *(score_text(scores.get(metric)) for metric in metrics),
                *(score_text(losses.get(name)) for name in ("loss", "heldout_loss")),
                "" if outcome.error else f"{sum(not stage['reused'] for stage in stages)} of {len(stages)}",
                "" if outcome.error else f"{sum(stage['seconds'] for stage in stages):.0f}",
            ]
        )
    return [*fields, "state", *metrics, "loss", "held-out loss", "stages made", "seconds"], rows


def sweep_variants(variants: Sequence[Variant], root: StorePath) -> dict[str, Any]:
    """Run the variants and publish the table of their results.

    Returns:
        plain values: columns, rows, url, and errors with one line per failed run.
    """
    outcomes = run_variants(variants, root)
    columns, rows = tabulate(outcomes)
    errors = [f"{outcome.variant.name}: {outcome.error}" for outcome in outcomes if outcome.error]
    url = compare_page(root, [outcome.result["mlflow_run"] for outcome in outcomes if not outcome.error])
    publish_sweep(columns, rows, errors, url)
    return {"columns": columns, "rows": rows, "url": url, "errors": errors}


def closing_state(result: Mapping[str, Any]) -> State:
    """Return the state Failed if a run failed, else Completed. The table is published in both cases."""
    total, failed = len(result["rows"]), len(result["errors"])
    if failed:
        return Failed(message=f"{failed} of {total} runs failed; the others are in the table of the artifact sweep")
    return Completed(message=f"{total} runs finished")


def check_grid(recipe: str, overrides: Sequence[str], grid: Sequence[str]) -> list[Variant]:
    """Return the checked variants of a command line.

    Raises:
        InputError: the grid is wrong, or the configuration is wrong at one of its points.
    """
    return make_variants([(point, load_recipe(recipe, overrides, point)) for point in expand(parse_grid(grid))])


@flow(name="sweep", flow_run_name="{recipe} by {grid}", persist_result=False)
def sweep(recipe: str, overrides: list[str], grid: list[str], root: str) -> dict[str, Any]:
    """Run the sweep of a command line.

    Args:
        overrides: texts of the form `a.b=value`, with the value in YAML.
        grid: texts of the form `a.b=[v1,v2]`, with the list in YAML.

    Raises:
        InputError: see `check_grid`.
    """
    return sweep_variants(check_grid(recipe, overrides, grid), location(root))
