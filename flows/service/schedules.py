"""The schedules whose runs would be refused, as `athanor up` tells them at its start, and `athanor status`.

A schedule keeps its parameters when athanor is upgraded, and the parameters of its deployment. Those of an older form,
or a setting that a recipe no longer has, would otherwise be told by a refused run each night alone.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dataset_builders.errors import InputError, shown
from dataset_builders.readers.source_files import nearest
from flows.pipeline.recipe import DEFAULT_RECIPE, expand
from flows.service.programs import ask_prefect
from flows.service.request import resolve_settings

# Parameters that are mappings; all others are texts.
_MAPPINGS = ("grid", "settings")
WAY_OUT = "edit the parameters of the schedule, or of its deployment, on Prefect's page"


def check_parameters(parameters: Mapping[str, Any], known: Collection[str]) -> None:
    """Check names and kinds of the parameters with which a deployment's flow would be called.

    Args:
        known: names of the flow's parameters.

    Raises:
        InputError: the flow cannot be called with them.
    """
    for name, value in parameters.items():
        if name not in known:
            raise InputError(f"no parameter is called {name!r}, only {', '.join(known)}{nearest(name, known)}")
        if not isinstance(value, dict if name in _MAPPINGS else str):
            raise InputError(f"{name}={shown(value)} is not a {'mapping' if name in _MAPPINGS else 'text'}")


def refused_schedules(prefect_api: str, login: str) -> Iterator[str]:
    """Yield a line for each active schedule whose runs would be refused, whatever data and models they may read; none
    if Prefect's server does not answer.

    Args:
        login: `user:password` of the server.
    """
    for deployment in ask_prefect(prefect_api, login, "deployments/filter"):
        known = deployment["parameter_openapi_schema"].get("properties", {})
        for schedule in deployment["schedules"]:
            if not schedule["active"] or deployment["paused"]:
                continue
            try:
                _check({**deployment["parameters"], **schedule["parameters"]}, known)
            except InputError as error:
                name = schedule["slug"] or schedule["schedule"].get("cron") or schedule["id"]
                yield f"schedule {name} of {deployment['name']}: its runs will be refused: {error}; {WAY_OUT}"


def _check(parameters: Mapping[str, Any], known: Collection[str]) -> None:
    check_parameters(parameters, known)
    recipe, lines = parameters.get("recipe", DEFAULT_RECIPE), parameters.get("set", "")
    for point in expand(parameters.get("grid", {})) if "grid" in known else [{}]:
        resolve_settings(recipe, lines, parameters.get("settings", {}), point)
