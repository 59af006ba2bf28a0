"""MLflow as the pipeline sees it: one pipeline run is one MLflow run, known here by a key of our own.

Every call writes what it has to say into a journal on this machine's disk and returns; a thread of the process delivers
it (`tracking_sender.py`, `tracking_apply.py`). So MLflow may be down, slow or full: nothing waits for it and nothing is
lost. A call that cannot even be written down is logged and kept in `Tracker.problems`, and the pipeline goes on.
"""

import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset_builders.contracts.store import StorePath, absolute
from stages.artifact import Artifact
from stages.metrics_sink import MetricsSink
from stages.registry_config import RegistryConfig
from stages.tracking_journal import journal_of, this_process
from stages.tracking_notes import run_name
from stages.tracking_sender import PATIENCE_SECONDS, Replayed, replay_waiting, sender_of
from stages.tracking_store import compare_url, connect, server_command, server_url, store_digest, tracking_uri
from stages.tracking_system import SystemSampler
from trainer.contract import MetricsRow

__all__ = [
    "Opening",
    "Replayed",
    "Tracker",
    "compare_url",
    "connect",
    "open_run",
    "replay_waiting",
    "run_name",
    "server_command",
    "server_url",
    "tracking_uri",
]
LOCAL_PATIENCE_SECONDS = 60.0  # a file of this machine is slow at worst
KILLED_PATIENCE_SECONDS = 5.0  # a cancelled flow has to end
_URL_SECONDS = 5.0
log = logging.getLogger("athanor.tracking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What an MLflow run begins with.

    Attributes:
        experiment, name: of the MLflow run.
        identity: fingerprint of everything that decides the outcome; the same pipeline run again goes on in its run.
        params: nested config; becomes dotted parameters.
        tags: may change between two tries.
        note: description, in Markdown.
        recipe_yaml: the whole configuration, kept as a file of the run.
        registry: when its model becomes champion.
        samples_host: the trainer runs on this machine, so its system metrics are worth having.
    """

    experiment: str
    name: str
    identity: str
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    note: str = ""
    recipe_yaml: str = ""
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    samples_host: bool = True


def open_run(root: StorePath, opening: Opening) -> str | None:
    """Begin the MLflow run of a pipeline, or go on in the one that this identity had before.

    Returns:
        its key for `Tracker`; None where the journal cannot be written, which is logged.
    """
    data = {
        "experiment": opening.experiment,
        "name": opening.name,
        "identity": opening.identity,
        "params": dict(opening.params),
        "tags": dict(opening.tags),
        "note": opening.note,
        "recipe_yaml": opening.recipe_yaml,
        "registry": opening.registry.model_dump(mode="json"),
        "owner": this_process(),
        "creation": uuid.uuid4().hex,
    }
    journal = journal_of(root, opening.identity)
    journal.samples_host = opening.samples_host
    try:
        journal.append("open", data)
    except Exception as error:
        log.warning("tracking: no journal in %s (%s); the pipeline goes on without", journal.dir, error)
        return None
    sender_of(root).submit(journal)
    return opening.identity


def guarded(method: Callable) -> Callable:
    """Tracking never raises into the pipeline: what goes wrong is logged and kept in `problems`."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            log.warning(
                "tracking: %s failed (%s: %s); the pipeline goes on", method.__name__, type(error).__name__, error
            )
            self.problems.append(f"{method.__name__}: {error}")
            return None

    return call


class Tracker:
    """One MLflow run, by its key. Without one (`key` is None) every call does nothing."""

    def __init__(self, root: StorePath, key: str | None) -> None:
        self.root, self.key, self.problems = root, key, []
        self.journal = journal_of(root, key) if key is not None else None

    def _write(self, op: str, **data: Any) -> int:
        if self.journal is None:
            return 0
        number = self.journal.append(op, data)
        sender_of(self.root).submit(self.journal)
        return number

    @guarded
    def log_stage(self, artifact: Artifact, reused: bool, hf_dir: Path | None = None, name: str | None = None) -> None:
        """Fingerprint, manifest, reports and preview of a stage; a dataset becomes an input of the run.

        Args:
            hf_dir: model directory whose tokenizer spells tokens in the preview; None: it is looked for in the root.
            name: where a pipeline runs the stage more than once; None: the stage's own.
        """
        place = str(hf_dir.absolute()) if hf_dir else None
        self._write("stage", dir=_place(artifact), reused=reused, hf_dir=place, name=name)

    def sink(self) -> MetricsSink:
        """For training metrics, live; while it is open, the machine's own figures go with them."""
        sampler = None
        if self.journal is not None and self.journal.samples_host:
            sampler = SystemSampler(self._log_system)
        return MetricsSink(self._log_rows, sampler)

    @guarded
    def _log_rows(self, rows: Sequence[MetricsRow]) -> None:
        self._write("metrics", rows=[row.model_dump(exclude_none=True) for row in rows])

    @guarded
    def _log_system(self, values: Mapping[str, float]) -> None:
        self._write("system", values=dict(values))

    @guarded
    def replay_metrics(self, trained: Artifact) -> None:
        """The steps of a training's metrics.jsonl that the run does not hold, and the headline figures."""
        self._write("training", dir=_place(trained))

    @guarded
    def log_model(
        self,
        exported: Artifact,
        hf_dir: StorePath,
        scores: Mapping[str, Mapping[str, float | None]],
        name: str,
        refusals: Sequence[str] = (),
    ) -> str | None:
        """The exported directory as a logged model and a registered version that carries its scores.

        Args:
            hf_dir: its files with their card.
            refusals: why the model is not to be registered; it is logged all the same, and the run says why.

        Returns:
            what `log_evaluation` takes: the model's fingerprint.
        """
        about = {"hf_dir": str(absolute(hf_dir)), "scores": dict(scores), "name": name, "refusals": list(refusals)}
        if self._write("model", dir=_place(exported), **about):
            return exported.manifest.fingerprint
        return None

    @guarded
    def log_evaluation(self, evaluated: Artifact, model: str | None = None) -> None:
        """Scores of every subset, the overall ones under their bare names, and a table of answers with pictures."""
        self._write("scores", dir=_place(evaluated), has_model=model is not None)

    @guarded
    def log_comparison(self, compared: Artifact) -> None:
        """The gain over the model before training, and a table of the answers that differ most."""
        self._write("comparison", dir=_place(compared))

    @guarded
    def finish(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED. One that was finished before keeps its times.

        Waits a little for what MLflow has not taken yet; what is left then waits in the journal.
        """
        if (number := self._write("finish", status=status)) == 0:
            return
        is_remote = tracking_uri(self.root).startswith("http")
        patience = PATIENCE_SECONDS if is_remote else LOCAL_PATIENCE_SECONDS
        if status == "KILLED":
            patience = KILLED_PATIENCE_SECONDS
        if waiting := sender_of(self.root).wait(self.journal, number, patience):
            log.warning(
                "tracking: %d entries wait for MLflow; `athanor sync --root %s` sends them, and so does the next run",
                waiting,
                self.root,
            )

    def url(self, patience: float = _URL_SECONDS) -> str | None:
        """The run's page, on the server that is set, or on the one that `server_command` starts; None where MLflow has
        not taken the run after so many seconds."""
        if self.journal is None:
            return None
        deadline = time.monotonic() + patience
        sender = sender_of(self.root)
        while True:
            state = self.journal.load_state()
            if state.run_id is not None and state.store == store_digest(self.root):
                return f"{server_url(self.root)}/#/experiments/{state.experiment_id}/runs/{state.run_id}"
            if sender.has_failed() or time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    def compare_with_last(self) -> str | None:
        """MLflow's page that compares this run with the one started last before it, if there is one; after `finish`."""
        if self.journal is None:
            return None
        state = self.journal.load_state()
        if state.run_id is None or not state.compare:
            return None
        return compare_url([state.run_id, *state.compare], state.experiment_id, server_url(self.root))


def _place(artifact: Artifact) -> str:
    return str(absolute(artifact.dir))
