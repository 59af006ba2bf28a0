"""plan_bins: lengths -> bins, the samples that share a packed sequence, planned once for the whole index.

    bins.json, bins/         ordered sample references of every bin, by split, epoch and partition of the index
    quarantine.jsonl         samples that fit no bin: key, reason, detail
    report.json, report.html

A bin has room for seq_len tokens, max_patches patches and max_images images. Each sample's number of tokens is first
rounded up to a multiple of pad_multiple. The index is read twice, partition by partition: to count each subset, and to
plan. tests/bench/results/bins_and_order.md has time and memory for a billion samples.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from dataset_builders.contracts.bins import BINS, BinPlan, read_bins, write_bins
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.tokenized import index_partitions
from dataset_builders.errors import MANIFEST, InputError, damaged
from dataset_builders.storage.store import StorePath
from stages.plan_bins.config import PlanBinsConfig
from stages.plan_bins.mixture import SubsetDraw, SubsetSize, count_epochs, make_draws, with_shares
from stages.plan_bins.partition import (
    EpochPart,
    PartitionPlan,
    PlanTask,
    Scan,
    ScanTask,
    SubsetSums,
    entry_path,
    plan_partition,
    scan_partition,
)
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.artifacts.left_out import QUARANTINE, LeftOut, count_reasons, left_out_table, write_left_out
from stages.shared.artifacts.workers import StageResources, run_tasks
from stages.shared.pages.report import Histogram, Table, write_report
from stages.shared.pages.shown_numbers import show_share

VERSION = 3  # 3: shares with the digits of all pages
_SHOWN_BINS = 100_000  # bins in the histograms, evenly chosen
_SHOWN_EPOCHS = 10


def _run(
    config: PlanBinsConfig, inputs: Mapping[str, Artifact], work: StorePath, resources: StageResources
) -> StageOutput:
    partitions = index_partitions(inputs["tokenized"].dir)
    resources = resources.at_most(len(partitions))
    scan_tasks = [ScanTask(path, config.limits) for path in partitions]
    scans = [scan for _, scan in sorted(run_tasks(scan_partition, scan_tasks, resources), key=itemgetter(0))]
    tokenized, rows = inputs["tokenized"], {name: count for scan in scans for name, count in scan.shards.items()}
    for shard in tokenized.manifest.shards:
        if shard.num_samples != rows.get(shard.name, 0):
            says = f"says {shard.num_samples} samples in {shard.name}, and its index {rows.get(shard.name, 0)}"
            raise damaged(tokenized.dir / MANIFEST, says)
    left_out = [item for scan in scans for item in scan.left_out]
    write_left_out(work, left_out)
    sizes = _sizes(scans)
    if not sizes:
        samples = sum(scan.num_samples for scan in scans)
        raise InputError(
            f"no sample of the train split fits a bin (seq_len={config.seq_len}, max_patches={config.max_patches}, "
            f"{len(left_out)} of {samples} samples too large); see {work / QUARANTINE} and raise the limits"
        )
    draws = make_draws(with_shares(config.mixture, config.shares, sizes), sizes)
    tasks = _plan_tasks(config, partitions, work, scans, draws)
    planned: dict[int, PartitionPlan] = {}
    for number, plan in run_tasks(plan_partition, tasks, resources):
        planned[number] = plan
        resources.report(len(planned), len(tasks))
    plans = [planned[number] for number in range(len(tasks))]
    # Sorted by split and epoch, then by partition, so that an epoch's bins have consecutive numbers.
    parts = [part for plan in plans for part in plan.partitions]
    write_bins(work, sorted(parts, key=lambda part: (SPLITS.index(part.split), part.epoch)))
    stats = _stats(config, plans, draws)
    write_plan_report(work, stats, {split: read_bins(work, split) for split in SPLITS}, left_out)
    for number in range(len(partitions)):
        entry_path(work, number).unlink(missing_ok=True)
    return StageOutput(skips=count_reasons(left_out), stats=stats)


def _sizes(scans: Sequence[Scan]) -> dict[str, SubsetSize]:
    """Return the size of each training subset, over all partitions."""
    sizes: dict[str, SubsetSize] = {}
    for scan in scans:
        for name, size in scan.sizes.items():
            before = sizes.get(name, SubsetSize(0, 0))
            sizes[name] = SubsetSize(before.num_samples + size.num_samples, before.num_tokens + size.num_tokens)
    return dict(sorted(sizes.items()))


def _plan_tasks(
    config: PlanBinsConfig,
    partitions: Sequence[StorePath],
    work: StorePath,
    scans: Sequence[Scan],
    draws: Mapping[str, SubsetDraw],
) -> list[PlanTask]:
    first_ranks = dict.fromkeys(draws, 0)
    epochs = count_epochs(config.epochs, draws)
    tasks = []
    for number, (path, scan) in enumerate(zip(partitions, scans)):
        own_draws = {name: draws[name] for name in scan.sizes}
        own_ranks = {name: first_ranks[name] for name in scan.sizes}
        tasks.append(PlanTask(path, work, number, config.limits, own_draws, own_ranks, epochs))
        for name, size in scan.sizes.items():
            first_ranks[name] += size.num_samples
    return tasks


def _stats(config: PlanBinsConfig, plans: Sequence[PartitionPlan], draws: Mapping[str, SubsetDraw]) -> dict[str, Any]:
    """Return figures of one epoch, or the mean over several planned epochs, and figures of each epoch."""
    stats: dict[str, Any] = {name: getattr(config, name) for name in ("seq_len", "max_patches", "max_images")}
    parts = [part for plan in plans for part in plan.epochs]
    for split in SPLITS:
        of_split = [part for part in parts if part.split == split]
        epochs = max(len({part.epoch for part in of_split}), 1)
        bins = sum(part.num_bins for part in of_split)
        sums = _add_up([sums for part in of_split for sums in part.subsets.values()])
        figures = {
            "num_epochs": epochs,
            "num_bins": round(bins / epochs),
            "num_samples": round(sums["num_samples"] / epochs),
            "num_tokens": round(sums["num_tokens"] / epochs),
            "padding_fraction": 1 - sums["num_tokens"] / (bins * config.seq_len) if bins else 0.0,
            "samples_per_bin": sums["num_samples"] / max(bins, 1),
            "images_per_bin": sums["num_images"] / max(bins, 1),
        }
        for name, figure in figures.items():
            stats.setdefault(name, {})[split] = figure
    stats["copies_in_one_bin"] = sum(part.together for part in parts)
    train = [part for part in parts if part.split == "train"]
    by_epoch = [[part for part in train if part.epoch == epoch] for epoch in range(stats["num_epochs"]["train"])]
    stats["epochs"] = [_epoch_stats(of_epoch, draws) for of_epoch in by_epoch]
    return stats


def _epoch_stats(parts: Sequence[EpochPart], draws: Mapping[str, SubsetDraw]) -> dict[str, Any]:
    """Return figures of one epoch of the train split, from its parts: its bins, and the share of each subset."""
    total = sum(sums.num_tokens for part in parts for sums in part.subsets.values())
    subsets = {}
    for name, draw in draws.items():
        sums = _add_up([part.subsets[name] for part in parts if name in part.subsets])
        subsets[name] = {
            "num_available": draw.num_samples,
            "num_used": draw.num_used,
            **sums,
            "token_fraction": sums["num_tokens"] / max(total, 1),
        }
    return {"num_bins": sum(part.num_bins for part in parts), "num_tokens": total, "subsets": subsets}


def _add_up(sums: Sequence[SubsetSums]) -> dict[str, int]:
    return {name: sum(getattr(one, name) for one in sums) for name in SubsetSums.model_fields}


def write_plan_report(
    work: StorePath, stats: Mapping[str, Any], plans: Mapping[str, BinPlan], left_out: Sequence[LeftOut]
) -> None:
    """Write report.json to `work`.

    Args:
        stats: the stats of the manifest.
        plans: split -> its written plan.
    """
    each = "an epoch" if stats["num_epochs"]["train"] == 1 else "an epoch on average"
    summary = {
        "bins, " + each: stats["num_bins"],
        "samples, " + each: stats["num_samples"],
        "tokens, " + each: stats["num_tokens"],
        "fill": {
            split: show_share(1 - stats["padding_fraction"][split]) for split in SPLITS if stats["num_bins"][split]
        },
        "samples of a bin": stats["samples_per_bin"],
        "images of a bin": stats["images_per_bin"],
        "epochs_planned": stats["num_epochs"]["train"],
        "left_out": len(left_out),
    }
    if stats["copies_in_one_bin"]:
        summary["copies_in_one_bin"] = stats["copies_in_one_bin"]
    train = plans["train"]
    count = min(len(train), _SHOWN_BINS)
    sums = train.sums(np.arange(count) * len(train) // count)
    which = "train" if count == len(train) else f"{count:,} of {len(train):,} training bins"
    images = "images" if stats["max_images"] is None else f"images, of {stats['max_images']:,}"
    sections = [
        Histogram(f"Tokens of a bin ({which})", sums.num_tokens, f"tokens, of {stats['seq_len']:,}"),
        Histogram(f"Patches of a bin ({which})", sums.num_patches, f"patches, of {stats['max_patches']:,}"),
        Histogram(f"Samples of a bin ({which})", sums.num_samples, "samples"),
        Histogram(f"Images of a bin ({which})", sums.num_images, images),
        *(_subset_table(number, stats) for number in range(min(len(stats["epochs"]), _SHOWN_EPOCHS))),
        left_out_table(left_out),
    ]
    write_report(work, title="Bins", summary=summary, sections=sections)


def _subset_table(number: int, stats: Mapping[str, Any]) -> Table:
    epoch, count = stats["epochs"][number], len(stats["epochs"])
    rows = [
        [
            name,
            subset["num_available"],
            subset["num_used"],
            subset["num_samples"],
            subset["num_samples"] / subset["num_used"],
            subset["num_tokens"],
            show_share(subset["token_fraction"]),
            subset["num_loss_tokens"],
            subset["num_patches"],
            subset["num_images"],
        ]
        for name, subset in epoch["subsets"].items()
    ]
    columns = ["subset", "samples there are", "used at all", "in the epoch", "times each", "tokens", "share of tokens"]
    columns += ["loss tokens", "patches", "images"]
    title = "What each subset contributes" + (f", epoch {number + 1} of {count}" if count > 1 else "")
    return Table(title, columns, rows)


STAGE = Stage(
    "plan_bins",
    VERSION,
    _run,
    digested=(BINS, "bins/*.arrow", QUARANTINE),
    contents="stages.shared.preview.render:stage_contents",
)
