"""Bins: ordered lists of samples that share one packed sequence; bins.parquet, one row a sample of a bin.

Bin numbers start at 0 in each split and leave no gap. Rows are in (split, bin, place) order. A row carries the
sample's whole address, so that a reader needs no other file than this one and the shards.
"""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataset_builders.contracts.files import atomic_path
from dataset_builders.contracts.sample import Split
from dataset_builders.contracts.tokenized import INDEX_SCHEMA

BINS = "bins.parquet"
BINS_SCHEMA = pa.schema([("bin", pa.int32()), *INDEX_SCHEMA])


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A sample of a bin and where it lies in the tokenized artifact."""

    key: str
    shard: str
    offset: int
    size: int
    num_tokens: int
    num_loss_tokens: int
    num_patches: int
    num_images: int


Bin = tuple[SampleRef, ...]


def write_bins(directory: Path, table: pa.Table) -> None:
    """Write bins.parquet from a table with BINS_SCHEMA, rows in (split, bin, place) order."""
    with atomic_path(directory / BINS) as tmp:
        pq.write_table(table.cast(BINS_SCHEMA), tmp)


def read_bins(directory: Path, split: Split) -> list[Bin]:
    """The bins of one split, in order of their numbers."""
    table = pq.read_table(directory / BINS, schema=BINS_SCHEMA)
    table = table.filter(pc.equal(table["split"], split))
    fields = ["key", "shard", "offset", "size", "num_tokens", "num_loss_tokens", "num_patches", "num_images"]
    bins: dict[int, list[SampleRef]] = {}
    columns = [table[name].to_pylist() for name in ["bin", *fields]]
    for number, *values in zip(*columns):
        bins.setdefault(number, []).append(SampleRef(*values))
    assert list(bins) == list(range(len(bins))), f"{directory / BINS}: bin numbers of {split} have gaps"
    return [tuple(refs) for refs in bins.values()]
