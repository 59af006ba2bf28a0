"""Ragged: tensors of different lengths, one a sample or image, as one tensor."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import overload

import torch

_SHOWN = 8  # lengths that a repr spells out


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Ragged:
    """n members, tensors that agree in all but their first size, laid end to end. Any length may be 0, and so may n.

    Lengths are Python integers and not a tensor: they say how to cut, which the host decides, so they must never be
    moved to a device, where reading them back would wait for it.

    Equal are those with the same lengths, dtype, device and values, as torch.equal has it (NaN differs from itself).
    There is no hash, for values may be written to.

    Attributes:
        values: (sum of lengths, ...).
        lengths: first size of each member.
        starts: (n + 1) where each member begins in values, and the end.

    Raises:
        ValueError: the lengths do not add up to the values.
    """

    values: torch.Tensor
    lengths: tuple[int, ...]
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        lengths = tuple(map(operator.index, self.lengths))
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "starts", tuple(accumulate(lengths, initial=0)))
        if lengths and min(lengths) < 0:
            place = next(place for place, length in enumerate(lengths) if length < 0)
            raise ValueError(f"member {place} has length {lengths[place]}")
        shape = self.values.shape
        if not shape or self.starts[-1] != shape[0]:
            raise ValueError(f"{self.starts[-1]} rows by lengths, but values are {tuple(shape)}")

    @classmethod
    def of(cls, members: Sequence[torch.Tensor], *, like: torch.Tensor | None = None) -> "Ragged":
        """Members laid end to end; a copy.

        Args:
            like: has the dtype, device and sizes after the first that the values get where there is no member.

        Raises:
            TypeError: a member is no tensor.
            ValueError: a member differs from the first in more than its length.
        """
        if not members:
            return cls(torch.empty(0) if like is None else like.new_empty(0, *like.shape[1:]), ())
        _check_alike("member", members)
        return cls(torch.cat(list(members)), tuple(map(len, members)))

    @classmethod
    def cat(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The members of all parts, in order; a copy.

        Raises:
            ValueError: there is no part, or one differs from the first in more than its lengths.
        """
        if not parts:
            raise ValueError("cat of nothing: no part says what the members look like")
        _check_alike("part", [part.values for part in parts])
        return cls(torch.cat([part.values for part in parts]), sum((part.lengths for part in parts), ()))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice | Iterable[int]) -> "Ragged": ...

    def __getitem__(self, index):
        """A member by its number; some of them by a slice or by their numbers, in that order, also more than once.

        A member and a slice of step 1 are views; all else is a copy. A list of bools is refused: it reads as a mask.

        Raises:
            IndexError: there is no such member.
            TypeError: no number of a member.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self[range(start, stop, step)]
            return Ragged(self.values[self.starts[start] : self.starts[stop]], self.lengths[start:stop])
        if not isinstance(index, Iterable):
            return self._member(index)
        return Ragged.of([self._member(place) for place in index], like=self.values)

    def _member(self, index: int) -> torch.Tensor:
        place = operator.index(index)
        if isinstance(index, bool):
            raise TypeError("a member's number is no bool; for a mask, give the numbers where it is true")
        if not -len(self) <= place < len(self):
            raise IndexError(f"member {place} of {len(self)}")
        place %= len(self)
        return self.values[self.starts[place] : self.starts[place + 1]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The members, as views."""
        return iter(self.values.split(self.lengths))

    def chunk(self, count: int) -> tuple["Ragged", ...]:
        """Views of ceil(n / count) members each, the last of what is left, as torch.chunk cuts: maybe fewer than count.

        Where there is no member, `count` empty ones.

        Raises:
            ValueError: count is not positive.
        """
        if count < 1:
            raise ValueError(f"cannot cut into {count} chunks")
        size = -(-len(self) // count)
        return tuple(self[i : i + size] for i in range(0, len(self), size)) if size else (self,) * count

    def repeat(self, times: int) -> "Ragged":
        """All members, then all again: a b a b, like Tensor.repeat. A copy."""
        return self[[*range(len(self))] * times]

    def repeat_interleave(self, times: int) -> "Ragged":
        """Each member several times in a row: a a b b, like torch.repeat_interleave. A copy."""
        return self[[place for place in range(len(self)) for _ in range(times)]]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Ragged":
        """The same lengths with changed values, such as `map(torch.Tensor.float)`; the first size must stay."""
        return Ragged(change(self.values), self.lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Ragged":
        """The same members on `device`; asynchronously where asked and pinned."""
        return self.map(lambda values: values.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Ragged":
        """The same members in page-locked memory."""
        return self.map(torch.Tensor.pin_memory)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        a, b = self.values, other.values
        return self.lengths == other.lengths and (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)

    __hash__ = None

    def __reduce__(self) -> tuple:
        # A view alone is pickled with the whole storage behind it: a slice of a batch would send the batch.
        values = self.values
        is_part = values.untyped_storage().nbytes() > values.numel() * values.element_size()
        return Ragged, (values.clone() if is_part else values, self.lengths)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:_SHOWN])) + (", ..." if len(self) > _SHOWN else "")
        values = self.values
        return f"Ragged({len(self)} members of lengths [{shown}], {tuple(values.shape)} {values.dtype} {values.device})"


def _check_alike(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that differ from the first in dtype, device or a size after the first."""
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} {number} is a {type(tensor).__name__}; for nothing, give a tensor of length 0")
        if tensor.dim() == 0:
            raise ValueError(f"{what} {number} has no first size; for one value, give a tensor of length 1")
        if tensor.shape[1:] != first.shape[1:]:
            raise ValueError(f"{what} {number} is {tuple(tensor.shape)}, but {what} 0 is {tuple(first.shape)}")
        kind, first_kind = (f"{t.dtype} on {t.device}" for t in (tensor, first))
        if kind != first_kind:
            raise ValueError(f"{what} {number} is {kind}, but {what} 0 is {first_kind}")
