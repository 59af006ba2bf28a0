"""The numbers of a root for Prometheus, at /metrics of MLflow's address, behind its password:

    athanor_runs{state="running"} 1.0
    athanor_training_loss{experiment="athanor-digits",run="fa4469067cb44d14"} 0.25

They are read anew at each request: runs and the nightly schedule from Prefect's database file, which the service always
has; trainings from the runs' records and the last rows of their metrics.jsonl; the disk of the root; and the GPUs of
this machine, where NVIDIA's driver is. The tables are those of Prefect 3.8.8; `tests/flows/prefect_server/test_runs.py`
compares them with what Prefect's client says.
"""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pynvml
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.tracking.record import live_path, load_record, records_dir
from flows.tracking.servers import NIGHTLY, prefect_home
from trainer.contract.result import MetricsRow, parse_metrics

PATH = "/metrics"
# Types of Prefect's states, and `late`, which Prefect calls a scheduled run that should have started.
STATES = (
    *("scheduled", "late", "pending", "running", "paused", "cancelling"),
    *("completed", "cancelled", "failed", "crashed"),
)
_RUNS = """
    SELECT CASE state_name WHEN 'Late' THEN 'late' ELSE lower(state_type) END AS state, count(*)
    FROM flow_run WHERE parent_task_run_id IS NULL AND state_type IS NOT NULL GROUP BY state
"""
_SUCCESS = """
    SELECT max(run.end_time) FROM flow_run AS run JOIN deployment ON deployment.id = run.deployment_id
    WHERE deployment.name = ? AND run.state_type = 'COMPLETED'
"""
_IS_ON = """
    SELECT max(schedule.active) FROM deployment_schedule AS schedule
    JOIN deployment ON deployment.id = schedule.deployment_id WHERE deployment.name = ?
"""
_TAIL_BYTES = 1 << 18  # the end of a metrics.jsonl that is read: many rows


def with_numbers(app: ASGIApp, root: Path) -> ASGIApp:
    """Return an application that also answers PATH with the numbers of a root."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await app(scope, receive, send)
            return
        text = await run_in_threadpool(generate_latest, RootNumbers(root))
        await Response(text, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)

    return answer


class RootNumbers(Collector):
    """The numbers of a root, in the form that Prometheus' own library writes.

    Args:
        root: the root, or the directory on this machine of a root in a store.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield each number with its labels.

        Raises:
            sqlite3.Error: Prefect's database has other tables or cannot be read.
        """
        database = prefect_home(self.root) / "prefect.db"
        if database.is_file():
            yield from _of_runs(database)
        yield from _of_trainings(self.root)
        free = shutil.disk_usage(self.root).free
        yield GaugeMetricFamily("athanor_root_free_bytes", "Free space on the disk of the root.", free)
        yield from _of_gpus()


def _of_runs(database: Path) -> Iterator[GaugeMetricFamily]:
    uri = f"{database.resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'deployment_schedule'").fetchone():
            return  # a first start has not made all tables yet
        counts = dict.fromkeys(STATES, 0) | dict(connection.execute(_RUNS).fetchall())
        ((success,),) = connection.execute(_SUCCESS, (NIGHTLY,))
        ((is_on,),) = connection.execute(_IS_ON, (NIGHTLY,))
    runs = GaugeMetricFamily("athanor_runs", "Flow runs that no other started, by their state now.", labels=["state"])
    for state, count in counts.items():
        runs.add_metric([state], count)
    yield runs
    yield GaugeMetricFamily("athanor_nightly_is_on", f"Whether the schedule of {NIGHTLY} is on.", int(is_on or 0))
    if success is not None:
        at = datetime.fromisoformat(success).replace(tzinfo=UTC).timestamp()
        about = f"End of the newest completed run of {NIGHTLY}, in seconds since 1970."
        yield GaugeMetricFamily("athanor_nightly_last_success_timestamp_seconds", about, at)


def _of_trainings(root: Path) -> Iterator[GaugeMetricFamily]:
    step, speed, loss, at = families = [
        GaugeMetricFamily(f"athanor_training_{name}", f"{about} of a running training.", labels=["experiment", "run"])
        for name, about in (
            ("step", "The newest step"),
            ("tokens_per_second", "Tokens a second over all ranks, without padding,"),
            ("loss", "The newest loss"),
            ("last_row_timestamp_seconds", "Time of the newest row of metrics.jsonl, in seconds since 1970,"),
        )
    ]
    for labels, row in _running_trainings(root):
        step.add_metric(labels, row.step)
        speed.add_metric(labels, row.tokens_per_second)
        loss.add_metric(labels, row.loss)
        if row.time_ms is not None:
            at.add_metric(labels, row.time_ms / 1000)
    yield from families


def _running_trainings(root: Path) -> Iterator[tuple[list[str], MetricsRow]]:
    """Yield (experiment and key of the run, its newest row) of the trainings whose run is going on."""
    for path in sorted(records_dir(root).glob("*.json")):
        # A record that cannot be read is told by the sender to MLflow. A training that ends takes its file away.
        with contextlib.suppress(OSError, ValueError):
            record = load_record(root, path.stem)
            live = live_path(root, record)
            if live is not None and record.status is None and not record.owner.is_dead():
                rows = parse_metrics(_tail(live))
                if rows:
                    yield [record.opening.experiment, path.stem], rows[-1]


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read()


def _of_gpus() -> Iterator[GaugeMetricFamily]:
    """Yield the use of this machine's GPUs; nothing without NVIDIA's driver."""
    names = {"utilization_ratio": "Share of the last second in which a kernel ran"}
    names |= {"memory_used_bytes": "Memory in use", "memory_total_bytes": "Memory in all"}
    families = {
        name: GaugeMetricFamily(f"athanor_gpu_{name}", f"{about}, by the number of the GPU.", labels=["gpu"])
        for name, about in names.items()
    }
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    for number in range(pynvml.nvmlDeviceGetCount()):
        # A GPU that is lost tells nothing, one that is cut into slices (MIG) only its memory.
        with contextlib.suppress(pynvml.NVMLError):
            device = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            families["memory_used_bytes"].add_metric([str(number)], memory.used)
            families["memory_total_bytes"].add_metric([str(number)], memory.total)
            share = pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
            families["utilization_ratio"].add_metric([str(number)], share)
    pynvml.nvmlShutdown()
    yield from families.values()
