"""The registered model: a version for each exported directory, and who is its champion.

The aliases `candidate` (the newest version) and `champion` move; why one moved, or did not, is a tag of the version and
of its MLflow run. A decision is written down before the alias moves, so that an interrupted one is finished, never
taken again.
"""

import contextlib
from collections.abc import Mapping

from stages.registry_config import RegistryConfig
from stages.tracking_store import store_lock  # first: sets what mlflow reads at its import

# isort: split
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from dataset_builders.contracts.store import StorePath

CANDIDATE, CHAMPION = "candidate", "champion"
REASON_TAG = "athanor.champion"
_BEATEN_TAG = "athanor.beaten_version"  # on a version that becomes champion: the one before it, or "none"


def register(
    client: MlflowClient, name: str, source: str, run_id: str, model_id: str, tags: Mapping[str, str]
) -> ModelVersion:
    """The version of a run's exported directory; made once, however often it is asked for."""
    with contextlib.suppress(MlflowException):  # it may exist; where it could not be made, the next call says why
        client.create_registered_model(name)
    for version in client.search_model_versions(f"name='{name}'", max_results=1000):
        if version.run_id == run_id and version.tags.get("fingerprint") == tags["fingerprint"]:
            return version
    return client.create_model_version(name, source, run_id, dict(tags), model_id=model_id, await_creation_for=0)


def promote(client: MlflowClient, root: StorePath, name: str, number: str, config: RegistryConfig) -> str:
    """Give a version its aliases, once.

    Returns:
        the reason, for example "exact_match 0.9845 against 0.9721 of version 3: champion".
    """
    with store_lock(root):  # of two runs that end at once, the second meets the first one's champion
        candidate, champion = (_with_alias(client, name, alias) for alias in (CANDIDATE, CHAMPION))
        if candidate is None or int(candidate.version) < int(number):
            client.set_registered_model_alias(name, CANDIDATE, number)
        version = client.get_model_version(name, number)
        if (reason := version.tags.get(REASON_TAG)) is None:
            wins, reason = decide(version, champion, config)
            if wins:
                before = _number(champion)
                client.set_model_version_tag(name, number, _BEATEN_TAG, before)
            client.set_model_version_tag(name, number, REASON_TAG, reason)
            version = client.get_model_version(name, number)
        beaten = version.tags.get(_BEATEN_TAG)
        if beaten is not None and beaten == _number(champion):
            client.set_registered_model_alias(name, CHAMPION, number)
        return reason


def decide(version: ModelVersion, champion: ModelVersion | None, config: RegistryConfig) -> tuple[bool, str]:
    """Whether a version becomes champion, and why."""
    ours = _score(version, config.metric)
    if champion is None:
        return True, f"{config.metric} {_text(ours)}, no champion before: {CHAMPION}"
    theirs = _score(champion, config.metric)
    against = f"{config.metric} {_text(ours)} against {_text(theirs)} of version {champion.version}"
    if ours is not None and (theirs is None or (ours > theirs and round(ours - theirs - config.margin, 9) >= 0)):
        return True, f"{against}: {CHAMPION}"
    return False, f"{against}: {CANDIDATE} only, the margin is {config.margin:g}"


def _number(version: ModelVersion | None) -> str:
    return "none" if version is None else str(version.version)


def _score(version: ModelVersion, metric: str) -> float | None:
    try:
        return float(version.tags[metric])
    except (KeyError, ValueError):
        return None


def _text(score: float | None) -> str:
    return "unknown" if score is None else f"{score:.4f}"


def _with_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    number = client.get_registered_model(name).aliases.get(alias)
    return client.get_model_version(name, number) if number is not None else None
