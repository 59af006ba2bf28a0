"""System metrics of this machine, from MLflow's own monitors (psutil, pynvml)."""

import logging
import threading
from collections.abc import Callable, Mapping

from flows.tracking.store import connect  # noqa: F401  before mlflow: sets variables that mlflow reads at its import

# isort: split
from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

PREFIX = "system/"  # MLflow's page of system metrics shows metrics with this prefix
INTERVAL_SECONDS = 10.0
_MONITORS = (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor)
log = logging.getLogger("athanor.tracking")


class SystemSampler:
    """A thread that takes samples until `close` is called. It never raises.

    Args:
        write: function that gets {"system/cpu_utilization_percentage": 12.5, ...} once per interval and at the end.
        interval: seconds between two samples.
    """

    def __init__(self, write: Callable[[Mapping[str, float]], None], interval: float = INTERVAL_SECONDS) -> None:
        self._write, self._interval = write, interval
        self._monitors = [monitor for kind in _MONITORS if (monitor := _make(kind)) is not None]
        self.sample()  # the first sample starts the measurement of the CPU
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system-metrics", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        is_closed = False
        while not is_closed:
            is_closed = self._closed.wait(self._interval)
            if values := self.sample():
                self._write(values)

    def sample(self) -> dict[str, float]:
        """Return all system metrics that can be read now."""
        values: dict[str, float] = {}
        for monitor in self._monitors:
            try:
                monitor.collect_metrics()
                values |= {f"{PREFIX}{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
                monitor.clear_metrics()
            except Exception as error:  # for example a device that was removed
                log.debug("no figures of %s (%s)", type(monitor).__name__, error)
        return values

    def close(self) -> None:
        """Take a last sample and end the thread."""
        self._closed.set()
        self._thread.join(5)


def _make(kind: type[BaseMetricsMonitor]) -> BaseMetricsMonitor | None:
    try:
        return kind()
    except Exception:  # no device, no driver, no pynvml
        return None
