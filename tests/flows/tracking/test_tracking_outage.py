"""A real MLflow server that goes away in the middle of a run and comes back."""

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest

from flows.tracking.record import load_record, now_ms, samples_path
from flows.tracking.store import connect
from flows.tracking.system import CPU_METRIC, INTERVAL_SECONDS
from flows.tracking.tracker import sender_of
from tests.helpers.fake_trainer import metrics_row
from tests.helpers.mlflow_server import MlflowServer
from tests.helpers.patience import wait_for
from tests.helpers.tracked_run import make_trained, open_tracker
from trainer.contract.names import METRICS_JSONL
from trainer.loop.metrics import MetricsWriter

pytestmark = pytest.mark.promise(
    "An MLflow that is away for five seconds, in the full tier for a minute, leaves no gap and no double point."
)

ROW_SECONDS = 0.25


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


class Training:
    """A training that writes a row of metrics every quarter of a second, and is followed as by the flow."""

    def __init__(self, root: Path, identity: str) -> None:
        self.tracker = open_tracker(root, identity, samples_host=True)
        self.directory = root / "scratch"
        self.directory.mkdir(exist_ok=True)
        self.followed = contextlib.ExitStack()
        self.followed.enter_context(self.tracker.follow(self.directory / METRICS_JSONL, 1000))
        self.step = 0
        self._writer = MetricsWriter(self.directory, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(ROW_SECONDS):
            self.step += 1
            self._writer.write(metrics_row(self.step))

    def end(self, root: Path) -> str:
        """Stop the training. Return the id of the MLflow run, once the run holds everything."""
        self._stop.set()
        self._thread.join()
        self.followed.close()
        trained = make_trained(root, "d" * 16, self.step)
        (trained.dir / METRICS_JSONL).write_bytes((self.directory / METRICS_JSONL).read_bytes())
        self.tracker.log_stage(trained)
        self.tracker.finish("FINISHED")
        assert sender_of(root).wait(self.tracker.key)
        return load_record(root, self.tracker.key).learnt.run_id


@pytest.mark.full
@pytest.mark.parametrize("seconds", [5, 60])
def test_a_server_that_is_down_leaves_no_hole_and_no_double_point(tmp_path, server, monkeypatch, seconds):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    training = Training(tmp_path, f"down-{seconds}")  # the server is shared, and a run is found by its identity
    wait_for(lambda: training.step >= 8, 120, "step 8")
    server.stop()
    before, stopped_ms = training.step, now_ms()
    time.sleep(seconds)
    assert training.step - before > seconds / ROW_SECONDS / 4, "the training goes on"
    started_ms = now_ms()
    server.start()
    there_again = training.step
    wait_for(lambda: training.step >= there_again + 8, 120, "eight steps more")
    run_id, client = training.end(tmp_path), connect(tmp_path)
    assert client.get_run(run_id).info.status == "FINISHED"
    for name in ("loss", "lr", "tokens_per_second", "memory_gb"):
        steps = [metric.step for metric in client.get_metric_history(run_id, name)]
        assert steps == list(range(1, training.step + 1)), name
    system = client.get_metric_history(run_id, CPU_METRIC)
    samples = samples_path(tmp_path, training.tracker.key).read_text().splitlines()
    # The last sample, at the end of the training, may be in the same second as the one before: one point then.
    assert samples and [metric.step for metric in system] == sorted({json.loads(line)["step"] for line in samples})
    is_sampled = any(stopped_ms < metric.timestamp < started_ms for metric in system)
    assert is_sampled or seconds < INTERVAL_SECONDS, "the machine is sampled while MLflow is down"
