"""The MLflow run of a pipeline: its name, tags and description, and its end if the work fails."""

import contextlib
import getpass
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml
from prefect.runtime import flow_run

from dataset_builders.contracts.manifest import fingerprint, flatten
from dataset_builders.errors import InputError
from dataset_builders.storage.store import absolute
from flows.pipeline.config import PipelineConfig
from flows.pipeline.plan import Plan
from flows.pipeline.processes import SERVICE_VARIABLE
from flows.pipeline.recipe import known_recipes, load_recipe
from flows.tracking.notes import run_name
from flows.tracking.record import FLOW_RUN_TAG, SWEEP_TAG
from flows.tracking.tracker import Opening, Tracker, open_run


@contextlib.contextmanager
def tracked(plan: Plan) -> Iterator[Tracker]:
    """Open the MLflow run of the block. It ends as FINISHED after the block, as FAILED after an error and as KILLED
    after a stop. An error of the input before the first stage leaves no run."""
    tracker = Tracker(plan.root, open_tracking(plan))
    try:
        yield tracker
    except InputError:
        tracker.finish("REFUSED")
        raise
    except Exception:
        tracker.finish("FAILED")
        raise
    except BaseException:
        tracker.finish("KILLED")
        raise
    tracker.finish("FINISHED")


def open_tracking(plan: Plan) -> str | None:
    """Start the MLflow run of a plan, and return the key that `Tracker` takes."""
    config, recipe, differs = plan.config, plan.recipe, plan.differs
    versions = {step.name: step.stage.version for step in plan.steps}
    digests = {name: item.digest for name, item in plan.given.items()}
    identity = fingerprint({"config": config.identity(), "versions": versions, "inputs": digests})
    differences = ", ".join(f"`{key}` = `{value}`" for key, value in differs.items())
    about = f"What differs: {differences}." if differs else "Nothing differs from it."
    again = "Run it again, with `recipe.yaml` from this run's artifacts:\n\n```\nathanor run ./recipe.yaml\n```"
    if (command := reproducing_command(config, recipe)) is not None:
        again = f"Run it again:\n\n```\n{command}\n```"
    source = source_version()
    tags = {
        "athanor.recipe": recipe,
        "athanor.data": config.data_name,
        "athanor.base_model": config.model if isinstance(config.model, str) else "random weights",
        "athanor.differs": ", ".join(f"{key}={value}" for key, value in differs.items()) or "nothing",
        "athanor.root": str(absolute(plan.root)),
        FLOW_RUN_TAG: str(flow_run.id or ""),
        "athanor.git_dirty": source.get("dirty", "unknown"),
        "mlflow.source.git.commit": source.get("commit", "unknown"),
        "mlflow.source.name": "athanor run",
    }
    tags |= {SWEEP_TAG: plan.sweep} if plan.sweep else {}
    if SERVICE_VARIABLE not in os.environ:  # all who may use a service have one password
        with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
            tags["mlflow.user"] = getpass.getuser()
    usual_name = run_name(recipe, differs)
    opening = Opening(
        experiment=config.mlflow_name,
        name=flow_run.name or usual_name,
        is_named=flow_run.name not in (None, usual_name),
        identity=identity,
        params=config.identity(),
        tags=tags,
        note=f"Recipe **{recipe}**. {about}\n\n{again}",
        execution_yaml=execution_yaml(config),
        recipe_yaml=yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False),
        registry=config.execution.registry,
        artifacts=config.execution.tracking.artifacts,
        samples_host=config.execution.cluster.is_here,
    )
    return open_run(plan.root, opening)


def execution_yaml(config: PipelineConfig) -> str:
    """Return the settings of execution, without unset ones."""
    return yaml.safe_dump(config.execution.model_dump(mode="json", exclude_none=True), sort_keys=False)


def reproducing_command(config: PipelineConfig, recipe: str) -> str | None:
    """Return the command line of exactly this configuration; None if the recipe is a file of the user's."""
    if recipe not in known_recipes():
        return None
    plain = flatten(load_recipe(recipe).config.model_dump(mode="json"))
    values = flatten(config.model_dump(mode="json"))
    sets = [f"--set={key}={_as_yaml(value)}" for key, value in values.items() if plain.get(key, ...) != value]
    try:
        if load_recipe(recipe, [text.removeprefix("--set=") for text in sets]).config != config:
            return None
    except InputError:
        return None
    words = [f"--set {shlex.quote(text.removeprefix('--set='))}" for text in sets]
    return " \\\n    ".join([f"athanor run {recipe}", *words])


def _as_yaml(value: object) -> str:
    """Return one line that YAML reads as the value. JSON does not work, since YAML reads its 1e-05 as a text."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def source_version(directory: Path = Path(__file__).parent) -> dict[str, str]:
    """Return {"commit": 40 hex digits, "dirty": "true" | "false"}; {} outside a checkout or without git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return {}
    status = _git(directory, "status", "--porcelain", "--untracked-files=normal")
    return {"commit": commit, "dirty": "true" if status else "false"}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
