"""Measurements of training steps: the seconds of a step's parts, numbers that layers report, their way to the host.

None of them makes the host wait for the device: times are events on the stream, sums stay on the device, and the host
reads the numbers of a step when it has launched the next one.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pkgutil import resolve_name
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from trainer.libraries.torch_private import foreach_zero

T = TypeVar("T")
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
                # The host waits here only if it is ahead of the device: the spans are those of earlier steps.
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


class Reports:
    """The reported sums of a rank's chunks, on the device.

    A sum keeps its tensor, because CUDA graphs add to it at a fixed address. If all its numbers are zero, it was not
    reported.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], torch.Tensor] = {}
        self._shared: dict[type, Any] = {}

    def shared(self, kind: type[T]) -> T:
        """Return the one object of a class that all modules with these reports share."""
        return self._shared.setdefault(kind, kind())

    def report(self, reduce: str, layer: int, values: torch.Tensor) -> None:
        """Add a vector of numbers that a layer reports; its index counts from 0 over the whole model.

        Args:
            reduce: "module:function" of the metrics: {layer: sums over steps and ranks} -> {name: number}.
        """
        # Without gradient it is an evaluation, or the first of two passes through a layer that is recomputed.
        if torch.is_grad_enabled():
            values, key = values.detach().double(), (reduce, layer)
            self._sums[key] = self._sums[key].add_(values) if key in self._sums else values.clone()

    def forget(self) -> None:
        if self._sums:
            foreach_zero(list(self._sums.values()))

    def sums(self) -> list[torch.Tensor]:
        """Return the sums, float64 vectors on the device."""
        return list(self._sums.values())

    def metrics(self, numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return the metrics of all ranks' reports, given this rank's `sums` one after the other; a collective of the
        hosts in `group`, or of the world."""
        # A sum of zeros is left out: this rank's tensor waits for a layer that did not report since the last line.
        mine, start = {}, 0
        for key, values in self._sums.items():
            stop = start + len(values)
            if any(numbers[start:stop]):
                mine[key] = list(numbers[start:stop])
            start = stop
        everybody: list[dict[tuple[str, int], list[float]]] = [mine]
        if dist.get_world_size() > 1:
            everybody = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(everybody, mine, group=group)
        sums: dict[str, dict[int, list[float]]] = defaultdict(dict)
        for (reduce, layer), values in (item for ranks in everybody for item in sorted(ranks.items())):
            before = sums[reduce].get(layer, [0.0] * len(values))
            sums[reduce][layer] = [a + b for a, b in zip(before, values, strict=True)]
        return {name: value for reduce, layers in sums.items() for name, value in resolve_name(reduce)(layers).items()}


class AsyncNumbers:
    """Numbers on their way to the host, (n,) of any dtype, which nobody changes afterwards. Sending them waits for
    nothing."""

    def __init__(self, numbers: torch.Tensor) -> None:
        # Whether the device computes them while the host continues. It is equal on all ranks.
        self.is_async = numbers.is_cuda
        self._numbers = numbers.to("cpu", non_blocking=True)  # from CUDA into page-locked memory
        if self.is_async:
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def tolist(self) -> list[float]:
        if self.is_async:
            self._arrival.synchronize()
        return self._numbers.tolist()
