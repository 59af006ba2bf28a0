"""A request to a deployment, by a person or a schedule: the name of a recipe and the settings that differ from it, and
the checks that it changes only what it may.

The root is not part of a request. It belongs to the service, and the worker gets it from its environment.

A request comes from anybody who may fill in the form of the Prefect UI. A recipe and the worker's environment come from
the person who set up the service. So these rules hold for a request:

- Local paths (`data`, `model`, `start_adapter`), with links followed, must be below the root or below a directory of
  ATHANOR_DATA_DIRS (separated as in PATH). The person who starts `athanor up` sets this variable.
- URLs must be below one of ATHANOR_DATA_STORES (separated by spaces or commas), below a URL that the recipe names, or
  below the root. Hub names are allowed. The rows of a request's data may name objects of these stores alone
  (`dataset_builders/storage/row_objects.py`), or below the data itself.
- Processes and threads are limited to this machine's cores, or to the recipe's number if that is larger.
- RECIPE_ONLY settings must be as in the recipe, because they are code, or let other machines run or send code.

A value that equals the recipe's value passes, because the recipe itself is not checked.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dataset_builders.contracts.manifest import flatten
from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.row_objects import DATA_STORES_VARIABLE, STORE_URL, is_below, named_stores
from dataset_builders.storage.store import StorePath, absolute, is_local, location
from flows.pipeline.config import PipelineConfig
from flows.pipeline.processes import ROOT_VARIABLE
from flows.pipeline.recipe import Recipe, known_recipes, load_recipe

DATA_DIRS_VARIABLE = "ATHANOR_DATA_DIRS"
# Dotted settings that a request cannot change, each with everything below it.
RECIPE_ONLY = (
    "execution.cluster.job_file",  # lines of a shell script, or images, mounts and accounts of pods
    "execution.cluster.launcher",  # decides whose machines are used
    "execution.cluster.nodes",
    "execution.dask_address",  # the process unpickles the data that the scheduler sends
    "execution.model_code_sha256",  # accepts a model directory with code in it
    "execution.registry.other_heldout",  # makes a version the champion without a comparison
    "execution.registry.push_private",
    "execution.registry.push_to",  # gives the model away
)
# Settings that are numbers of processes or threads of this machine.
CORES_AT_MOST = (
    "execution.cluster.num_threads",
    "execution.cluster.processes",
    "execution.loader_workers",
    "execution.num_workers",
)
_PATHS = re.compile(r"data|model|start_adapter|data\.\d+\.source|(convert|data\.\d+)\.options\.image_root(\..+)?", re.S)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def service_root() -> StorePath:
    """Return the root of this worker's service.

    Raises:
        InputError: ATHANOR_ROOT is not set.
    """
    text = os.environ.get(ROOT_VARIABLE)
    if not text:
        raise InputError(
            f"{ROOT_VARIABLE} is not set, so this worker serves no root; start workers by `athanor up`, or set it"
        )
    return absolute(location(text))


def resolve_request(
    recipe: str,
    lines: str,
    settings: Mapping[str, object],
    root: StorePath,
    point: Mapping[str, object] = MappingProxyType({}),
) -> Recipe:
    """Return the checked configuration that a request asks for. See `resolve_settings`.

    Raises:
        InputError: see there; or the request changes what it may not.
    """
    resolved = resolve_settings(recipe, lines, settings, point)
    check_request_paths(resolved.config, root, load_recipe(recipe).config)
    return resolved


def resolve_settings(
    recipe: str, lines: str, settings: Mapping[str, object], point: Mapping[str, object] = MappingProxyType({})
) -> Recipe:
    """Return the configuration that a request asks for, without a look at the paths and other rights of this service.

    Args:
        recipe: a known name. A path is refused, because a request may come from anybody who sees the form.
        lines: a text `a.b=value`, as of `--set`, in each line; of a repeated field the last line counts.
        settings: dotted fields with their values. None, an empty box, keeps the value.
        point: dotted fields of a grid.

    Raises:
        InputError: something is wrong with the request, or two of the three give a field; the message names the field.
    """
    if recipe not in known_recipes():
        raise InputError(f"recipe={recipe!r} is not known; one of {', '.join(known_recipes())}")
    texts, given = list(filter(None, map(str.strip, lines.split("\n")))), without_null(settings)
    written = [text.partition("=")[0].strip() for text in texts]
    covered = [field for field in written for whole in (*given, *point) if f"{field}.".startswith(f"{whole}.")]
    if twice := [*covered, *(given.keys() & point.keys())]:
        raise InputError(f"{twice[0]} is given twice, or beside the whole of which it is a part; keep one of the two")
    return load_recipe(recipe, texts, {**given, **point})


def without_null(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that are given; the form sends null for an empty box."""
    return {dotted: value for dotted, value in settings.items() if value is not None}


def is_recipe_only(dotted: str) -> bool:
    """Whether a setting cannot be changed by a request."""
    return any(dotted == field or dotted.startswith(field + ".") for field in RECIPE_ONLY)


def check_request_paths(config: PipelineConfig, root: StorePath, recipe: PipelineConfig | None = None) -> None:
    """Check that a request changes only what it may.

    Args:
        config: the recipe with the request's settings.
        recipe: the recipe alone; if None, RECIPE_ONLY settings must have their defaults.

    Raises:
        InputError: a field may not have its value; the message names the field, the value and the way out.
    """
    base = _flat(recipe) if recipe else {}
    values = _flat(config)
    usual = base or flatten({"execution": PipelineConfig.model_fields["execution"].default.model_dump(mode="json")})
    for field in sorted(values.keys() | usual.keys()):
        if is_recipe_only(field) and values.get(field) != usual.get(field):
            raise InputError(f"{field}={values.get(field)!r} cannot be set by a request; put it in a recipe")
    cores = os.cpu_count() or 1
    for field in CORES_AT_MOST:
        if values[field] > (most := max(cores, base.get(field, 0))):
            raise InputError(f"{field}={values[field]} is more than a request may ask for here; give {most} or less")
    for field, value in values.items():
        if _PATHS.fullmatch(field) and isinstance(value, str) and value != base.get(field):
            _check_path(field, value, root, [str(base[name]) for name in ("data", "model") if name in base])


def _flat(config: PipelineConfig) -> dict[str, object]:
    """Return the dotted settings, with those of each of several sources of data."""
    values = flatten(config.model_dump(mode="json"))
    sources = values.get("data")
    for i, source in enumerate(sources if isinstance(sources, list) else ()):
        values |= flatten(source, f"data.{i}.")
    return values


def _check_path(field: str, text: str, root: StorePath, of_recipe: Sequence[str]) -> None:
    if ".options.image_root" in field:
        if text.startswith("/") or ".." in Path(text).parts:
            raise InputError(f"{field}={text!r} must be below the source; give a relative path without ..")
        return
    if "://" in text or "::" in text:
        stores = [*named_stores(), *filter(STORE_URL.fullmatch, [*of_recipe, str(root)])]
        if not is_below(text, stores):
            raise InputError(
                f"{field}={text!r} is not an address that a request may name; give one below "
                f"{' or '.join(stores) or 'a store of the service, which has none'}, add its store to "
                f"{DATA_STORES_VARIABLE} where the service is started, or put it in a recipe"
            )
        return
    if _HUB_NAME.fullmatch(text) and not os.path.lexists(text):
        return
    real, allowed = _resolve(field, text), list(_allowed(root))
    if not any(real.is_relative_to(directory) for directory in allowed):
        raise InputError(
            f"{field}={text!r} leads to {str(real)!r}, which a request may not name; give a path below "
            f"{' or '.join(map(str, allowed)) or 'an object store'}, add its directory to {DATA_DIRS_VARIABLE} where "
            "the service is started, or put it in a recipe"
        )


def _resolve(field: str, text: str) -> Path:
    try:
        return Path(text).expanduser().resolve()
    except (ValueError, RuntimeError, OSError) as error:  # not a path, a loop of links, an unknown user
        raise InputError(f"{field}={text!r} is not a path ({one_line(error)}); mend it") from error


def _allowed(root: StorePath) -> Iterator[Path]:
    if is_local(root):
        yield root.resolve()
    for text in os.environ.get(DATA_DIRS_VARIABLE, "").split(os.pathsep):
        if text.strip():
            yield Path(text).expanduser().resolve()
