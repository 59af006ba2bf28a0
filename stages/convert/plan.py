"""The plan between the two passes of convert: the kept samples, their splits and their shards.

The plan depends only on the scan tables, the source's own splits and the config. Each fact about a row is a number in
an array: during planning, a row takes some 150 bytes, plus 60 per image (tests/bench/bench_convert.py).
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dataset_builders.contracts.sample import SKIP_REASONS, SPLITS, Split
from dataset_builders.errors import InputError
from stages.convert.scan import Scan

DUPLICATE = "duplicate_sample"
REASONS = tuple(SKIP_REASONS)
LEFT_OUT = -1  # a value in Plan.splits
STAYS = -1  # a value in Plan.reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The random split of samples that the source puts in no split."""

    seed: int  # another seed holds out other samples
    heldout_fraction: float  # share of the groups held out
    # If fewer samples are held out, the next groups in order are held out too, as long as train keeps at least as many.
    min_heldout: int = 0


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard to write."""

    name: str  # path relative to the artifact, train/shard-00000.tar
    split: Split
    rows: np.ndarray  # (m,) int64, ascending: its samples' rows in the scan


@dataclass(frozen=True, slots=True)
class Plan:
    """The output that convert will write; n is the number of rows of the scan."""

    reasons: np.ndarray  # (n,) int8: why a row is left out, an index of REASONS; STAYS if it is kept
    firsts: np.ndarray  # (n,) int64: the row that an exact duplicate repeats; a row's own number if it is no duplicate
    splits: np.ndarray  # (n,) int8: the split of a kept row, an index of SPLITS; LEFT_OUT otherwise
    shards: list[PlannedShard]  # train before heldout, in order of their names

    @property
    def kept(self) -> np.ndarray:
        """(n,) bool: whether a row is kept."""
        return self.splits != LEFT_OUT

    def skips(self) -> dict[str, int]:
        """Return reason -> number of rows left out for it, sorted by reason."""
        counts = np.bincount(self.reasons[self.reasons != STAYS], minlength=len(REASONS))
        return {reason: int(count) for reason, count in sorted(zip(REASONS, counts)) if count}


def make_plan(scan: Scan, own_splits: list[Split | None], draw: Draw, shard_bytes: int) -> Plan:
    """Make the plan for the scan of all parts.

    Args:
        own_splits: for each part, the split that the source itself puts its rows in, or None.
        shard_bytes: a shard is closed before it grows over this.
    """
    scanned_reasons = pc.index_in(scan.table["reason"], value_set=pa.array(REASONS), skip_nulls=True)
    reasons = scanned_reasons.fill_null(STAYS).to_numpy().astype(np.int8)
    usable = np.flatnonzero(reasons == STAYS)
    digests = scan.table["digest"].combine_chunks().take(pa.array(usable))
    codes = digests.dictionary_encode().indices.to_numpy().astype(np.int64)
    firsts = np.arange(len(scan), dtype=np.int64)
    firsts[usable] = usable[_first_places(codes)[codes]]
    reasons[firsts != np.arange(len(scan))] = REASONS.index(DUPLICATE)
    own_of_parts = np.array([0 if split is None else 1 + SPLITS.index(split) for split in own_splits], np.int8)
    own = np.repeat(own_of_parts, np.diff(scan.starts))[usable]
    splits = np.full(len(scan), LEFT_OUT, np.int8)
    splits[usable] = _Groups(scan, usable, codes, digests).splits(own, draw, reasons[usable] == STAYS)
    splits[reasons != STAYS] = LEFT_OUT
    sizes = scan.table["size"].fill_null(0).to_numpy()
    return Plan(reasons, firsts, splits, _cut_shards(splits, sizes, shard_bytes))


def split_of(seed: int, digest: bytes, heldout_fraction: float) -> Split:
    """Return the split of a group of samples, drawn by its smallest hash; it does not depend on other groups."""
    return "heldout" if _ticket(seed, digest) < heldout_fraction * 2**64 else "train"


def check_heldout(plan: Plan, own_splits: list[Split | None], draw: Draw) -> None:
    """Raise InputError if the samples without a split of the source's own are too few for the minimum to hold out."""
    num_heldout, num_samples = int((plan.splits == SPLITS.index("heldout")).sum()), int(plan.kept.sum())
    if draw.heldout_fraction and None in own_splits and num_heldout < draw.min_heldout:
        raise InputError(
            f"convert.min_heldout={draw.min_heldout}: of {num_samples} usable samples only {num_heldout} can be held "
            "out if as many are to be trained on (samples that share a picture stay together); add data, or lower "
            "convert.min_heldout"
        )


def _ticket(seed: int, digest: bytes) -> int:
    """Return the number in [0, 2^64) that a group draws; groups with small numbers are held out."""
    return int.from_bytes(hashlib.sha256(b"%d:%b" % (seed, digest)).digest()[:8], "big")


def _first_places(codes: np.ndarray) -> np.ndarray:
    """Return (k,) the first index of each of the codes 0 ... k-1, which are numbered in order of appearance."""
    # A code is new where the running maximum rises.
    highest = np.maximum.accumulate(np.concatenate([[-1], codes]))
    return np.flatnonzero(np.diff(highest))


class _Groups:
    """Groups of samples that must be in the same split: samples connected by shared images, and exact duplicates. A
    group is named by its smallest image hash, or the sample's own digest if there is no image."""

    def __init__(self, scan: Scan, usable: np.ndarray, codes: np.ndarray, digests: pa.Array) -> None:
        hashes, self.ids, self.lengths = _picture_ids(scan, usable)
        has_pictures = self.lengths > 0
        labels = _tie_pictures(self.ids, self.lengths, len(hashes))
        num_labels = int(labels.max()) + 1 if len(labels) else 0
        self.of_sample = num_labels + codes
        self.of_sample[has_pictures] = labels[self.ids[(np.cumsum(self.lengths) - self.lengths)[has_pictures]]]
        smallest = np.unique(labels, return_index=True)[1]  # hashes are numbered in sorted order
        firsts = _first_places(codes)
        self.names = pa.concat_arrays([hashes.take(pa.array(smallest)), digests.take(pa.array(firsts))])

    def splits(self, own: np.ndarray, draw: Draw, stays: np.ndarray) -> np.ndarray:
        """Return (m,) int8, indices of SPLITS, for the usable samples.

        Args:
            own: (m,) int8: 1 + the index of the source's own split, 0 if the source has none.
            stays: (m,) bool: whether a sample is not a duplicate.
        """
        of_group = np.zeros(len(self.names), np.int8)
        # The source decides where it can: heldout, which has the larger number, if it holds out any sample of the
        # group, else train if it puts any there. Else the split is drawn by the group's name.
        np.maximum.at(of_group, self.of_sample, own)
        has_samples = np.zeros(len(of_group), bool)
        has_samples[self.of_sample] = True
        undecided = np.flatnonzero(has_samples & (of_group == 0))
        for group, name in zip(undecided, self.names.take(pa.array(undecided))):
            of_group[group] = 1 + SPLITS.index(split_of(draw.seed, name.as_py(), draw.heldout_fraction))
        if draw.heldout_fraction:
            self._hold_out_more(of_group, undecided, draw, np.bincount(self.of_sample[stays], minlength=len(of_group)))
        splits = of_group[self.of_sample] - 1
        of_use = np.repeat(splits, self.lengths)
        is_in = np.zeros((len(SPLITS), 1 + int(self.ids.max(initial=-1))), bool)
        is_in[of_use, self.ids] = True
        shared = int((is_in.sum(0) > 1).sum())
        assert not shared, f"{shared} pictures are in both splits"
        return splits

    def _hold_out_more(self, of_group: np.ndarray, undecided: np.ndarray, draw: Draw, sizes: np.ndarray) -> None:
        """Hold out further groups, in the order of their draws, until there are `min_heldout` samples. `of_group` (1 +
        index of the split) is changed in place; `sizes` are the groups' samples without duplicates."""
        heldout = 1 + SPLITS.index("heldout")
        num_heldout, most = int(sizes[of_group == heldout].sum()), int(sizes.sum()) // 2
        if num_heldout >= draw.min_heldout:
            return
        others = undecided[of_group[undecided] != heldout]
        tickets = [_ticket(draw.seed, name.as_py()) for name in self.names.take(pa.array(others))]
        for _, group in sorted(zip(tickets, others.tolist())):
            if num_heldout >= draw.min_heldout:
                return
            # A group is passed over if it would leave fewer samples in train than in heldout.
            if num_heldout + sizes[group] <= most:
                of_group[group] = heldout
                num_heldout += int(sizes[group])


def _picture_ids(scan: Scan, usable: np.ndarray) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Return the distinct hashes, sorted; (u,) int64 hash number of each use; (m,) int64 number of uses per sample."""
    lengths = pc.list_value_length(scan.table["pictures"]).fill_null(0).to_numpy()[usable].astype(np.int64)
    uses = pc.struct_field(pc.list_flatten(scan.table["pictures"]), "sha256").combine_chunks().dictionary_encode()
    order = pc.array_sort_indices(uses.dictionary)
    rank = np.empty(len(order), np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    return uses.dictionary.take(order), rank[uses.indices.to_numpy()], lengths


def _tie_pictures(ids: np.ndarray, lengths: np.ndarray, num_pictures: int) -> np.ndarray:
    """Return (num_pictures,) int32: the group of each image, where all images of a sample are in one group."""
    if num_pictures == 0:
        return np.zeros(0, np.int32)
    begins = (np.cumsum(lengths) - lengths)[lengths > 0]
    first_of_sample = np.repeat(ids[begins], lengths[lengths > 0])
    is_other = first_of_sample != ids
    pairs = (np.ones(int(is_other.sum()), bool), (first_of_sample[is_other], ids[is_other]))
    return connected_components(coo_array(pairs, shape=(num_pictures, num_pictures)), directed=False)[1]


def _cut_shards(splits: np.ndarray, sizes: np.ndarray, shard_bytes: int) -> list[PlannedShard]:
    """Cut samples into shards in order; a new shard begins when the next sample would exceed `shard_bytes`."""
    shards: list[PlannedShard] = []
    for place, split in enumerate(SPLITS):
        rows = np.flatnonzero(splits == place)
        ends = np.cumsum(sizes[rows].astype(np.int64))
        start = number = 0
        while start < len(rows):
            before = int(ends[start - 1]) if start else 0
            end = max(start + 1, int(np.searchsorted(ends, before + shard_bytes, side="right")))
            shards.append(PlannedShard(f"{split}/shard-{number:05d}.tar", split, rows[start:end]))
            start, number = end, number + 1
    return shards
