"""One partition of the index: its rows, and its bins in every epoch. It is one task of plan_bins and fits in memory."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from dataset_builders.contracts.bins import BinPartition, KeyedPermutation, write_bin_partition
from dataset_builders.contracts.sample import Split
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import SIZES, read_partition
from dataset_builders.storage.files import read_sealed, write_sealed
from dataset_builders.storage.store import StorePath
from stages.plan_bins.config import BinLimits
from stages.plan_bins.mixture import SubsetDraw, SubsetSize, draw_samples, part_copies
from stages.plan_bins.pack import pack
from stages.shared.artifacts.left_out import LeftOut

_AT_A_TIME = 1_500_000  # samples packed at a time, including repeats; a larger number is packed in groups
_BINS_OF_A_GROUP = 32  # smallest number of bins in a group, if copies go to different groups to keep them apart


@dataclass(frozen=True, slots=True)
class ScanTask:
    """One partition to count."""

    path: StorePath
    limits: BinLimits


@dataclass(frozen=True, slots=True)
class Scan:
    """The counts of a partition: its rows, the rows of each shard, its training samples that fit a bin, by subset, and
    the samples that fit no bin."""

    num_samples: int
    shards: dict[str, int]
    sizes: dict[str, SubsetSize]
    left_out: list[LeftOut]


@dataclass(frozen=True, slots=True)
class PlanTask:
    """One partition to plan."""

    path: StorePath
    directory: StorePath
    number: int
    limits: BinLimits
    draws: Mapping[str, SubsetDraw]  # of the partition's subsets
    first_ranks: Mapping[str, int]  # subset -> number of its samples in earlier partitions
    epochs: int


class SubsetSums(StrictModel):
    """Sums over a subset's samples, including repeats."""

    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    num_patches: int
    num_images: int


class EpochPart(StrictModel):
    """The bins of one split and epoch in one partition."""

    split: Split
    epoch: int
    num_bins: int
    subsets: dict[str, SubsetSums]
    together: int = Field(description="copies of a sample that share a bin with another one")


class PartitionPlan(StrictModel):
    """A planned partition: its files and figures."""

    partitions: list[BinPartition]
    epochs: list[EpochPart]


class _Rows:
    """A partition of the index as arrays of its rows."""

    def __init__(self, table: pa.Table, limits: BinLimits) -> None:
        self.table = table
        self.columns = {name: table[name].to_numpy().astype(np.int64) for name in SIZES}
        tokens, self.patches, self.images = (self.columns[n] for n in ("num_tokens", "num_patches", "num_images"))
        self.rounded = -(-tokens // limits.pad_multiple) * limits.pad_multiple
        self.is_long = self.rounded > limits.seq_len
        self.has_many_patches = self.patches > limits.max_patches
        self.has_many_images = self.images > (limits.max_images or max(int(self.images.max(initial=0)), 1))
        self.fits = ~(self.is_long | self.has_many_patches | self.has_many_images)
        self.is_train = pc.equal(table["split"], "train").to_numpy()
        subset = table["subset"].combine_chunks().dictionary_encode()
        self.subsets, self.names = subset.indices.to_numpy(), subset.dictionary.to_pylist()


def scan_partition(task: ScanTask) -> Scan:
    """Return the sizes of a partition's subsets, and its samples that fit no bin."""
    rows = _Rows(read_partition(task.path), task.limits)
    chosen = np.flatnonzero(rows.fits & rows.is_train)
    counts = np.bincount(rows.subsets[chosen], minlength=len(rows.names)).tolist()
    tokens = np.zeros(len(rows.names), np.int64)
    np.add.at(tokens, rows.subsets[chosen], rows.columns["num_tokens"][chosen])
    sizes = {n: SubsetSize(c, t) for n, c, t in zip(rows.names, counts, tokens.tolist()) if c}
    shards = {item["values"]: item["counts"] for item in pc.value_counts(rows.table["shard"]).to_pylist()}
    left_out, limits = [], task.limits
    places = np.flatnonzero(~rows.fits)
    for i, row in zip(places, rows.table.take(places).to_pylist()):
        if rows.is_long[i]:
            reason, detail = "over_length", f"{row['num_tokens']} tokens, seq_len is {limits.seq_len}"
        elif rows.has_many_patches[i]:
            reason = "too_many_patches"
            detail = f"{row['num_patches']} patches of {row['num_images']} images, max_patches is {limits.max_patches}"
        else:
            reason, detail = "too_many_images", f"{row['num_images']} images, max_images is {limits.max_images}"
        left_out.append(LeftOut(row["key"], reason, detail))
    return Scan(rows.table.num_rows, shards, sizes, left_out)


def entry_path(directory: StorePath, number: int) -> StorePath:
    """Return the path of the file that marks a partition as planned, until the manifest is written."""
    return directory / "bins" / f"{number:05d}.json"


def plan_partition(task: PlanTask) -> PartitionPlan:
    """Plan every epoch of a partition, unless an earlier, interrupted run did."""
    entry = entry_path(task.directory, task.number)
    if (text := read_sealed(entry)) is not None:
        return PartitionPlan.model_validate_json(text)
    rows = _Rows(read_partition(task.path), task.limits)
    partitions, epochs = [], []
    for split, epoch in [*(("train", epoch) for epoch in range(task.epochs)), ("heldout", 0)]:
        if split == "heldout":  # one copy, whatever the mixture
            copies = (rows.fits & ~rows.is_train).astype(np.int64)
        else:
            chosen = np.flatnonzero(rows.fits & rows.is_train)
            copies = np.zeros(len(rows.fits), np.int64)
            copies[chosen] = draw_samples(task.draws, task.first_ranks, rows.subsets[chosen], rows.names, epoch)
        if not copies.any():
            continue
        bins, samples, together = _pack_copies(rows, np.repeat(np.arange(len(copies)), copies), task.limits)
        # Samples of a bin are in index order, so that a reader moves forward through each shard.
        order = np.lexsort((samples, bins))
        table = rows.table.take(samples[order])
        partitions.append(write_bin_partition(task.directory, split, epoch, task.number, table, bins[order]))
        subsets = _sum_subsets(rows, copies)
        epochs.append(
            EpochPart(split=split, epoch=epoch, num_bins=int(bins.max()) + 1, subsets=subsets, together=together)
        )
    plan = PartitionPlan(partitions=partitions, epochs=epochs)
    write_sealed(entry, plan.model_dump_json())
    return plan


def _pack_copies(rows: _Rows, samples: np.ndarray, limits: BinLimits) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the bin of each copy, the row of each copy, and the number of copies that share a bin with a copy of the
    same row. `samples` are (n,) the row of each copy, ascending."""
    first = np.flatnonzero(np.diff(samples, prepend=-1))
    turn = np.arange(len(samples)) - np.repeat(first, np.diff(first, append=len(samples)))
    num_bins = max(rows.rounded[samples].sum() // limits.seq_len, rows.patches[samples].sum() // limits.max_patches)
    groups = max(-(-len(samples) // _AT_A_TIME), min(int(turn.max()) + 1, int(num_bins) // _BINS_OF_A_GROUP))
    if groups == 1:
        bins, together = _pack_group(rows, samples, limits)
        return bins, samples, together
    # Copies of a sample go to the groups in rotation, from a start group that depends on the row.
    group = (KeyedPermutation(len(rows.fits), ["groups"])(samples) + turn) % groups
    bins_of, samples_of = [], [samples[group == number] for number in range(groups)]
    num_bins = together = 0
    for of_group in samples_of:
        bins, num_together = _pack_group(rows, of_group, limits)
        bins_of.append(bins + num_bins)
        num_bins += int(bins.max()) + 1
        together += num_together
    return np.concatenate(bins_of), np.concatenate(samples_of), together


def _pack_group(rows: _Rows, samples: np.ndarray, limits: BinLimits) -> tuple[np.ndarray, int]:
    sizes, room = [rows.rounded[samples], rows.patches[samples]], [limits.seq_len, limits.max_patches]
    if limits.max_images is not None:
        sizes.append(rows.images[samples])
        room.append(limits.max_images)
    bins = pack(*sizes[:2], *room[:2], *sizes[2:], *room[2:])
    return part_copies(bins, samples, np.stack(sizes, 1), np.array(room))


def _sum_subsets(rows: _Rows, copies: np.ndarray) -> dict[str, SubsetSums]:
    sums = {}
    for name, column in {"num_samples": np.ones_like(copies), **rows.columns}.items():
        sums[name] = np.zeros(len(rows.names), np.int64)
        np.add.at(sums[name], rows.subsets, column * copies)
    return {
        subset: SubsetSums(**{name: int(values[i]) for name, values in sums.items()})
        for i, subset in enumerate(rows.names)
        if sums["num_samples"][i]
    }
