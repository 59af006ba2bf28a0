"""MetricsSink: takes training metrics, and samples the machine while they come."""

from collections.abc import Callable, Sequence

from stages.tracking_system import SystemSampler
from trainer.contract import MetricsRow


class MetricsSink:
    """Writes rows to the tracking journal as they come, and system metrics until it is closed.

    Args:
        write: gets rows; returns at once and never raises.
        sampler: of the trainer's machine; None where the trainer is on another one.
    """

    def __init__(self, write: Callable[[Sequence[MetricsRow]], None], sampler: SystemSampler | None) -> None:
        self._write, self._sampler = write, sampler

    def __call__(self, rows: Sequence[MetricsRow]) -> None:
        """Take rows; returns in about a millisecond."""
        if rows:
            self._write(rows)

    def close(self) -> None:
        """No more rows come."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
