"""Who needs which artifacts of a root: registered versions; runs that go on, may continue, or are not whole in MLflow;
recipes that a person names.

An artifact is known by its fingerprint, which is searched in texts: the addresses and tags of a version, the tags and
parameters of its run, the record of a run, a recipe that continues from an earlier model. A text that happens to hold
one fingerprint too many keeps an artifact, and no more.
"""

import contextlib
import re
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dataset_builders.contracts.manifest import fingerprint
from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.store import StorePath, without_userinfo
from flows.libraries.mlflow_private import RegisteredVersion, read_registry
from flows.pipeline.run_record import read_runs
from flows.tracking.record import FLOW_RUN_TAG, SWEEP_TAG, TrackedRun, now_ms, records_dir
from flows.tracking.servers import mlflow_database
from stages.shared.artifacts.artifact import stage_identity
from stages.shared.launchers.processes import Owner

if TYPE_CHECKING:
    from flows.pipeline.plan import Plan

KEPT_DAYS = 7.0  # for runs and work that may continue
DAY = 86_400.0  # seconds
_FINGERPRINT = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_SECONDS = 10.0  # for a writer of MLflow's database
_WAITS = "waits in Prefect"
_UNKNOWN = "so it is unknown which models are registered"


@dataclass(frozen=True, slots=True)
class Need:
    """Something that needs artifacts or unfinished work, and all from which these were made.

    Attributes:
        who: what it is, for people.
        fingerprints: what it names; other fingerprints may be among them.
        to_send: whether MLflow may still get every file of them, also the older checkpoints.
    """

    who: str
    fingerprints: frozenset[str]
    to_send: bool = False


@dataclass(frozen=True, slots=True)
class LiveRuns:
    """The runs of a root that go on, are on another host, where only that host can tell, or wait in Prefect.

    Attributes:
        tracked: key -> record.
        untracked: id -> state in words, of flow runs without such a record, as those of `prepare-data`, whose recipe is
            not known.
        begun: key and time of the last try of each run with a record, also of those that have ended.
    """

    tracked: dict[str, TrackedRun]
    untracked: dict[str, str]
    begun: set[tuple[str, int]]

    @property
    def sweeps(self) -> set[str]:
        """The sweeps of these runs."""
        return {sweep for record in self.tracked.values() if (sweep := record.opening.tags.get(SWEEP_TAG))}


def fingerprints_in(*texts: str) -> frozenset[str]:
    return frozenset(found for text in texts for found in _FINGERPRINT.findall(text))


def live_runs(root: Path, waiting: Collection[str] = ()) -> LiveRuns:
    """Return the runs that go on, from their records.

    Args:
        waiting: ids of the flow runs that wait in Prefect.
    """
    records = {key: record for key, _, record in _records(root) if record is not None}
    running = {key: each for key, each in records.items() if each.status is None and not each.owner.is_dead()}
    resumable = {key: each for key, each in records.items() if each.opening.tags.get(FLOW_RUN_TAG) in waiting}
    untracked = dict.fromkeys(waiting, _WAITS)
    for record in resumable.values():
        untracked.pop(record.opening.tags[FLOW_RUN_TAG], None)
    owners = {(record.owner.pid, record.owner.host) for record in running.values()}
    for run in read_runs(root):
        if not run.is_dead() and (run.pid, run.host) not in owners:
            untracked[run.flow_run_id] = _goes_on(run)
    return LiveRuns(resumable | running, untracked, {(key, each.opened_ms) for key, each in records.items()})


def needs_of(
    root: Path, live: LiveRuns, uri: str | None, recipes: Sequence[str] = (), days: float = KEPT_DAYS
) -> list[Need]:
    """Return all needs of a root but those of untracked runs.

    Args:
        uri: address of an MLflow to ask beside the root's own database; None: there is none.
        recipes: names or paths of the recipes to keep.
        days: for how long every run is kept after its last change.

    Raises:
        InputError: MLflow cannot be read, or a recipe is wrong or cannot be opened.
    """
    versions, has_run = registered(root, uri)
    needs = []
    for version in versions:
        aliases = f" ({', '.join(version.aliases)})" if version.aliases else ""
        needs.append(Need(f"{version.name} version {version.number}{aliases}", fingerprints_in(*version.texts)))
    for key, text, record in _records(root):
        if (who := _why_needed(key, record, live, has_run, days)) is not None:
            named = fingerprints_in(text)
            named |= _named_by_run(root, record) if key in live.tracked else set()
            needs.append(Need(who, named, to_send=record is None or record.is_waiting() or key in live.tracked))
    for name in recipes:
        needs.append(Need(f"recipe {name}", _named_by_recipe(root, name)))
    return [*dict.fromkeys(needs)]  # the MLflow at an address may be the root's own


def registered(root: Path, uri: str | None) -> tuple[list[RegisteredVersion], Callable[[str], bool]]:
    """Return the registered versions in the root's own database and in the MLflow at an address, and a function that
    tells whether one of them holds a run.

    Raises:
        InputError: one of them cannot be read, or there is none though a model was exported.
    """
    database = mlflow_database(root)
    versions: list[RegisteredVersion] = []
    run_ids: set[str] = set()
    if database.exists() and (database.is_dir() or database.stat().st_size):
        try:
            versions, run_ids = read_registry(database, _SECONDS)
        except sqlite3.Error as error:
            way_out = "end what holds it, or put a copy in its place"
            raise InputError(f"{database} cannot be read ({one_line(error)}), {_UNKNOWN}; {way_out}") from error
    elif not uri and any((root / "artifacts" / "export").glob("*")):
        way_out = "put it back, or set MLFLOW_TRACKING_URI to the MLflow that the runs were sent to"
        raise InputError(f"{database} is missing, {_UNKNOWN}; {way_out}")
    if not uri:
        return versions, run_ids.__contains__
    from flows.tracking.registry import versions_at  # imports MLflow, which takes seconds

    try:
        others, has_run = versions_at(uri)
    except Exception as error:  # every transport library has its own kinds
        way_out = "start it, or correct the address"
        shown = f"MLFLOW_TRACKING_URI={without_userinfo(uri)}"
        raise InputError(f"{shown} cannot be read ({one_line(error)}), {_UNKNOWN}; {way_out}") from error
    return [*versions, *others], lambda run_id: run_id in run_ids or has_run(run_id)


def _records(root: StorePath) -> Iterator[tuple[str, str, TrackedRun | None]]:
    """Yield key, text and record of each run; None for a record that cannot be read."""
    for path in sorted(records_dir(root).glob("*.json")):
        text, record = path.read_text(encoding="utf-8", errors="replace"), None
        with contextlib.suppress(ValidationError):
            record = TrackedRun.model_validate_json(text)
        yield path.stem, text, record


def is_to_be_sent(root: StorePath, fingerprint: str) -> bool:
    """Whether MLflow may still get files of an artifact, for a run that goes on, or that it does not hold whole."""
    return any(
        fingerprint in text and (record is None or record.status is None or record.is_waiting())
        for _, text, record in _records(root)
    )


def _goes_on(owner: Owner) -> str:
    return f"goes on (process {owner.pid} of {owner.host})"


def _why_needed(
    key: str, record: TrackedRun | None, live: LiveRuns, has_run: Callable[[str], bool], days: float
) -> str | None:
    """Return a run in words if it needs its artifacts, else None."""
    if record is None:
        return f"tracking/{key}.json, which cannot be read"
    name, run_id = record.opening.name, record.learnt.run_id
    if key in live.tracked:
        return f"run {name}, which {_goes_on(record.owner) if record.status is None else _WAITS}"
    if record.is_empty():
        return None
    if record.opening.tags.get(SWEEP_TAG) in live.sweeps:
        return f"run {name}, of a sweep that goes on"
    if record.is_waiting():
        return f"run {name}, until `athanor sync` has sent it"
    if run_id and not has_run(run_id):
        return f"run {name}, which is not in the MLflow that was asked"
    if now_ms() - record.changed_ms < days * DAY * 1000:
        return f"run {name}, of the last {days:g} days"
    return None


def _named_by_run(root: Path, record: TrackedRun) -> frozenset[str]:
    from flows.pipeline.config import PipelineConfig
    from flows.pipeline.plan import Plan
    from flows.pipeline.recipe import Recipe, read_yaml

    name = record.opening.name
    try:
        config = PipelineConfig.model_validate(read_yaml(record.opening.recipe_yaml, f"the recipe of run {name}"))
        return named_by(Plan.open(Recipe(name, config, {}), root))
    except (InputError, ValidationError) as error:
        why = f"run {name} {_goes_on(record.owner) if record.status is None else _WAITS}"
        why += f", and what it still needs is unknown ({one_line(error)})"
        raise InputError(f"{why}; wait for its end, or cancel it") from error


def _named_by_recipe(root: Path, name: str) -> frozenset[str]:
    from flows.pipeline.plan import Plan
    from flows.pipeline.recipe import load_recipe

    try:
        return named_by(Plan.open(load_recipe(name), root))
    except InputError as error:
        raise InputError(f"--keep {name}: {error}") from error


def named_by(plan: "Plan") -> frozenset[str]:
    """Return the fingerprints of a plan's finished artifacts, of the unfinished work that it would continue, and of the
    models and data that its recipe names."""
    plan.find_finished()
    made = {step.artifact.manifest.fingerprint for step in plan.steps if step.artifact is not None}
    next_steps = [step for step in plan.steps if step.artifact is None and step.missing() is None]
    begun = {fingerprint(stage_identity(step.stage, step.config, step.read())) for step in next_steps}
    return fingerprints_in(plan.config.model_dump_json()) | made | begun
