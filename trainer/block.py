"""Integers of many kinds in one array, so that they are allocated, pinned and moved at once."""

import struct
from collections.abc import Sequence

import numpy as np

_LINE = 8  # numbers: every part begins at a multiple of 64 bytes, for kernels are compiled by alignment too
Spans = dict[str, tuple[int, int]]  # where each part begins and ends


def joined(lists: dict[str, Sequence[int]], arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, Spans]:
    """Parts as one int64 array, with zeros between them, and where they lie in it.

    Args:
        lists: short ones.
        arrays: (n,) of integers of any size.
    """
    spans: Spans = {}
    numbers: list[int] = []
    for name, values in lists.items():
        begin = len(numbers)
        numbers += values
        spans[name] = begin, len(numbers)
        numbers += _FILLING[: -len(numbers) % _LINE]
    end = len(numbers)
    for name, array in arrays.items():
        spans[name] = end, end + len(array)
        end += len(array) + -len(array) % _LINE
    block = np.empty(end, np.int64)
    block[: len(numbers)] = np.frombuffer(struct.pack(f"{len(numbers)}q", *numbers), np.int64)  # np.array takes longer
    for name, array in arrays.items():
        begin, end = spans[name]
        block[begin:end] = array
        if end % _LINE:
            block[end : end + -end % _LINE] = 0
    return block, spans


_FILLING = [0] * _LINE
