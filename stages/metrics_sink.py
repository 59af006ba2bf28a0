"""MetricsSink: takes training metrics at once, hands them on from a thread of its own, and never raises."""

import logging
import threading
from collections.abc import Callable, Sequence

from trainer.contract import MetricsRow

log = logging.getLogger("athanor.tracking")


class MetricsSink:
    """Buffers rows for a `send` that may be slow, or fail for a while.

    What could not be sent by the time of `close` is left: it lies in metrics.jsonl and is replayed from there.

    Args:
        send: gets (row, milliseconds since 1970 when it came in); raising means that none of them was sent.
        retry_seconds: wait after the first failure; doubled with each further one, up to a minute.
    """

    def __init__(
        self, send: Callable[[Sequence[tuple[MetricsRow, int]]], None], now_ms: Callable[[], int], retry_seconds=2.0
    ) -> None:
        self._send, self._now_ms, self._retry_seconds = send, now_ms, retry_seconds
        self._rows: list[tuple[MetricsRow, int]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="metrics-sink", daemon=True)
        self._thread.start()

    def __call__(self, rows: Sequence[MetricsRow]) -> None:
        """Take rows; returns at once."""
        now = self._now_ms()
        with self._changed:
            self._rows += [(row, now) for row in rows]
            self._changed.notify()

    def close(self, timeout_seconds: float = 10.0) -> int:
        """Send what is left, waiting at most this long; returns the number of rows that were not sent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_seconds)
        return len(self._rows)

    def _work(self) -> None:
        wait = self._retry_seconds
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._closing)
                batch, closing = list(self._rows), self._closing
            if not batch:
                return
            if self._sent(batch):
                wait = self._retry_seconds
                with self._changed:
                    del self._rows[: len(batch)]
            elif closing:
                return
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, timeout=wait)
                wait = min(2 * wait, 60.0)

    def _sent(self, batch: list[tuple[MetricsRow, int]]) -> bool:
        try:
            self._send(batch)
            return True
        except Exception as error:
            log.warning("tracking does not take metrics now (%s); training goes on, they are sent later", error)
            return False
