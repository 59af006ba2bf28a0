"""Lengths -> bins: which samples share a packed sequence, decided once over the whole index.

    bins.json, bins/         ordered sample references of every bin, by split, epoch and partition of the index
    quarantine.jsonl         samples that fit no bin: key, reason, detail
    report.json, report.html

A bin has room for seq_len tokens, max_patches patches and max_images images. Every sample's tokens are rounded up to
pad_multiple first. The index is gone through twice, partition by partition: to know what there is of each subset, and
to plan. What that takes for a billion samples: SCALE.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from dataset_builders.contracts.bins import read_bins, write_bins
from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.store import StorePath
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import index_partitions
from stages.artifact import Artifact, Stage, StageOutput
from stages.mixture import SubsetDraw, SubsetMix, SubsetSize, count_epochs, make_draws
from stages.plan_partition import (
    BinLimits,
    PartitionPlan,
    PlanTask,
    Scan,
    ScanTask,
    entry_path,
    plan_partition,
    scan_partition,
)
from stages.plan_report import write_plan_report
from stages.quarantine import QUARANTINE, count_reasons, write_quarantine
from stages.workers import StageResources, run_tasks

VERSION = 2


class PlanBinsConfig(StrictModel):
    """Identity of the bins, beside the tokenized samples."""

    seq_len: int = Field(gt=0, description="tokens a bin holds")
    max_patches: int = Field(gt=0, description="vision patches a bin holds, before merging")
    max_images: int | None = Field(default=None, gt=0, description="images a bin holds; null: any number")
    pad_multiple: int = Field(gt=0, description="each sample's tokens are rounded up to a multiple of this")
    mixture: dict[str, SubsetMix] = Field(
        default={}, description="how much of each subset an epoch takes; a subset that is not named: all of it, once"
    )
    epochs: int = Field(
        default=1, gt=0, description="epochs with a draw of their own, where draws differ; then they start over"
    )

    @model_validator(mode="after")
    def _whole(self) -> "PlanBinsConfig":
        if self.seq_len % self.pad_multiple:
            down = self.seq_len // self.pad_multiple * self.pad_multiple
            raise ValueError(
                f"seq_len={self.seq_len} is not a multiple of pad_multiple={self.pad_multiple}; "
                f"try {down or self.pad_multiple}"
            )
        return self

    @property
    def limits(self) -> BinLimits:
        return BinLimits(self.seq_len, self.max_patches, self.max_images, self.pad_multiple)


def _run(
    config: PlanBinsConfig, inputs: Mapping[str, Artifact], work: StorePath, resources: StageResources | None
) -> StageOutput:
    partitions = index_partitions(inputs["tokenized"].dir)
    resources = (resources or StageResources()).at_most(len(partitions))
    scans = _scan(config, partitions, resources)
    left_out = [item for scan in scans for item in scan.left_out]
    write_quarantine(work, left_out)
    sizes = _sizes(scans)
    if not sizes:
        samples = sum(scan.num_samples for scan in scans)
        raise InputError(
            f"no sample of the train split fits a bin (seq_len={config.seq_len}, max_patches={config.max_patches}, "
            f"{len(left_out)} of {samples} samples too large); see {work / QUARANTINE}"
        )
    draws = make_draws(config.mixture, sizes)
    tasks = _plan_tasks(config, partitions, work, scans, draws)
    plans = _in_order(run_tasks(plan_partition, tasks, resources), len(tasks), resources)
    # By split and epoch, then by partition: an epoch's bins are numbered one after the other.
    parts = [part for plan in plans for part in plan.partitions]
    write_bins(work, sorted(parts, key=lambda part: (SPLITS.index(part.split), part.epoch)))
    stats = _stats(config, plans, draws)
    write_plan_report(work, stats, {split: read_bins(work, split) for split in SPLITS}, left_out)
    for number in range(len(partitions)):
        entry_path(work, number).unlink(missing_ok=True)
    return StageOutput(skips=count_reasons(left_out), stats=stats)


def _scan(config: PlanBinsConfig, partitions: Sequence[StorePath], resources: StageResources) -> list[Scan]:
    tasks = [ScanTask(path, config.limits) for path in partitions]
    found = dict(run_tasks(scan_partition, tasks, resources))
    return [found[number] for number in range(len(tasks))]


def _sizes(scans: Sequence[Scan]) -> dict[str, SubsetSize]:
    """What there is of each training subset."""
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
        here = {name: draws[name] for name in scan.sizes}
        ranks = {name: first_ranks[name] for name in scan.sizes}
        tasks.append(PlanTask(path, work, number, config.limits, here, ranks, epochs))
        for name, size in scan.sizes.items():
            first_ranks[name] += size.num_samples
    return tasks


def _in_order(results, total: int, resources: StageResources) -> list[PartitionPlan]:
    found: dict[int, PartitionPlan] = {}
    for number, plan in results:
        found[number] = plan
        resources.report(len(found), total)
    return [found[number] for number in range(total)]


def _stats(config: PlanBinsConfig, plans: Sequence[PartitionPlan], draws: Mapping[str, SubsetDraw]) -> dict[str, Any]:
    """Figures of one epoch, the mean over the planned ones where there are several; and of each by itself."""
    limits = {name: getattr(config, name) for name in ("seq_len", "max_patches", "max_images")}
    names = ("num_bins", "num_samples", "num_tokens", "padding_fraction", "samples_per_bin", "images_per_bin")
    stats: dict[str, Any] = limits | {name: {} for name in ("num_epochs", *names)}
    epochs = [epoch for plan in plans for epoch in plan.epochs]
    for split in SPLITS:
        mine = [epoch for epoch in epochs if epoch.split == split]
        count = max(len({epoch.epoch for epoch in mine}), 1)
        bins = sum(epoch.num_bins for epoch in mine)
        sums = [sum(s.num_samples for e in mine for s in e.subsets.values())]
        sums += [
            sum(getattr(s, name) for e in mine for s in e.subsets.values()) for name in ("num_tokens", "num_images")
        ]
        figures = (round(bins / count), round(sums[0] / count), round(sums[1] / count))
        figures += (
            1 - sums[1] / (bins * config.seq_len) if bins else 0.0,
            sums[0] / max(bins, 1),
            sums[2] / max(bins, 1),
        )
        stats["num_epochs"][split] = count
        for name, figure in zip(names, figures):
            stats[name][split] = figure
    stats["copies_in_one_bin"] = sum(epoch.together for epoch in epochs)
    stats["epochs"] = [_epoch_stats(epochs, number, draws) for number in range(stats["num_epochs"]["train"])]
    return stats


def _epoch_stats(epochs, number: int, draws: Mapping[str, SubsetDraw]) -> dict[str, Any]:
    """One planned epoch of the train split: bins, and what each subset contributes."""
    mine = [epoch for epoch in epochs if epoch.split == "train" and epoch.epoch == number]
    total = sum(s.num_tokens for epoch in mine for s in epoch.subsets.values())
    subsets = {}
    for name, draw in draws.items():
        sums = [epoch.subsets[name] for epoch in mine if name in epoch.subsets]
        figures = {f: sum(getattr(s, f) for s in sums) for f in ("num_samples", "num_tokens", "num_loss_tokens")}
        figures |= {f: sum(getattr(s, f) for s in sums) for f in ("num_patches", "num_images")}
        subsets[name] = {
            "num_available": draw.num_samples,
            "num_used": draw.num_used,
            **figures,
            "token_fraction": figures["num_tokens"] / max(total, 1),
        }
    return {"num_bins": sum(epoch.num_bins for epoch in mine), "num_tokens": total, "subsets": subsets}


STAGE = Stage("plan_bins", VERSION, _run)
