"""Between the passes of convert: which samples stay, in which split each lies, and which shard it goes to.

All of it is a function of the scan tables and the config alone.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.contracts.sample import SPLITS, Split

DUPLICATE = "duplicate_sample"


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard to write.

    Attributes:
        name: path below the artifact, train/shard-00000.tar.
        split: its split.
        keys: part number -> keys of that part's samples, in order.
    """

    name: str
    split: Split
    keys: dict[int, list[str]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return sum(len(keys) for keys in self.keys.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """What convert will write.

    Attributes:
        reasons: (n,) object array: why a row of the scan is left out, None where it stays.
        details: (n,) object array: the words that go with the reason.
        splits: (n,) object array: the split of a row that stays, None else.
        shards: train before heldout, in order of their names.
    """

    reasons: np.ndarray
    details: np.ndarray
    splits: np.ndarray
    shards: list[PlannedShard]


def make_plan(scan: pa.Table, seed: int, heldout_fraction: float, shard_bytes: int) -> Plan:
    """Plan over the scan of all parts, a table of SCAN_SCHEMA and `part` (int), in order of the parts."""
    reasons = scan["reason"].to_numpy(zero_copy_only=False).copy()
    details = scan["detail"].to_numpy(zero_copy_only=False).copy()
    _mark_duplicates(scan, reasons, details)
    kept = np.flatnonzero(np.equal(reasons, None))
    splits = np.full(len(scan), None, object)
    splits[kept] = _choose_splits(scan.take(pa.array(kept)), seed, heldout_fraction)
    return Plan(reasons, details, splits, _cut_shards(scan, splits, shard_bytes))


def split_of(seed: int, digest: bytes, heldout_fraction: float) -> Split:
    """The split of a group of samples, from the smallest hash in it: the same whatever else the dataset holds."""
    draw = int.from_bytes(hashlib.sha256(b"%d:%b" % (seed, digest)).digest()[:8], "big")
    return "heldout" if draw < heldout_fraction * 2**64 else "train"


def _mark_duplicates(scan: pa.Table, reasons: np.ndarray, details: np.ndarray) -> None:
    """The first of equal samples stays."""
    keys, first = scan["key"], {}
    for i, digest in enumerate(scan["digest"].to_pylist()):
        if digest is not None and (earlier := first.setdefault(digest, i)) != i:
            reasons[i], details[i] = DUPLICATE, f"the same images and messages as {keys[earlier]}"


def _choose_splits(kept: pa.Table, seed: int, heldout_fraction: float) -> list[Split]:
    """The split of each sample: samples that share a picture, also through others, are in the same one."""
    images = kept["images"].combine_chunks()
    hashes, ids, offsets = _image_ids(images)
    roots = _smallest_in_group(len(hashes), ids, offsets)
    digests = kept["digest"].to_pylist()
    decided: dict[bytes, Split] = {}
    splits: list[Split] = []
    for i, digest in enumerate(digests):
        name = hashes[roots[ids[offsets[i]]]] if offsets[i] < offsets[i + 1] else digest
        if name not in decided:
            decided[name] = split_of(seed, name, heldout_fraction)
        splits.append(decided[name])
    _assert_apart(splits, ids, offsets)
    return splits


def _image_ids(images: pa.ListArray) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Distinct hashes in order, the number of each picture's hash among them, and where each sample's begin."""
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(images).to_numpy())]).astype(np.int64)
    encoded = images.flatten().dictionary_encode()
    found = encoded.dictionary.to_pylist()
    order = sorted(range(len(found)), key=found.__getitem__)
    rank = np.empty(len(found), np.int64)
    rank[order] = np.arange(len(found))
    return [found[i] for i in order], rank[encoded.indices.to_numpy()], offsets


def _smallest_in_group(num_images: int, ids: np.ndarray, offsets: np.ndarray) -> list[int]:
    """Union-find over pictures joined by a sample: for each the smallest one of its group."""
    parent = list(range(num_images))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i in np.flatnonzero(np.diff(offsets) > 1):
        first, *others = ids[offsets[i] : offsets[i + 1]].tolist()
        for other in others:
            a, b = root(first), root(other)
            parent[max(a, b)] = min(a, b)
    return [root(i) for i in range(num_images)]


def _assert_apart(splits: list[Split], ids: np.ndarray, offsets: np.ndarray) -> None:
    heldout = np.repeat(np.array(splits) == "heldout", np.diff(offsets))
    shared = np.intersect1d(ids[heldout], ids[~heldout])
    assert not len(shared), f"{len(shared)} pictures are in both splits"


def _cut_shards(scan: pa.Table, splits: np.ndarray, shard_bytes: int) -> list[PlannedShard]:
    """Samples in order, a new shard when the next sample would take the current one over `shard_bytes`."""
    parts, keys, sizes = (scan[name].to_pylist() for name in ("part", "key", "size"))
    shards: list[PlannedShard] = []
    for split in SPLITS:
        used, number = 0, 0
        for i in np.flatnonzero(splits == split).tolist():
            if number == 0 or used + sizes[i] > shard_bytes:
                shards.append(PlannedShard(f"{split}/shard-{number:05d}.tar", split))
                used, number = 0, number + 1
            shards[-1].keys.setdefault(parts[i], []).append(keys[i])
            used += sizes[i]
    return shards
