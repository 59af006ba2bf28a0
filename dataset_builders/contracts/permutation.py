"""A permutation of [0, n) that is computed, not stored: each index costs the same, however large n is.

It is a Feistel network (Luby and Rackoff 1988, "How to construct pseudorandom permutations from pseudorandom
functions") over pairs (left, right) with left < a, right < b and a * b >= n; the halves are added modulo a and b. A
result of n or more passes through the network again until it is below n. Both methods are from Black and Rogaway 2002,
"Ciphers with arbitrary finite domains" (generalized Feistel cipher, cycle walking). The round function is the finalizer
of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"). All arithmetic is on
64-bit integers, so every machine gives the same result.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

_ROUNDS = 8  # four rounds suffice for few queries (Luby and Rackoff); small halves need more
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MAX_SIZE = 1 << 62  # the largest size for which a * b fits into 64 bits


class KeyedPermutation:
    """One of the permutations of [0, size), chosen by a key of integers and texts."""

    def __init__(self, size: int, key: Sequence[int | str]) -> None:
        if not 1 <= size <= _MAX_SIZE:
            raise ValueError(f"a permutation of {size} values; it must be 1 to {_MAX_SIZE}")
        self.size = size
        left = math.isqrt(size - 1) + 1  # square root, rounded up
        self._left, self._right = np.uint64(left), np.uint64(-(-size // left))
        digest = hashlib.shake_256(repr([size, *key]).encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the values of the permutation, (m,) int64, at (m,) indices; both are in [0, size)."""
        values = self._network(np.asarray(places).astype(np.uint64))
        limit = np.uint64(self.size)
        # It ends: the network is a permutation too, so a walk from a value below the limit comes back below it.
        while len(outside := np.flatnonzero(values >= limit)):
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values // self._right, values % self._right
        for round_number, key in enumerate(self._keys):
            if round_number % 2:
                right = (right + _mix(left + key) % self._right) % self._right
            else:
                left = (left + _mix(right + key) % self._left) % self._left
        return left * self._right + right


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _FIRST_FACTOR
    values = (values ^ (values >> np.uint64(27))) * _SECOND_FACTOR
    return values ^ (values >> np.uint64(31))
