"""An exported model in MLflow: a logged model, a registered version, and the choice of the champion.

The aliases `candidate` (the newest version) and `champion` move; the reason is a tag of the version and of its MLflow
run. A decision is written down before the alias moves, so that an interrupted one is carried out, not taken again.
"""

import contextlib
from collections.abc import Mapping

from flows.tracking.config import RegistryConfig
from flows.tracking.store import store_lock, tracking_uri

# isort: split
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from dataset_builders.contracts.fingerprint import flatten
from dataset_builders.storage.store import StorePath, location
from flows.tracking.record import Registration
from flows.tracking.run_writer import RunWriter
from stages.artifacts.artifact import Artifact
from stages.scoring.names import flat_scores

CANDIDATE, CHAMPION = "candidate", "champion"
MODEL_TAG, _VERSION_TAG = "athanor.model_id", "athanor.model_version"
REASON_TAG = "athanor.champion"
_BEATEN_TAG = "athanor.beaten_version"  # on a version that becomes champion: the one before it, or "none"


def publish_model(writer: RunWriter, root: StorePath, registration: Registration, registry: RegistryConfig) -> bool:
    """Log the exported directory as a model and, if no gate failed, register it as a version with its scores.

    Returns:
        whether a version was registered now.
    """
    exported = Artifact.load(location(registration.exported))
    fingerprint = exported.manifest.fingerprint
    if writer.is_marked("export_model", fingerprint):
        return False
    tags = {"hf_dir": registration.hf_dir, "fingerprint": fingerprint}
    model_id = _logged_model(writer, exported, registration.name, tags)
    if registration.refusals:  # no mark: the same model is tried again with other gates
        writer.set_tags({MODEL_TAG: model_id, REASON_TAG: f"not registered: {'; '.join(registration.refusals)}"})
        return False
    tags |= {name: f"{value:.6g}" for name, value in flat_scores(registration.scores).items()}
    is_remote = tracking_uri(root).startswith("http")
    source = f"models:/{model_id}" if is_remote else location(registration.hf_dir).as_uri()
    version = register(writer.client, registration.name, source, writer.run_id, model_id, tags).version
    reason = promote(writer.client, root, registration.name, version, registry)
    writer.set_tags({MODEL_TAG: model_id, _VERSION_TAG: f"{registration.name}/{version}", REASON_TAG: reason})
    writer.mark("export_model", fingerprint)
    return True


def _logged_model(writer: RunWriter, exported: Artifact, name: str, tags: dict[str, str]) -> str:
    """The id of the run's logged model; it is made if there is none."""
    client, stats = writer.client, exported.manifest.stats
    same = client.search_logged_models([writer.experiment_id], f"tags.fingerprint = '{tags['fingerprint']}'")
    model_id = next((model.model_id for model in same if model.source_run_id == writer.run_id), None)
    if model_id is None:
        about = flatten({key: value for key, value in stats.items() if key != "files"})
        model = client.create_logged_model(
            writer.experiment_id,
            name=name,
            source_run_id=writer.run_id,
            tags=tags,
            params={key: str(value) for key, value in about.items()},
            model_type="hf_directory",
        )
        model_id = model.model_id
    client.finalize_logged_model(model_id, "READY")
    outputs = client.get_run(writer.run_id).outputs
    if not any(output.model_id == model_id for output in (outputs.model_outputs if outputs else ())):
        client.log_outputs(writer.run_id, [LoggedModelOutput(model_id, step=stats.get("steps") or 0)])
    return model_id


def register(
    client: MlflowClient, name: str, source: str, run_id: str, model_id: str, tags: Mapping[str, str]
) -> ModelVersion:
    """The version of a run's exported directory; it is made by the first call."""
    with contextlib.suppress(MlflowException):  # it may exist; if it could not be made, the next call says why
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
    with store_lock(root):  # so of two runs that end at once, the second meets the first one's champion
        aliases = client.get_registered_model(name).aliases
        champion = client.get_model_version(name, aliases[CHAMPION]) if CHAMPION in aliases else None
        if int(aliases.get(CANDIDATE, 0)) < int(number):
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
