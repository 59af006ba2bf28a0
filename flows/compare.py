"""Comparison: several runs of one recipe with a grid of overrides, one after the other, and a table of all of them.

Every run is a whole `vlm-sft` with an MLflow run of its own. Stages that runs share are made by the first and reused by
the rest, as in any run of a root.
"""

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.fingerprint import flatten
from dataset_builders.contracts.store import StorePath, location
from flows.deployed import refused
from flows.progress import display
from flows.recipe import DEFAULT_RECIPE, Recipe, load_recipe
from flows.request import Grid, Overrides, RecipeName, resolve_request, service_root
from flows.run_artifacts import publish_comparison
from flows.sft import vlm_sft
from stages.artifact import Artifact
from stages.tracking import compare_url, run_name

MAX_RUNS = 64
_RUN_PAGE = re.compile(r"(?P<base>.*)/#/experiments/(?P<experiment>[^/]+)/runs/(?P<run>[^/]+)")


@dataclass(frozen=True, slots=True)
class Variant:
    """One point of the grid.

    Attributes:
        point: dotted field -> value, as the checked configuration has it.
        recipe: whole; its `differs` begins with the point's fields, so that names of runs do.
    """

    point: dict[str, object]
    recipe: Recipe

    @property
    def name(self) -> str:
        return run_name("", self.point).strip()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run: what `vlm_sft` returns, or the one line that says why there is nothing."""

    variant: Variant
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`a.b=[1, 2]` of a command line, the list in YAML.

    Raises:
        InputError: it is not of that form.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        dotted, equals, values = text.partition("=")
        try:
            parsed = yaml.safe_load(values) if equals else None
        except yaml.YAMLError as error:
            raise InputError(f"--grid {text!r}: {values!r} is no YAML list; for example [1e-3, 3e-3]") from error
        if not dotted.strip() or not isinstance(parsed, list):
            raise InputError(f"--grid {text!r} is not of the form a.b=[v1,v2], for example train.optim.lr=[1e-3,3e-3]")
        if dotted.strip() in grid:
            raise InputError(f"--grid {dotted.strip()} is given twice; give all its values in one list")
        grid[dotted.strip()] = parsed
    return grid


def expand(grid: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Every combination of the grid's values, the last field the fastest.

    Raises:
        InputError: nothing to vary, a field without values or with something else than a list, too many runs.
    """
    if not grid:
        raise InputError("the grid is empty; give a field and its values, for example train.optim.lr=[1e-3,3e-3]")
    total = 1
    for dotted, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise InputError(f"grid: {dotted}={values!r} is no list of values to try, for example [1e-3, 3e-3]")
        total *= len(values)
    if total > MAX_RUNS:
        raise InputError(
            f"the grid has {total} combinations, more than {MAX_RUNS}; leave out values, or compare in parts"
        )
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def make_variants(recipes: Sequence[tuple[dict[str, object], Recipe]]) -> list[Variant]:
    """Put names to the checked configurations of a grid's points.

    Raises:
        InputError: two points are the same run, by equal values or because their fields change no result.
    """
    variants, seen = [], {}
    for asked, recipe in recipes:
        values = flatten({"config": recipe.config.model_dump(mode="json")})
        point = {dotted: values.get(f"config.{dotted}", value) for dotted, value in asked.items()}
        rest = {key: value for key, value in recipe.differs.items() if key not in point}
        variants.append(Variant(point, Recipe(recipe.name, recipe.config, {**point, **rest})))
        identity = repr(recipe.config.identity())
        if identity in seen:
            raise InputError(
                f"grid: {variants[-1].name} and {seen[identity]} are the same run; give each value once, and vary "
                "fields that change the result (those of execution do not)"
            )
        seen[identity] = variants[-1].name
    return variants


def run_variants(variants: Sequence[Variant], root: StorePath) -> list[Outcome]:
    """Run them one after the other. One that fails does not stop the others; SIGTERM and Ctrl-C do."""
    logger, outcomes = get_run_logger(), []
    for number, variant in enumerate(variants, 1):
        label, start = f"run {number} of {len(variants)}: {variant.name}", time.monotonic()
        logger.info("%s starts", label)
        display().started(label)
        recipe = variant.recipe
        try:
            outcomes.append(Outcome(variant, vlm_sft(recipe.config, str(root), recipe.name, recipe.differs)))
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            outcomes.append(Outcome(variant, error=line))
            logger.error("%s failed: %s", label, line)
        made = any(not stage["reused"] for stage in outcomes[-1].result.get("stages", [{"reused": False}]))
        failed = f"failed: {outcomes[-1].error}" if outcomes[-1].error else ""
        display().ended(label, not made, time.monotonic() - start, failed)
    return outcomes


def tabulate(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """A row a run: what differs, its overall scores, its last losses, how many stages it made, its time."""
    fields = list(outcomes[0].variant.point)
    overall = [outcome.result.get("scores", {}).get("overall", {}) for outcome in outcomes]
    metrics = [m for m in dict.fromkeys(m for scores in overall for m in scores) if not m.startswith("mean_")]
    rows = []
    for outcome, scores in zip(outcomes, overall):
        stages = outcome.result.get("stages", [])
        losses = _losses(stages)
        rows.append(
            [
                *(str(outcome.variant.point[name]) for name in fields),
                "failed" if outcome.error else "finished",
                *(_number(scores.get(metric)) for metric in metrics),
                *(_number(losses.get(name)) for name in ("loss", "heldout_loss")),
                "" if outcome.error else f"{sum(not stage['reused'] for stage in stages)} of {len(stages)}",
                "" if outcome.error else f"{sum(stage['seconds'] for stage in stages):.0f}",
            ]
        )
    return [*fields, "state", *metrics, "loss", "held-out loss", "stages made", "seconds"], rows


def _losses(stages: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    trained = next((stage for stage in stages if stage["stage"] == "train"), None)
    return Artifact.load(location(trained["dir"])).manifest.stats if trained else {}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def compare_link(outcomes: Sequence[Outcome]) -> str | None:
    """MLflow's page that compares exactly these runs; None where fewer than two have one."""
    pages = [outcome.result["mlflow_url"] for outcome in outcomes if outcome.result.get("mlflow_url")]
    parts = [_RUN_PAGE.fullmatch(page) for page in pages]
    if len(parts) < 2 or not all(parts):
        return None
    return compare_url([part["run"] for part in parts], parts[0]["experiment"], parts[0]["base"])


def compare_variants(variants: Sequence[Variant], root: StorePath) -> dict[str, Any]:
    """Run, tabulate, publish: what the flow of a service and that of the command line do.

    Returns:
        plain values: columns, rows, url, and errors: a line for each run that has failed.
    """
    outcomes = run_variants(variants, root)
    columns, rows = tabulate(outcomes)
    errors = [f"{outcome.variant.name}: {outcome.error}" for outcome in outcomes if outcome.error]
    url = compare_link(outcomes)
    publish_comparison(columns, rows, errors, url)
    return {"columns": columns, "rows": rows, "url": url, "errors": errors}


def closing_state(result: Mapping[str, Any]) -> State:
    """Failed where a run has failed; the table is there either way."""
    total, failed = len(result["rows"]), len(result["errors"])
    if failed:
        return Failed(
            message=f"{failed} of {total} runs failed; the others are in the table of the artifact comparison"
        )
    return Completed(message=f"{total} runs finished")


def _flow_run_name() -> str:
    given = flow_run.parameters
    return f"{given.get('recipe', '')} by {', '.join(given.get('grid') or {})}"[:250]


@flow(name="compare", flow_run_name=_flow_run_name, persist_result=False)
def compare_request(
    recipe: RecipeName = DEFAULT_RECIPE,
    grid: Grid = {},  # noqa: B006
    overrides: Overrides = {},  # noqa: B006
) -> Any:
    """A run of one recipe for every combination of a grid of values.

    Args:
        recipe: where to start from; the settings below say what each recipe has.
        grid: dotted fields with the values to try, for example {"train.optim.lr": [0.001, 0.003], "train.seed": [0, 1]}
        overrides: what all runs have that differs from the recipe. Leave a field empty to keep what the recipe says.
    """
    try:
        root = service_root()
        points = expand(grid)
        variants = make_variants([(point, resolve_request(recipe, overrides, root, point)) for point in points])
    except InputError as error:
        return refused(error)
    return closing_state(compare_variants(variants, root))


def check_grid(recipe: str, overrides: Sequence[str], grid: Sequence[str]) -> list[Variant]:
    """The variants that a command line asks for, all of them checked.

    Raises:
        InputError: a wrong grid, or a wrong configuration at one of its points.
    """
    return make_variants([(point, load_recipe(recipe, overrides, point)) for point in expand(parse_grid(grid))])


@flow(name="compare", flow_run_name="{recipe} by {grid}", persist_result=False)
def compare(recipe: str, overrides: list[str], grid: list[str], root: str) -> dict[str, Any]:
    """The same as a command line asks for it: `a.b=value` and `a.b=[v1,v2]`, the values in YAML.

    Raises:
        InputError: as `check_grid`.
    """
    return compare_variants(check_grid(recipe, overrides, grid), location(root))
