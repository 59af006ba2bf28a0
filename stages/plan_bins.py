"""Lengths -> bins: which samples share a packed sequence, decided once over the whole index.

    bins.parquet             ordered sample references of every bin, train then heldout
    quarantine.jsonl         samples that fit no bin: key, reason, detail
    report.json, report.html

A bin has room for seq_len tokens and max_patches patches. Every sample's tokens are rounded up to pad_multiple first.
"""

import heapq
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from dataset_builders.contracts.bins import BINS_SCHEMA, write_bins
from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import read_index
from stages.artifact import Artifact, Stage, StageOutput
from stages.histogram import Histogram
from stages.quarantine import QUARANTINE, LeftOut, count_reasons, left_out_table, write_quarantine
from stages.report import Table, write_report

VERSION = 1
_SMALL = 8  # a sample is small when this many fit into a bin


class PlanBinsConfig(StrictModel):
    """Identity of the bins, beside the tokenized samples."""

    seq_len: int = Field(gt=0, description="tokens a bin holds")
    max_patches: int = Field(gt=0, description="vision patches a bin holds, before merging")
    pad_multiple: int = Field(gt=0, description="each sample's tokens are rounded up to a multiple of this")

    @model_validator(mode="after")
    def _whole(self) -> "PlanBinsConfig":
        if self.seq_len % self.pad_multiple:
            down = self.seq_len // self.pad_multiple * self.pad_multiple
            raise ValueError(
                f"seq_len={self.seq_len} is not a multiple of pad_multiple={self.pad_multiple}; "
                f"try {down or self.pad_multiple}"
            )
        return self


def pack(tokens: np.ndarray, patches: np.ndarray, seq_len: int, max_patches: int) -> np.ndarray:
    """Best fit, decreasing, in two dimensions; a pure function of its arguments.

    Each sample goes into the bin that it leaves least room in, in the scarcer dimension, out of those where it fits in
    both. Large samples go first, by decreasing size. Small ones fill what is left in a shuffled order: sorted too, they
    would make bins of a single kind of sample, and steps that are all captions or all documents.

    Args:
        tokens: (n,) integers in [1, seq_len].
        patches: (n,) integers in [0, max_patches].

    Returns:
        (n,) int32: the bin of each sample; numbers start at 0 and leave no gap.
    """
    if tokens.sum() / seq_len >= patches.sum() / max_patches:
        return _best_fit(tokens, seq_len, patches, max_patches)
    return _best_fit(patches, max_patches, tokens, seq_len)


def _best_fit(scarce: np.ndarray, scarce_room: int, other: np.ndarray, other_room: int) -> np.ndarray:
    # Sizes that share a divisor (pad_multiple; patches come in fours) need that many fewer levels.
    unit = max(int(np.gcd.reduce(scarce)), 1) if len(scarce) else 1
    scarce, levels = scarce // unit, scarce_room // unit
    is_small = scarce <= levels // _SMALL
    shuffled = np.random.RandomState(0).permutation(len(scarce))  # this generator's stream never changes
    order = np.lexsort((shuffled, np.where(is_small, 0, -other), np.where(is_small, 0, -scarce)))
    bins = np.empty(len(scarce), np.int32)
    # Open bins by what is left in the scarce dimension: in each level a heap of (-left in the other, bin), and beside
    # the heaps the most that any bin of the level has left in the other, -1 where there is no bin.
    heaps: list[list[tuple[int, int]]] = [[] for _ in range(levels + 1)]
    most = np.full(levels + 1, -1, np.int64)
    num_bins = 0
    for i, size, beside in zip(order.tolist(), scarce[order].tolist(), other[order].tolist()):
        level = _first_at_least(most, size, beside)
        if level < 0:
            level, left, number = levels, other_room, num_bins
            num_bins += 1
        else:
            negative, number = heapq.heappop(heaps[level])
            left = -negative
            most[level] = -heaps[level][0][0] if heaps[level] else -1
        bins[i] = number
        level, left = level - size, left - beside
        heapq.heappush(heaps[level], (-left, number))
        most[level] = -heaps[level][0][0]
    return bins


def _first_at_least(most: np.ndarray, start: int, value: int) -> int:
    """The first place from `start` on where `most` is at least `value`, or -1; near places are looked at first."""
    width = 64
    while start < len(most):
        found = most[start : start + width] >= value
        place = int(found.argmax())
        if found[place]:
            return start + place
        start, width = start + width, width * 8
    return -1


def _run(config: PlanBinsConfig, inputs: Mapping[str, Artifact], work: Path, resources: object) -> StageOutput:
    index = read_index(inputs["tokenized"].dir)
    tokens = index["num_tokens"].to_numpy().astype(np.int64)
    rounded = -(-tokens // config.pad_multiple) * config.pad_multiple
    patches = index["num_patches"].to_numpy().astype(np.int64)
    too_long, too_many = rounded > config.seq_len, patches > config.max_patches
    left_out = _left_out(config, index, too_long, too_many)
    write_quarantine(work, left_out)
    fits = ~(too_long | too_many)
    in_split = {split: np.flatnonzero(fits & pc.equal(index["split"], split).to_numpy()) for split in SPLITS}
    if not len(in_split["train"]):
        raise InputError(
            f"no sample of the train split fits a bin (seq_len={config.seq_len}, max_patches={config.max_patches}, "
            f"{len(left_out)} of {index.num_rows} samples too large); see {work / QUARANTINE}"
        )
    parts = []
    for rows in in_split.values():
        bins = pack(rounded[rows], patches[rows], config.seq_len, config.max_patches)
        # Inside a bin the index's order: a reader then goes forward through each shard.
        place = np.argsort(bins, kind="stable")
        parts.append(index.take(rows[place]).add_column(0, "bin", pa.array(bins[place], pa.int32())))
    table = pa.concat_tables(parts).cast(BINS_SCHEMA)
    write_bins(work, table)
    stats = _stats(config, table)
    _report(work, config, table, stats, left_out)
    return StageOutput(skips=count_reasons(left_out), stats=stats)


def _left_out(config: PlanBinsConfig, index: pa.Table, too_long: np.ndarray, too_many: np.ndarray) -> list[LeftOut]:
    found = []
    for i in np.flatnonzero(too_long | too_many).tolist():
        row = index.slice(i, 1).to_pylist()[0]
        if too_long[i]:
            reason = "over_length"
            detail = f"{row['num_tokens']} tokens, seq_len is {config.seq_len}"
        else:
            reason = "too_many_patches"
            detail = f"{row['num_patches']} patches of {row['num_images']} images, max_patches is {config.max_patches}"
        found.append(LeftOut(row["key"], reason, detail))
    return found


def _stats(config: PlanBinsConfig, table: pa.Table) -> dict[str, Any]:
    stats: dict[str, Any] = {"seq_len": config.seq_len, "max_patches": config.max_patches}
    names = ("num_bins", "num_samples", "num_tokens", "padding_fraction", "samples_per_bin", "images_per_bin")
    stats |= {name: {} for name in names}
    for split in SPLITS:
        part = table.filter(pc.equal(table["split"], split))
        bins = len(pc.unique(part["bin"]))
        tokens, images = pc.sum(part["num_tokens"]).as_py() or 0, pc.sum(part["num_images"]).as_py() or 0
        capacity = max(bins * config.seq_len, 1)
        figures = (bins, part.num_rows, tokens, (bins * config.seq_len - tokens) / capacity)
        figures += (part.num_rows / max(bins, 1), images / max(bins, 1))
        for name, figure in zip(names, figures):
            stats[name][split] = figure
    return stats


def _report(
    work: Path, config: PlanBinsConfig, table: pa.Table, stats: dict[str, Any], left_out: list[LeftOut]
) -> None:
    train = table.filter(pc.equal(table["split"], "train"))
    numbers = train["bin"].to_numpy()
    sums = {name: np.bincount(numbers, train[name].to_numpy()) for name in ("num_tokens", "num_patches", "num_images")}
    names = ("num_bins", "num_samples", "num_tokens", "padding_fraction", "samples_per_bin", "images_per_bin")
    write_report(
        work,
        title="Bins",
        summary={
            "bins": stats["num_bins"],
            "samples": stats["num_samples"],
            "padding": {split: f"{100 * value:.2f} %" for split, value in stats["padding_fraction"].items()},
            "seq_len": config.seq_len,
            "max_patches": config.max_patches,
            "left_out": len(left_out),
        },
        sections=[
            Histogram("Tokens of a bin (train)", sums["num_tokens"], f"tokens, of {config.seq_len}"),
            Histogram("Patches of a bin (train)", sums["num_patches"], f"patches, of {config.max_patches}"),
            Histogram("Samples of a bin (train)", np.bincount(numbers), "samples"),
            Histogram("Images of a bin (train)", sums["num_images"], "images"),
            Table("Splits", ["", *SPLITS], [[n, *(stats[n][split] for split in SPLITS)] for n in names]),
            left_out_table(left_out),
        ],
    )


STAGE = Stage("plan_bins", VERSION, _run)
