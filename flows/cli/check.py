"""Checks of recipes and model directories that run before a command loads its libraries, which takes seconds.

This module must not import Prefect, MLflow, torch or transformers; `tests/flows/cli/test_refused.py` checks that.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from dataset_builders.errors import InputError
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import Recipe, expand, load_recipe, parse_grid
from flows.service.access import check_host
from flows.service.programs import parse_limits
from flows.tracking.servers import is_free
from stages.shared.artifacts.verify import check_written
from stages.shared.inputs.adapter_directory import open_model_to_answer
from stages.shared.inputs.model_directory import resolve_hf_dir


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe of a command line, with its `--set` options and the `--launcher` of `plan` applied.

    Raises:
        InputError: the recipe is wrong.
    """
    launcher = getattr(args, "launcher", None)
    overrides = [*args.overrides, *([f"execution.cluster.launcher={launcher}"] if launcher else [])]
    return load_recipe(args.recipe, overrides)


def open_plan(args: argparse.Namespace) -> None:
    """Put the open plan of the recipe into `args.plan`.

    Raises:
        InputError: the recipe, its model's directory, its data or its start adapter is wrong.
    """
    args.plan = Plan.open(recipe_of(args), args.root)


def check_points(args: argparse.Namespace) -> None:
    """Raise InputError if the grid is wrong, or if the recipe is wrong at one point of the grid."""
    for point in expand(parse_grid(args.grid)):
        load_recipe(args.recipe, args.overrides, point)


def check_model_dir(args: argparse.Namespace) -> None:
    """Raise InputError if the directory holds no model that can answer, if the adapter belongs to another model, or if
    a file of an artifact was changed."""
    _check_model_dir(args.model, args.adapter)


def check_chat(args: argparse.Namespace) -> None:
    """Raise InputError if a model of `chat` cannot answer, if Gradio is missing, or if the page's port is taken."""
    if find_spec("gradio") is None:
        raise InputError("chat needs the package gradio, which is not installed; pip install -e '.[chat]'")
    if len(args.models) > 2:
        raise InputError(f"{len(args.models)} models are too many; `athanor chat` takes one or two")
    if not 0 < args.port < 2**16 or not is_free("127.0.0.1", args.port):
        raise InputError(f"--port {args.port} of 127.0.0.1 cannot be listened on; give another port")
    for model in args.models[:-1]:
        _check_model_dir(model, None)
    _check_model_dir(args.models[-1], args.adapter)


def _check_model_dir(model: str, adapter: Path | None) -> None:
    hf_dir = resolve_hf_dir(model)
    check_written(hf_dir)
    if adapter is not None:
        check_written(adapter.resolve())
    open_model_to_answer(hf_dir, adapter)


def check_service(args: argparse.Namespace) -> None:
    """Raise InputError if the host or a limit of `up` is wrong."""
    check_host(args.host)
    parse_limits(args.limits)
