"""The time that each part of a step takes on the device."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

Span: TypeAlias = tuple[str, object, object]  # name, and the marks of its start and its end


class PartClock:
    """A clock that splits a step's time into consecutive parts: data, vision, language, optimizer.

    On CUDA the marks are events on the stream, so that timing waits for nothing.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._part: str | None = None
        self._mark: object = None
        self._spans: list[Span] = []
        # Called on any thread with each part when it begins, or with None if no part begins.
        self.on_switch: Callable[[str | None], None] | None = None

    def switch(self, part: str | None) -> None:
        """End the running part and begin `part`, or no part if None."""
        now = self.now()
        if self._part is not None:
            self._spans.append((self._part, self._mark, now))
        self._part, self._mark = part, now
        if self.on_switch is not None:
            self.on_switch(part)

    def switch_on_gradient(self, tensor: torch.Tensor, part: str) -> None:
        """Begin `part` when the backward pass reaches `tensor`."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.switch(part))

    def take(self) -> list[Span]:
        """Return the parts since the last call. The device may not have reached them."""
        spans, self._spans = self._spans, []
        return spans

    def seconds(self, spans: Iterable[Span]) -> dict[str, float]:
        """Return the sum of the seconds of each name; wait until the device has passed the spans."""
        seconds: dict[str, float] = defaultdict(float)
        for name, start, stop in spans:
            if self._cuda:
                stop.synchronize()
            seconds[name] += start.elapsed_time(stop) / 1e3 if self._cuda else stop - start
        return seconds

    def now(self) -> object:
        """Return a mark of this moment, on CUDA of the moment when the device has done everything up to it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
