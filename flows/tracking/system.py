"""Samples of the trainer's machine (CPU, memory, disk, network, GPU), taken by MLflow's own monitors (psutil, pynvml).

A sample is one line of JSON: its `step`, which is the seconds since the run was first opened, its `time_ms`, and its
metrics. MLflow's SystemMetricsMonitor is not used: it stops for ever at the first error of MLflow.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from flows.tracking.record import now_ms

CPU_METRIC = "usage/cpu_utilization_percentage"  # in every sample
INTERVAL_SECONDS = 10.0  # shortest pause between two samples
# Not "system/", since MLflow lists metrics of that name before the losses and scores of a run.
_PREFIX = "usage/"
log = logging.getLogger("athanor.tracking")


@contextlib.contextmanager
def sampled_host(path: Path, first_ms: int) -> Iterator[None]:
    """Append a sample to a file after each `pause` while the block lasts, and one at its end.

    Args:
        first_ms: time of the run's first opening, in milliseconds since 1970.
    """
    monitors, ended = [], threading.Event()
    for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        with contextlib.suppress(Exception):  # no device, no driver, no pynvml
            monitors.append(kind())
    _measure(monitors)  # the first call starts the measurement of the CPU

    def work() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(pause((now_ms() - first_ms) / 1000))
            moment = now_ms()
            sample = {"step": (moment - first_ms) // 1000, "time_ms": moment, **_measure(monitors)}
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(sample) + "\n")
            except OSError as error:
                log.warning("tracking: a sample of this machine is lost (%s); the pipeline goes on", error)

    thread = threading.Thread(target=work, name="host-samples", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)


def pause(age: float) -> float:
    """Return the seconds until the next sample of a run of this age, in seconds. The pauses grow, and so a day has some
    950 samples."""
    return max(INTERVAL_SECONDS, age / 200)


def _measure(monitors: Sequence[BaseMetricsMonitor]) -> dict[str, float]:
    """Return all metrics that can be read now."""
    values: dict[str, float] = {}
    for monitor in monitors:
        try:
            monitor.collect_metrics()
            values |= {f"{_PREFIX}{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        except Exception as error:  # for example a device that was removed
            log.debug("no figures of %s (%s)", type(monitor).__name__, error)
    return values
