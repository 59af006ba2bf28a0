"""Between the passes of convert: which samples stay, in which split each lies, and which shard it goes to.

All of it is a function of the scan tables, the source's own splits and the config alone. Everything a row is a number
in an array: a row costs some 150 bytes and 60 a picture while it is planned (tests/bench/bench_convert.py measures it).
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dataset_builders.contracts.sample import SKIP_REASONS, SPLITS, Split
from stages.convert_scan import Scan

DUPLICATE = "duplicate_sample"
REASONS = tuple(SKIP_REASONS)
LEFT_OUT = -1  # in Plan.splits
STAYS = -1  # in Plan.reasons
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard to write.

    Attributes:
        name: path below the artifact, train/shard-00000.tar.
        split: its split.
        rows: (m,) int64, ascending: its samples' rows in the scan.
    """

    name: str
    split: Split
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class Plan:
    """What convert will write.

    Attributes:
        reasons: (n,) int8: why a row of the scan is left out, a place in REASONS; STAYS where it stays.
        firsts: (n,) int64: the row that an exact duplicate repeats; its own where it repeats none.
        splits: (n,) int8: the split of a row that stays, a place in SPLITS; LEFT_OUT else.
        shards: train before heldout, in order of their names.
    """

    reasons: np.ndarray
    firsts: np.ndarray
    splits: np.ndarray
    shards: list[PlannedShard]

    @property
    def kept(self) -> np.ndarray:
        """(n,) bool."""
        return self.splits != LEFT_OUT

    def skips(self) -> dict[str, int]:
        """Reason -> rows left out for it, sorted by reason."""
        counts = np.bincount(self.reasons[self.reasons != STAYS], minlength=len(REASONS))
        return {reason: int(count) for reason, count in sorted(zip(REASONS, counts)) if count}


def make_plan(scan: Scan, own_splits: list[Split | None], seed: int, heldout_fraction: float, shard_bytes: int) -> Plan:
    """Plan over the scan of all parts.

    Args:
        own_splits: for each part the split that the source itself puts its rows in, or None.
        shard_bytes: a shard is closed before it grows over this.
    """
    reasons = _scanned_reasons(scan)
    usable = np.flatnonzero(reasons == STAYS)
    digests = scan.table["digest"].combine_chunks().take(pa.array(usable))
    codes = digests.dictionary_encode().indices.to_numpy().astype(np.int64)
    firsts = np.arange(len(scan), dtype=np.int64)
    firsts[usable] = usable[_first_places(codes)[codes]]
    reasons[firsts != np.arange(len(scan))] = REASONS.index(DUPLICATE)
    own = scan.each([0 if split is None else 1 + SPLITS.index(split) for split in own_splits])[usable]
    splits = np.full(len(scan), LEFT_OUT, np.int8)
    splits[usable] = _Groups(scan, usable, codes, digests).splits(own, seed, heldout_fraction)
    splits[reasons != STAYS] = LEFT_OUT
    sizes = scan.table["size"].fill_null(0).to_numpy()
    return Plan(reasons, firsts, splits, _cut_shards(splits, sizes, shard_bytes))


def split_of(seed: int, digest: bytes, heldout_fraction: float) -> Split:
    """The split of a group of samples, from the smallest hash in it: the same whatever else the dataset holds."""
    draw = int.from_bytes(hashlib.sha256(b"%d:%b" % (seed, digest)).digest()[:8], "big")
    return "heldout" if draw < heldout_fraction * 2**64 else "train"


def _scanned_reasons(scan: Scan) -> np.ndarray:
    """(n,) int8 places in REASONS of what the scan found."""
    places = pc.index_in(scan.table["reason"], value_set=pa.array(REASONS), skip_nulls=True)
    return places.fill_null(STAYS).to_numpy().astype(np.int8)


def _first_places(codes: np.ndarray) -> np.ndarray:
    """(k,) where each of the codes 0 ... k-1 comes first, for codes that were given in order of appearance."""
    highest = np.maximum.accumulate(np.concatenate([[-1], codes]))
    return np.flatnonzero(np.diff(highest))


class _Groups:
    """Samples that belong into the same split: those that share a picture, also through others, and exact duplicates.

    A group is known by its smallest picture hash, or by the sample's own digest where it shows none.
    """

    def __init__(self, scan: Scan, usable: np.ndarray, codes: np.ndarray, digests: pa.Array) -> None:
        hashes, self.ids, self.lengths = _picture_ids(scan, usable)
        shown = self.lengths > 0
        labels = _tied(self.ids, self.lengths, len(hashes))
        num_labels = int(labels.max()) + 1 if len(labels) else 0
        self.of_sample = num_labels + codes
        self.of_sample[shown] = labels[self.ids[(np.cumsum(self.lengths) - self.lengths)[shown]]]
        smallest = np.unique(labels, return_index=True)[1]  # numbers of hashes follow their order
        self.names = _raw(hashes.take(pa.array(smallest))) + _raw(digests.take(pa.array(_first_places(codes))))

    def splits(self, own: np.ndarray, seed: int, heldout_fraction: float) -> np.ndarray:
        """(m,) int8, places in SPLITS, for the usable samples.

        Args:
            own: (m,) int8: 1 + the place of the source's own split, 0 where it has none. A group that any sample puts
                in heldout is heldout, else train where any says so, else drawn by its name.
        """
        decided = np.zeros(len(self.names) // _DIGEST_BYTES, np.int8)
        np.maximum.at(decided, self.of_sample, own)
        present = np.zeros(len(decided), bool)
        present[self.of_sample] = True
        for group in np.flatnonzero(present & (decided == 0)):
            name = self.names[_DIGEST_BYTES * group : _DIGEST_BYTES * (group + 1)]
            decided[group] = 1 + SPLITS.index(split_of(seed, name, heldout_fraction))
        splits = decided[self.of_sample] - 1
        self._assert_apart(splits)
        return splits

    def _assert_apart(self, splits: np.ndarray) -> None:
        of_use = np.repeat(splits, self.lengths)
        seen = np.zeros((len(SPLITS), 1 + int(self.ids.max(initial=-1))), bool)
        seen[of_use, self.ids] = True
        shared = int((seen.sum(0) > 1).sum())
        assert not shared, f"{shared} pictures are in both splits"


def _picture_ids(scan: Scan, usable: np.ndarray) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Distinct hashes in their order, (u,) int64 the number of each use's hash, and (m,) the uses of each sample."""
    lengths = pc.list_value_length(scan.table["pictures"]).fill_null(0).to_numpy()[usable].astype(np.int64)
    uses = pc.struct_field(pc.list_flatten(scan.table["pictures"]), "sha256").combine_chunks().dictionary_encode()
    order = pc.array_sort_indices(uses.dictionary)
    rank = np.empty(len(order), np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    return uses.dictionary.take(order), rank[uses.indices.to_numpy()], lengths


def _tied(ids: np.ndarray, lengths: np.ndarray, num_pictures: int) -> np.ndarray:
    """(num_pictures,) int32: the group of each picture, where pictures of one sample are in one group."""
    if num_pictures == 0:
        return np.zeros(0, np.int32)
    begins = (np.cumsum(lengths) - lengths)[lengths > 0]
    first_of_sample = np.repeat(ids[begins], lengths[lengths > 0])
    tied = first_of_sample != ids
    pairs = (np.ones(int(tied.sum()), bool), (first_of_sample[tied], ids[tied]))
    return connected_components(coo_array(pairs, shape=(num_pictures, num_pictures)), directed=False)[1]


def _raw(hashes: pa.Array) -> bytes:
    """A fixed-size binary array's bytes, end to end."""
    begin = hashes.offset * _DIGEST_BYTES
    data = hashes.buffers()[1]
    return b"" if data is None else data.to_pybytes()[begin : begin + len(hashes) * _DIGEST_BYTES]


def _cut_shards(splits: np.ndarray, sizes: np.ndarray, shard_bytes: int) -> list[PlannedShard]:
    """Samples in order, a new shard when the next sample would take the current one over `shard_bytes`."""
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
