"""Bins: ordered lists of samples that share one packed sequence, planned in partitions.

    bins.json                          `BinsFile`: the partitions in order of their bins, with checksums
    bins/train-000-00000.arrow         the bins of one split, epoch and partition of the index, one row per bin

A partition is an Arrow IPC file of one record batch. It is not compressed, so that it can be mapped into memory. The
column `samples` is a list whose offsets give the start of each bin's samples. The column `sums` holds the `BinSums` of
each bin. A sample's row holds its shard, offset and size, so a reader needs only the plan and the shards.

Bin numbers of a split start at 0 and run through all its epochs. If training takes more epochs than are planned, the
planned epochs are repeated. `KeyedPermutation` is the order in which partitions and trainings take them.
"""

import bisect
import hashlib
import itertools
import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from dataset_builders.contracts.manifest import read_format
from dataset_builders.contracts.sample import SPLITS, Split
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import INDEX_SCHEMA, SIZES
from dataset_builders.errors import InputError, damaged
from dataset_builders.storage.files import atomic_path, sha256_file, write_json
from dataset_builders.storage.store import StorePath, local_copy, make_dir

FORMAT_VERSION = 2
BINS = "bins.json"
_FOLDER = "bins"
_ROUNDS = 8  # four rounds suffice for few queries (Luby and Rackoff); small halves need more
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MAX_SIZE = 1 << 62  # the largest size for which a * b fits into 64 bits
# Repeated texts are stored once, in a dictionary. The split is not a column: it is a property of the partition.
_REPEATED = {"subset", "shard"}
_SAMPLE = pa.struct(
    [
        pa.field(f.name, pa.dictionary(pa.int32(), pa.string()) if f.name in _REPEATED else f.type)
        for f in INDEX_SCHEMA
        if f.name != "split"
    ]
)
# The fields of `BinSums` are stored next to each other, so that reading one bin's sums touches one memory location.
BINS_SCHEMA = pa.schema([("sums", pa.list_(pa.float64(), 7)), ("samples", pa.list_(_SAMPLE))])


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A sample of a bin and its byte range in the tokenized artifact; `checksum` is xxh3_64 of the record's bytes."""

    key: str
    shard: str
    offset: int
    size: int
    num_tokens: int
    num_loss_tokens: int
    num_patches: int
    num_images: int
    checksum: int


_REF_FIELDS = tuple(SampleRef.__dataclass_fields__)
Bin = tuple[SampleRef, ...]


class BinSums(NamedTuple):
    """The sums over the samples of bins: numbers for one bin, or (m,) arrays for m bins."""

    num_samples: int | np.ndarray
    num_tokens: int | np.ndarray  # without padding
    num_loss_tokens: int | np.ndarray  # trained on, and predicted: the first token of a sample is not
    num_patches: int | np.ndarray  # of the vision encoder, before merging
    num_images: int | np.ndarray
    tokens_squared: int | np.ndarray  # sum over samples of tokens^2
    patches_squared: float | np.ndarray  # sum over samples of patches^2 / images, as if a sample's images had one size


class BinPartition(StrictModel):
    """One entry of bins.json: a file that holds some of the plan's bins."""

    name: str = Field(description="path below the artifact's directory, bins/train-000-00000.arrow")
    split: Split
    epoch: int = Field(ge=0, description="which of the planned epochs")
    first_bin: int = Field(ge=0, description="number of its first bin in its split")
    num_bins: int = Field(gt=0)
    num_rows: int = Field(gt=0, description="samples in all its bins")
    num_tokens: int = Field(gt=0, description="tokens in all its bins, without padding")
    num_loss_tokens: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class BinsFile(StrictModel):
    """The content of bins.json."""

    format_version: int = FORMAT_VERSION
    partitions: list[BinPartition] = Field(description="train before heldout; in order of epoch, then of the index")


def write_bin_partition(
    directory: StorePath, split: Split, epoch: int, number: int, rows: pa.Table, bins: np.ndarray
) -> BinPartition:
    """Write the bins of one split, epoch and partition `number` of the index, and return the entry. Its `first_bin` is
    0, since `write_bins` numbers the bins.

    Args:
        rows: (n) rows with INDEX_SCHEMA's columns, ordered by bin, then by position in the bin.
        bins: (n,) the bin of each row, ascending from 0 without a gap.
    """
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    columns = {name: rows[name].to_numpy().astype(np.int64) for name in SIZES}
    sums = [np.diff(starts, append=len(bins)), *(np.add.reduceat(columns[name], starts) for name in SIZES)]
    sums.append(np.add.reduceat(columns["num_tokens"] ** 2, starts))
    squares = np.where(columns["num_images"] > 0, columns["num_patches"] ** 2 / columns["num_images"].clip(min=1), 0.0)
    # Not reduceat, which adds floats in another order on other machines: add.at adds from left to right.
    squares_of_bins = np.zeros(len(starts))
    np.add.at(squares_of_bins, bins, squares)
    sums.append(squares_of_bins)
    arrays = [rows[field.name].combine_chunks() for field in _SAMPLE]
    arrays = [a.dictionary_encode() if f.name in _REPEATED else a for f, a in zip(_SAMPLE, arrays)]
    offsets = pa.array(np.append(starts, len(bins)), pa.int32())
    samples = pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(arrays, fields=list(_SAMPLE)))
    flat = pa.array(np.stack(sums, 1).astype(np.float64).ravel())
    batch = pa.record_batch([pa.FixedSizeListArray.from_arrays(flat, len(sums)), samples], schema=BINS_SCHEMA)
    name = f"{_FOLDER}/{split}-{epoch:03d}-{number:05d}.arrow"
    make_dir((directory / name).parent)
    with atomic_path(directory / name) as tmp:
        with pa.ipc.new_file(tmp, BINS_SCHEMA) as writer:
            writer.write_batch(batch)
        sha256 = sha256_file(tmp)
    totals = {key: int(columns[key].sum()) for key in ("num_tokens", "num_loss_tokens")}
    return BinPartition(
        name=name,
        split=split,
        epoch=epoch,
        first_bin=0,
        num_bins=len(starts),
        num_rows=len(bins),
        sha256=sha256,
        **totals,
    )


def write_bins(directory: StorePath, partitions: Sequence[BinPartition]) -> None:
    """Write bins.json from the entries of all partitions, in order, and number their bins. This completes the plan."""
    counts = dict.fromkeys(SPLITS, 0)
    numbered = []
    for partition in partitions:
        numbered.append(partition.model_copy(update={"first_bin": counts[partition.split]}))
        counts[partition.split] += partition.num_bins
    write_json(directory / BINS, BinsFile(partitions=numbered).model_dump(mode="json"))


def read_bins(directory: StorePath, split: Split) -> "BinPlan":
    """Return the bins of one split, in order of their numbers. Only bins.json is read here."""
    path = directory / BINS
    if not path.is_file():
        raise InputError(f"{directory} has no {BINS}: it is not a plan of this version; run the plan_bins stage again")
    partitions = read_format(path, BinsFile, FORMAT_VERSION, "plan_bins").partitions
    counts = dict.fromkeys(SPLITS, 0)
    for partition in partitions:  # a missing or changed entry leaves a gap in the numbers
        if partition.first_bin != counts[partition.split]:
            raise damaged(path, f"is damaged: {partition.name} does not begin with bin {counts[partition.split]}")
        counts[partition.split] += partition.num_bins
    return BinPlan(directory, [partition for partition in partitions if partition.split == split])


class BinPlan(Sequence[Bin]):
    """The bins of one split, each read on its first use. Several threads may share it."""

    def __init__(self, directory: StorePath, partitions: Sequence[BinPartition]) -> None:
        self.partitions = list(partitions)
        self._dir = directory
        self._firsts = np.array([partition.first_bin for partition in partitions], np.int64)
        self._open: dict[int, _OpenPartition] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.partitions[-1].first_bin + self.partitions[-1].num_bins if self.partitions else 0

    def __getitem__(self, number: int) -> Bin:
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number} of {len(self)}")
        place = bisect.bisect_right(self._firsts, number) - 1
        return self._partition(place).bin(number - int(self._firsts[place]))

    @cached_property
    def epoch_sizes(self) -> tuple[int, ...]:
        """The number of bins in each planned epoch."""
        groups = itertools.groupby(self.partitions, key=lambda partition: partition.epoch)
        return tuple(sum(partition.num_bins for partition in group) for _, group in groups)

    @cached_property
    def epoch_totals(self) -> tuple[tuple[int, int], ...]:
        """(tokens, loss tokens) of each planned epoch."""
        groups = [list(group) for _, group in itertools.groupby(self.partitions, key=lambda partition: partition.epoch)]
        return tuple((sum(p.num_tokens for p in group), sum(p.num_loss_tokens for p in group)) for group in groups)

    def sums(self, numbers: Sequence[int] | np.ndarray) -> BinSums:
        """Return the sums of these bins as (m,) arrays, from the column `sums`, at the same cost for any bins."""
        numbers = np.asarray(numbers, np.int64)
        rows = np.empty((len(numbers), len(BinSums._fields)))
        places = np.searchsorted(self._firsts, numbers, side="right") - 1
        order = np.argsort(places, kind="stable")
        for chosen in np.split(order, np.flatnonzero(np.diff(places[order])) + 1) if len(order) else []:
            place = int(places[chosen[0]])
            rows[chosen] = self._partition(place).sums(numbers[chosen] - self._firsts[place])
        *counts, squares = rows.T
        return BinSums(*(column.astype(np.int64) for column in counts), squares)

    def _partition(self, place: int) -> "_OpenPartition":
        if place not in self._open:
            with self._lock:
                if place not in self._open:  # another thread may have been first
                    partition = self.partitions[place]
                    self._open[place] = _OpenPartition(self._dir / partition.name, partition.sha256, partition.num_bins)
        return self._open[place]


class _OpenPartition:
    """A partition's file mapped into memory."""

    def __init__(self, path: StorePath, sha256: str, num_bins: int) -> None:
        with local_copy(path, sha256).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        batch = pa.ipc.open_file(pa.py_buffer(self._map)).get_batch(0)
        samples = batch["samples"]
        if len(samples) != num_bins:
            raise damaged(path, f"holds {len(samples)} bins, and {BINS} says {num_bins}")
        self._offsets = samples.offsets.to_numpy()
        self._fields = [samples.values.field(name) for name in _REF_FIELDS]
        self._sums = batch["sums"].flatten().to_numpy().reshape(-1, len(BinSums._fields))

    def bin(self, number: int) -> Bin:
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        columns = [field.slice(start, end - start).to_pylist() for field in self._fields]
        # The kernel may map two megabytes for one byte, so a reader that jumps between a thousand partitions would
        # otherwise count as holding all of them in memory.
        self._map.madvise(mmap.MADV_DONTNEED)
        return tuple(itertools.starmap(SampleRef, zip(*columns)))

    def sums(self, numbers: np.ndarray) -> np.ndarray:
        """Return (m, 7) float64, one row per bin."""
        sums = self._sums[numbers]
        self._map.madvise(mmap.MADV_DONTNEED)
        return sums


class KeyedPermutation:
    """One of the permutations of [0, size), chosen by a key of integers and texts. It is computed, not stored: each
    index costs the same, however large the size is.

    It is a Feistel network (Luby and Rackoff 1988, "How to construct pseudorandom permutations from pseudorandom
    functions") over pairs (left, right) with left < a, right < b and a * b >= n; the halves are added modulo a and b. A
    result of n or more passes through the network again until it is below n. Both methods are from Black and Rogaway
    2002, "Ciphers with arbitrary finite domains" (generalized Feistel cipher, cycle walking). The round function is the
    finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"). All
    arithmetic is on 64-bit integers, so every machine gives the same result.
    """

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
