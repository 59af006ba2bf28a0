"""Small artifacts of every stage that tracking handles, and a pipeline run that logs all of them to MLflow."""

import base64
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow import MlflowClient

from dataset_builders.contracts.manifest import Manifest, Parent
from flows.tracking.registry import DECISION_TAG, Contender
from flows.tracking.tracker import Opening, Tracker, open_run
from stages.shared.artifacts.artifact import Artifact
from tests.helpers.fake_trainer import metrics_row
from trainer.contract.names import METRICS_JSONL

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg=="
)
SCORES = {"digits": {"exact_match": 0.5}, "overall": {"exact_match": 0.75, "stop_rate": 1.0}}
CONFIG = {"train": {"optim": {"lr": 1e-3}, "num_steps": 3}, "convert": {"subsets": ["a", "b"]}, "long": "x" * 9000}
FIRST_MS = 1_700_000_000_000
EXPERIMENT, MODEL = "athanor-test", "athanor-test"


class Nobody:
    """A replacement of the sending thread that sends nothing, so that a test publishes by itself."""

    problem = "nobody sends"

    def follow(self, key) -> None: ...
    def wait(self, key, is_cancelled=False) -> bool:
        return True


class ServerClock:
    """The time of `flows.tracking.tracker` in a test with a slow server. While the server makes the sender wait for an
    answer, each sleep of the main thread takes two seconds on this clock, and a moment on the machine."""

    def __init__(self) -> None:
        self._skipped, self._answer_at, self._is_over = 0.0, 0.0, False

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._skipped += 2.0 if is_main and self._is_server_busy() else 0.0
        time.sleep(0.001 if is_main else seconds)

    def _is_server_busy(self) -> bool:
        return self.monotonic() < self._answer_at and not self._is_over

    def answer_after(self, seconds: float) -> None:
        """Return when the server may answer. Called by the sender's thread."""
        self._answer_at = self.monotonic() + seconds
        while self._is_server_busy():
            time.sleep(0.001)

    def end(self) -> None:
        """Let all answers come at once."""
        self._is_over = True


def make_artifact(root: Path, stage: str, fingerprint: str, **fields: Any) -> Artifact:
    directory = root / "artifacts" / stage / fingerprint
    directory.mkdir(parents=True, exist_ok=True)
    values = {"config": {"seed": 0}, "parents": {}} | fields
    Manifest(stage=stage, version=1, fingerprint=fingerprint, **values).write(directory)
    (directory / "report.html").write_text("<p>report</p>")
    (directory / "report.json").write_text("{}")
    return Artifact.load(directory)


def timed_row(step: int):
    """Return a row with the time that a trainer would have written."""
    return metrics_row(step, time_ms=FIRST_MS + 1000 * step)


def write_live(tracker: Tracker, rows, mode: str = "a", num_steps: int = 100) -> None:
    """Write rows of a running training as its trainer does, and name the file as its flow does. Mode "w" replaces the
    file."""
    path = tracker.root / "scratch" / METRICS_JSONL
    path.parent.mkdir(exist_ok=True)
    with path.open(mode) as file:
        file.writelines(row.model_dump_json() + "\n" for row in rows)
    tracker.follow(path, num_steps)


def make_trained(root: Path, fingerprint: str, num_steps: int) -> Artifact:
    artifact = make_artifact(root, "train", fingerprint, stats={"steps": num_steps})
    lines = [timed_row(step).model_dump_json() + "\n" for step in range(1, num_steps + 1)]
    (artifact.dir / METRICS_JSONL).write_text("".join(lines))
    return artifact


def make_evaluated(
    root: Path, fingerprint: str, num_answers: int = 100, num_wrong: int = 2, **more_stats: Any
) -> Artifact:
    parents = {"samples": Parent(name="convert", fingerprint="c" * 16, digest="c" * 64)}
    stats = {"scores": SCORES, "metrics": {"a": {"headline": "exact_match", "others": [], "reason": ""}}} | more_stats
    artifact = make_artifact(root, "evaluate", fingerprint, parents=parents, stats=stats)
    answers = {
        "key": [f"a/{i:08d}" for i in range(num_answers)],
        "turn": [0] * num_answers,
        "subset": ["a"] * num_answers,
        "question": ["Which digit?"] * num_answers,
        "reference": ["1"] * num_answers,
        "references": [["1"]] * num_answers,
        "pictures": [[]] * num_answers,
        "answer": ["1"] * (num_answers - num_wrong) + ["2"] * (num_wrong - 1) + [""],
        "score": [1.0] * (num_answers - num_wrong) + [0.0] * num_wrong,
        "image": [PNG if i % 2 else None for i in range(num_answers)],
    }
    pq.write_table(pa.table(answers), artifact.dir / "predictions.parquet")
    return artifact


def make_exported(root: Path, fingerprint: str) -> Artifact:
    stats = {"dtype": "float32", "parameters": {"language": 5}, "active_parameters": 5, "steps": 3, "files": {"a": "b"}}
    artifact = make_artifact(root, "export", fingerprint, stats=stats)
    (artifact.dir / "hf").mkdir(exist_ok=True)
    (artifact.dir / "hf" / "config.json").write_text("{}")
    (artifact.dir / "hf" / "model.safetensors").write_bytes(b"weights")
    return artifact


def open_tracker(root: Path, identity: str, name: str = "embedded", samples_host: bool = False) -> Tracker:
    opening = Opening(
        experiment=EXPERIMENT,
        name=name,
        identity=identity,
        params=CONFIG,
        tags={"athanor.recipe": "embedded", "athanor.data": "digits", "athanor.base_model": "random weights"},
        note="What it is.",
        recipe_yaml="name: embedded\n",
        samples_host=samples_host,
    )
    assert open_run(root, opening) == identity
    return Tracker(root, identity)


def tell_a_run(root: Path, identity: str, num_steps: int = 12) -> Tracker:
    """Make all tracking calls of a flow, from its start to its end, with its steps one by one."""
    tracker = open_tracker(root, identity)
    tracker.log_stage(make_artifact(root, "plan_bins", "b" * 16), dataset="training")
    write_live(tracker, [timed_row(step) for step in range(1, num_steps + 1)])
    tracker.log_stage(make_trained(root, "d" * 16, num_steps))
    exported = make_exported(root, "e" * 16)
    tracker.register(exported, make_evaluated(root, "f" * 16, 12), exported.dir / "hf", MODEL)
    tracker.finish("FINISHED")
    return tracker


def holdings(client: MlflowClient, identity: str) -> dict[str, Any]:
    """Return everything that MLflow holds of an identity, except values that differ each time: ids, paths, times."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    runs = client.search_runs([experiment.experiment_id], f"tags.`mlflow.athanor.identity` = '{identity}'")
    (run,) = runs
    run_id = run.info.run_id
    points = {
        name: [(m.step, m.value, m.timestamp if name == "loss" else 0) for m in client.get_metric_history(run_id, name)]
        for name in run.data.metrics
        if name != "timing/flow_seconds"
    }
    own = ("mlflow.athanor.creation", "mlflow.athanor.model_id", "mlflow.note.content", "mlflow.user", "mlflow.source")
    own += ("mlflow.runColor",)
    numbers = [str(v.version) for v in client.search_model_versions(f"name='{MODEL}'") if v.run_id == run_id]
    return {
        "runs": len(client.search_runs([experiment.experiment_id])),
        "status": run.info.status,
        "params": run.data.params,
        "tags": {key: value for key, value in run.data.tags.items() if not key.startswith(own)},
        "points": points,
        "timing/flow_seconds": len(client.get_metric_history(run_id, "timing/flow_seconds")),
        "inputs": [(item.dataset.name, item.dataset.digest) for item in run.inputs.dataset_inputs],
        "files": sorted(
            item.path for folder in ("stages/train", None) for item in client.list_artifacts(run_id, folder)
        ),
        "models": len(client.search_logged_models([experiment.experiment_id])),
        "versions": [(n, Contender.of(client, MODEL, n).tags.get(f"{DECISION_TAG}{n}")) for n in numbers],
        "aliases": {alias: int(v) for alias, v in client.get_registered_model(MODEL).aliases.items()},
        "note": len(run.data.tags["mlflow.note.content"].splitlines()),
    }
