"""Numbers that modules report during training steps, summed until a line of metrics.jsonl takes them."""

from collections import defaultdict
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.libraries.torch_private import foreach_zero

T = TypeVar("T")


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
