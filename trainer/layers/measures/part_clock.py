"""The time that each part of a step takes on the device."""

import time
from collections import defaultdict
from collections.abc import Callable

import torch


class PartClock:
    """A clock that splits a step's time into consecutive parts: data, vision, language, optimizer.

    On CUDA the marks are events on the stream, read once per log interval, so that timing costs no synchronisation.

    Attributes:
        on_switch: called on any thread with each part when it begins, or with None if no part begins.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._part: str | None = None
        self._mark: object = None
        self._spans: list[tuple[str, object, object]] = []
        self.on_switch: Callable[[str | None], None] | None = None

    def switch(self, part: str | None) -> None:
        """End the running part and begin `part`, or no part if None."""
        now = self._now()
        if self._part is not None:
            self._spans.append((self._part, self._mark, now))
        self._part, self._mark = part, now
        if self.on_switch is not None:
            self.on_switch(part)

    def switch_on_gradient(self, tensor: torch.Tensor, part: str) -> None:
        """Begin `part` when the backward pass reaches `tensor`."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.switch(part))

    def read(self) -> dict[str, float]:
        """Return the seconds of each part since the last read."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for part, start, stop in self._spans:
            seconds[part] += start.elapsed_time(stop) / 1e3 if self._cuda else stop - start
        self._spans.clear()
        return seconds

    def _now(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
