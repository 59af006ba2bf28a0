"""System metrics of this machine: MLflow's own monitors (psutil, pynvml)."""

import logging
import threading
from collections.abc import Callable, Mapping

from flows.tracking.store import connect  # noqa: F401  first: sets what mlflow reads at its import

# isort: split
from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

PREFIX = "system/"  # MLflow's page of system metrics shows names that begin so
INTERVAL_SECONDS = 10.0
_MONITORS = (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor)
log = logging.getLogger("athanor.tracking")


class SystemSampler:
    """Takes samples until `close`, in a thread of its own; never raises.

    Args:
        write: receives {"system/cpu_utilization_percentage": 12.5, ...} once per interval and at the end.
    """

    def __init__(self, write: Callable[[Mapping[str, float]], None], interval: float = INTERVAL_SECONDS) -> None:
        self._write, self._interval = write, interval
        self._monitors = [monitor for kind in _MONITORS if (monitor := _make(kind)) is not None]
        self.sample()  # the first sample begins the measurement of the CPU
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
        """All figures that can be read now."""
        values: dict[str, float] = {}
        for monitor in self._monitors:
            try:
                monitor.collect_metrics()
                values |= {f"{PREFIX}{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
                monitor.clear_metrics()
            except Exception as error:  # a device that went away
                log.debug("no figures of %s (%s)", type(monitor).__name__, error)
        return values

    def close(self) -> None:
        """Take a last sample and end."""
        self._closed.set()
        self._thread.join(5)


def _make(kind: type[BaseMetricsMonitor]) -> BaseMetricsMonitor | None:
    try:
        return kind()
    except Exception:  # no device, no driver, no pynvml
        return None
