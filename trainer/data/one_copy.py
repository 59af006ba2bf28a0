"""Tensors that lie in one piece of memory, which a single copy brings to a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

_ALIGNMENT = 64  # bytes


class _Place(NamedTuple):
    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class OneCopy:
    """The memory of several tensors."""

    memory: torch.Tensor  # uint8 bytes of all tensors
    places: Mapping[str, _Place]  # where each tensor lies

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, pin: bool) -> "OneCopy":
        """Copy tensors into new memory, which is page-locked if `pin`."""
        places, start = {}, 0
        for name, tensor in tensors.items():
            places[name] = _Place(start, start + tensor.nbytes, tensor.dtype, tensor.shape)
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        copied = cls(torch.empty(start, dtype=torch.uint8, pin_memory=pin), places)
        for view, tensor in zip(copied.views().values(), tensors.values(), strict=True):
            view.copy_(tensor)
        return copied

    def views(self) -> dict[str, torch.Tensor]:
        return {
            name: self.memory[place.start : place.stop].view(place.dtype).view(place.shape)
            for name, place in self.places.items()
        }

    def to(self, device: torch.device) -> "OneCopy":
        """Return the same tensors on a device, copied asynchronously if pinned."""
        return OneCopy(self.memory.to(device, non_blocking=True), self.places)
