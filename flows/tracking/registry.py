"""The exported model in MLflow: a logged model, a registered version, and the choice of the champion.

A version has the few tags by which a person filters. Its scores are metrics of its logged model, and what decisions
need are hidden tags of its run.

The aliases `candidate` (the newest version) and `champion` move from version to version. A decision and its reason are
stored before the alias moves, so that an interrupted decision is carried out later and not made again. Scores are
compared only if they are from the same held-out samples (HELDOUT_TAG).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from dataset_builders.contracts.manifest import flatten
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, absolute
from flows.libraries.mlflow_private import RegisteredVersion
from flows.tracking.config import RegistryConfig
from flows.tracking.notes import model_note, score_text, version_note
from flows.tracking.record import Opening, Registration, find_place
from flows.tracking.run_writer import HIDDEN, RunWriter
from flows.tracking.store import may_pass, store_lock
from stages.evaluate.predictions import PREDICTIONS, heldout_fingerprint
from stages.shared.artifacts.artifact import Artifact
from stages.shared.scoring.names import flat_scores

if TYPE_CHECKING:
    from stages.compare.comparison import Certainty

CANDIDATE, CHAMPION = "candidate", "champion"
MODEL_TAG, _VERSION_TAG = f"{HIDDEN}model_id", f"{HIDDEN}model_version"
REASON_TAG = "athanor.champion"
HELDOUT_TAG, EVALUATION_TAG = f"{HIDDEN}heldout", f"{HIDDEN}evaluation"
EXPORT_TAG = "fingerprint"  # of a version
ABOUT_TAGS = ("recipe", "data", "base_model")  # of a version; the names of its run's tags have "athanor." before these
# Each and the number of a version: why it is champion or not, and, if it is to become champion, the version of the
# previous champion, or "none".
DECISION_TAG, _BEATEN_TAG = f"{HIDDEN}decision.", f"{HIDDEN}beaten_version."
_NOT_COMPARED = "so that the two are not compared"
_WAY_OUT = "the same command with --set execution.registry.other_heldout=champion"


@dataclass(frozen=True, slots=True)
class Contender:
    """A version, with the tags of its run and the metrics of its logged model. A version that a person registered, or
    whose run or model was deleted, has none of them."""

    number: str
    run_id: str
    scores: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, client: MlflowClient, name: str, number: str) -> "Contender":
        """Read a version of the registered model `name`."""
        run_id = client.get_model_version(name, number).run_id or ""
        try:  # MLflow's databases do not store the id of a version's logged model
            tags = client.get_run(run_id).data.tags
            points = client.get_logged_model(tags.get(MODEL_TAG, "")).metrics or []
        except MlflowException as error:
            if may_pass(error):
                raise
            return cls(str(number), run_id)
        newest = sorted(points, key=lambda point: point.timestamp)
        return cls(str(number), run_id, {point.key: point.value for point in newest}, tags)


def log_model(writer: RunWriter, root: StorePath, registration: Registration) -> None:
    """Log the run's model, with the stats of the export as parameters. A tag of the run gets its id."""
    exported = Artifact.load(find_place(root, registration.exported))
    client, stats = writer.client, exported.manifest.stats
    tags = {"hf_dir": str(find_place(root, registration.hf_dir)), "fingerprint": exported.manifest.fingerprint}
    same = client.search_logged_models([writer.experiment_id], f"tags.fingerprint = '{tags['fingerprint']}'")
    model_id = next((model.model_id for model in same if model.source_run_id == writer.run_id), None)
    if model_id is None:
        model_id = client.create_logged_model(
            writer.experiment_id,
            name=registration.name,
            source_run_id=writer.run_id,
            tags=tags,
            params={key: str(value) for key, value in flatten(stats).items()},
            model_type="hf_directory",
        ).model_id
    client.finalize_logged_model(model_id, "READY")
    outputs = client.get_run(writer.run_id).outputs
    if not any(output.model_id == model_id for output in (outputs.model_outputs if outputs else ())):
        client.log_outputs(writer.run_id, [LoggedModelOutput(model_id, step=stats.get("steps") or 0)])
    writer.set_tags({MODEL_TAG: model_id})


def register_model(
    writer: RunWriter, root: StorePath, registration: Registration, source: str, opening: Opening
) -> bool:
    """Register the run's logged model, which has its scores, as a version, and decide whether it becomes champion.

    Args:
        source: address of the model's files.

    Returns:
        whether the decision is new to the run.
    """
    exported, evaluated = (
        Artifact.load(find_place(root, place)) for place in (registration.exported, registration.evaluated)
    )
    client, name, model_id = writer.client, registration.name, writer.tags[MODEL_TAG]
    metric = opening.registry.metric
    tags = {EXPORT_TAG: exported.manifest.fingerprint}
    tags |= {"score": f"{metric} {_text(flat_scores(registration.scores).get(metric))}"}
    tags |= {tag: opening.tags[f"athanor.{tag}"] for tag in ABOUT_TAGS if f"athanor.{tag}" in opening.tags}
    writer.set_tags({HELDOUT_TAG: heldout_fingerprint(evaluated), EVALUATION_TAG: evaluated.manifest.fingerprint})
    version = register(client, name, source, writer.run_id, model_id, tags).version
    reason = promote(client, root, name, version, opening.registry)
    model_page = f"#/experiments/{writer.experiment_id}/models/{model_id}"
    hf_dir = str(find_place(root, registration.hf_dir))
    note = version_note(reason, registration.scores, writer.page, model_page, hf_dir)
    client.update_model_version(name, version, note)
    is_new = writer.tags.get(REASON_TAG) != reason
    writer.set_tags({_VERSION_TAG: f"{name}/{version}", REASON_TAG: reason})
    return is_new


def standing(writer: RunWriter) -> str:
    """Return the present standing of a version that an earlier try of this run registered, for the closing line.

    For example "version 1 of an earlier run, the champion is version 3 now".
    """
    name, _, number = writer.tags.get(_VERSION_TAG, "").rpartition("/")
    if not number:
        return ""
    try:
        writer.client.get_model_version(name, number)
        aliases = writer.client.get_registered_model(name).aliases
    except MlflowException as error:
        if may_pass(error):
            raise
        return f"version {number} of an earlier run, which was deleted since"
    champion = str(aliases.get(CHAMPION, ""))
    place = "the champion still" if champion == number else f"the champion is version {champion} now"
    return f"version {number} of an earlier run, {place if champion else 'and there is no champion now'}"


def register(
    client: MlflowClient, name: str, source: str, run_id: str, model_id: str, tags: Mapping[str, str]
) -> ModelVersion:
    """Return the registered version of a run's exported directory. The first call makes the version."""
    with contextlib.suppress(MlflowException):  # it may exist; if it could not be made, the next call raises
        client.create_registered_model(name, description=model_note(name))
    for version in client.search_model_versions(f"name='{name}'", max_results=1000):
        if version.run_id == run_id and version.tags.get(EXPORT_TAG) == tags[EXPORT_TAG]:
            return version
    return client.create_model_version(name, source, run_id, dict(tags), model_id=model_id, await_creation_for=0)


def promote(client: MlflowClient, root: StorePath, name: str, number: str, config: RegistryConfig) -> str:
    """Decide on a version and give it its aliases. An earlier decision is kept.

    Returns:
        the reason, for example "exact_match 0.9845 against 0.9721 of version 3: champion".
    """
    with store_lock(root):  # if two runs end at the same time, the second is compared with the first one's champion
        aliases = client.get_registered_model(name).aliases
        champion = Contender.of(client, name, aliases[CHAMPION]) if CHAMPION in aliases else None
        if int(aliases.get(CANDIDATE, 0)) < int(number):
            client.set_registered_model_alias(name, CANDIDATE, number)
        version = Contender.of(client, name, number)
        reason, beaten = (version.tags.get(f"{tag}{number}") for tag in (DECISION_TAG, _BEATEN_TAG))
        # An open decision was left to the user, who has decided with `other_heldout` in the meantime.
        is_open = _NOT_COMPARED in (reason or "") and config.other_heldout == CHAMPION
        if reason is None or is_open:
            heldouts = [each.tags.get(HELDOUT_TAG) for each in (version, champion) if each is not None]
            is_comparable = None not in heldouts and len({*heldouts}) == 1
            certainty = _certainty_of(root, version, champion if is_comparable else None, config.metric)
            wins, reason = decide(version, champion, config, certainty, is_comparable)
            beaten = _number(champion) if wins else None
            decision = [RunTag(f"{DECISION_TAG}{number}", reason)]
            decision += [RunTag(f"{_BEATEN_TAG}{number}", beaten)] if wins else []
            client.log_batch(version.run_id, tags=decision)
        if beaten is not None and beaten == _number(champion):
            client.set_registered_model_alias(name, CHAMPION, number)
        return reason


def decide(
    version: Contender,
    champion: Contender | None,
    config: RegistryConfig,
    certainty: "Certainty | None",
    is_comparable: bool = True,
) -> tuple[bool, str]:
    """Decide whether a version becomes champion, and why.

    A version becomes champion if its score is better than the champion's by the margin, and certainly better:

    - The score is from at least `min_answers` answers.
    - If there is no champion, the interval of the score must be above 0.
    - If there is a champion, the interval of the lead over it on the same questions (paired bootstrap) must be above 0.
      If the champion's answers no longer exist, the interval of the score must not be wider than the lead.

    Args:
        certainty: certainty of the score. None means that the score is not computed from answers (a loss, or a rate of
            the generation), so that only the margin counts.
        is_comparable: whether both versions were scored on the same held-out samples.

    Returns:
        whether the version becomes champion, and the reason.
    """
    ours = version.scores.get(config.metric)
    about = f"{config.metric} {_text(ours, certainty)}"
    if ours is None:
        return False, f"{about}, which no score can be compared with: {CANDIDATE} only"
    if certainty is not None and certainty.num_answers < config.min_answers:
        few = f"{about} of {certainty.num_answers} answers, fewer than execution.registry.min_answers"
        return False, f"{few}={config.min_answers}: {CANDIDATE} only; hold out more samples (convert.min_heldout)"
    if champion is None:
        if certainty is not None and not certainty.score.low > 0:
            return False, f"{about}, no champion before, and the score is not surely above 0: {CANDIDATE} only"
        return True, f"{about}, no champion before: {CHAMPION}"
    if not is_comparable:
        other = f"{about} of other held-out samples than those of version {champion.number}"
        if config.other_heldout == CHAMPION:
            return True, f"{other}, in whose place it is put: {CHAMPION}"
        return False, f"{other}, {_NOT_COMPARED}: {CANDIDATE} only; {_WAY_OUT} makes it {CHAMPION}"
    theirs = champion.scores.get(config.metric)
    against = f"{about} against {_text(theirs)} of version {champion.number}"
    if theirs is None:
        return True, f"{against}: {CHAMPION}"
    if not (ours > theirs and round(ours - theirs - config.margin, 9) >= 0):
        return False, f"{against}: {CANDIDATE} only, the margin is {config.margin:g}"
    if doubt := _doubt(ours - theirs, certainty):
        return False, f"{against}: {CANDIDATE} only, {doubt}"
    return True, f"{against}: {CHAMPION}"


def _doubt(lead: float, certainty: "Certainty | None") -> str:
    """Return why a lead over the champion may be chance; "" if the lead is certain."""
    if certainty is None:
        return ""
    if certainty.lead is not None:
        low, high = certainty.lead.low, certainty.lead.high
        return "" if low > 0 else f"the lead of {lead:.4f} may be chance ({low:+.4f} to {high:+.4f})"
    width = certainty.score.high - certainty.score.low
    return "" if width <= lead else f"the lead of {lead:.4f} is smaller than the interval of the score, {width:.4f}"


def _certainty_of(root: StorePath, version: Contender, champion: Contender | None, metric: str) -> "Certainty | None":
    """Return the certainty of a version's score; None if its evaluation no longer exists or the score is not computed
    from answers."""
    from stages.compare.comparison import certainty_of  # the libraries of the metrics take a second to import

    ours, theirs = (None if each is None else _evaluation_of(root, each) for each in (version, champion))
    return None if ours is None else certainty_of(ours, theirs, metric)


def _evaluation_of(root: StorePath, version: Contender) -> Artifact | None:
    """Return the evaluation that a version's scores are from; None if it no longer exists."""
    directory = absolute(root) / "artifacts" / "evaluate" / version.tags.get(EVALUATION_TAG, "")
    with contextlib.suppress(InputError, FileNotFoundError):
        evaluated = Artifact.load(directory)
        return evaluated if (evaluated.dir / PREDICTIONS).is_file() else None
    return None


def versions_at(uri: str) -> tuple[list[RegisteredVersion], Callable[[str], bool]]:
    """Return all registered versions of the MLflow at an address, and a function that tells whether it holds a run.

    Raises:
        MlflowException: it does not answer, or not with success.
    """
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    @functools.cache
    def texts_of(run_id: str) -> tuple[str, ...] | None:
        """Return the values of a run's tags and parameters; None if there is no such run."""
        try:
            data = client.get_run(run_id).data
        except MlflowException as error:
            if may_pass(error):
                raise
            return None
        return (*data.tags.values(), *data.params.values())

    aliases: dict[tuple[str, int], list[str]] = {}
    for model in _all_pages(client.search_registered_models):
        for alias, number in sorted(model.aliases.items()):
            aliases.setdefault((model.name, int(number)), []).append(alias)
    versions = [
        RegisteredVersion(
            name=version.name,
            number=int(version.version),
            aliases=tuple(aliases.get((version.name, int(version.version)), ())),
            texts=(version.source or "", *version.tags.values(), *(texts_of(version.run_id or "") or ())),
        )
        for version in _all_pages(client.search_model_versions)  # whose own aliases are empty
    ]
    return versions, lambda run_id: texts_of(run_id) is not None


def _all_pages(search: Callable[..., Any]) -> Iterator[Any]:
    """Yield what a search of MLflow's client finds, page by page."""
    token = None
    while token != "":
        page = search(max_results=1000, page_token=token)
        yield from page
        token = page.token or ""


def _number(version: Contender | None) -> str:
    return "none" if version is None else version.number


def _text(score: float | None, certainty: "Certainty | None" = None) -> str:
    return "unknown" if score is None else score_text(score, certainty and (certainty.score.low, certainty.score.high))
