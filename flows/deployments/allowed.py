"""What a request may not change: paths that lead out of the root, and settings that only a recipe may have.

A request comes from anybody who sees the form of the Prefect UI. A recipe, as the worker's environment, comes from
whoever set the service up. So

- local paths (`data`, `model`) must end up, links followed, below the root or below a directory of ATHANOR_DATA_DIRS
  (separated as in PATH), which whoever starts `athanor up` sets;
- URLs must be of an object store; hub names are allowed;
- RECIPE_ONLY settings, which are code, or let other machines run or send code, must be as in the recipe.

A value that equals the recipe's passes: the recipe itself is not checked.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from dataset_builders.contracts.fingerprint import flatten
from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.store import StorePath, is_local
from flows.pipeline.config import PipelineConfig

DATA_DIRS_VARIABLE = "ATHANOR_DATA_DIRS"
# Dotted settings that a request cannot change, each with everything below it; the form leaves them out.
RECIPE_ONLY = (
    "execution.cluster.kubernetes",  # images, mounts and accounts of pods
    "execution.cluster.slurm",  # lines of a shell script
    "execution.dask_address",  # unpickles what the scheduler sends
    "execution.model_code_sha256",  # agrees to code
    "execution.registry.push_private",
    "execution.registry.push_to",  # gives the model away
)
_PATHS = ("data", "model", "convert.options.image_root")
_STORE_URL = re.compile(r"(s3a?|gs|gcs|hf|az|abfss?|oss|oci)://[A-Za-z0-9][A-Za-z0-9._@-]*(/[^\0]*)?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_recipe_only(dotted: str) -> bool:
    """Whether a setting cannot be changed by a request."""
    return any(dotted == field or dotted.startswith(field + ".") for field in RECIPE_ONLY)


def check_request_paths(config: PipelineConfig, root: StorePath, recipe: PipelineConfig | None = None) -> None:
    """Check that a request changes only what it may change.

    Args:
        config: the recipe with the request's overrides.
        recipe: the recipe without them; None: it is unknown, and RECIPE_ONLY settings must have their defaults.

    Raises:
        InputError: the field, its value and the way out.
    """
    base = flatten(recipe.model_dump(mode="json")) if recipe else {}
    values = flatten(config.model_dump(mode="json"))
    usual = base or flatten({"execution": PipelineConfig.model_fields["execution"].default.model_dump(mode="json")})
    for field in sorted(values.keys() | usual.keys()):
        if is_recipe_only(field) and values.get(field) != usual.get(field):
            raise InputError(f"{field}={values.get(field)!r} cannot be set by a request; put it in a recipe")
    for field in _PATHS:
        if isinstance(value := values.get(field), str) and value != base.get(field):
            _check_path(field, value, root)


def _check_path(field: str, text: str, root: StorePath) -> None:
    if field.endswith("image_root"):
        if text.startswith("/") or ".." in Path(text).parts:
            raise InputError(f"{field}={text!r} must be below the source; give a relative path without ..")
        return
    if "://" in text or "::" in text:
        if not _STORE_URL.fullmatch(text) or "::" in text or ".." in text.split("/"):
            raise InputError(
                f"{field}={text!r} is not an address that a request may name; give one of an object store "
                "(s3://, gs://, hf://, az://, abfs://), or put it in a recipe"
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
    except (ValueError, RuntimeError, OSError) as error:  # not a path, a ring of links, no such user
        raise InputError(f"{field}={text!r} is not a path ({one_line(error)}); mend it") from error


def _allowed(root: StorePath) -> Iterator[Path]:
    if is_local(root):
        yield root.resolve()
    for text in os.environ.get(DATA_DIRS_VARIABLE, "").split(os.pathsep):
        if text.strip():
            yield Path(text).expanduser().resolve()
