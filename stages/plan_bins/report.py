"""The report of plan_bins: the fill of the bins, the contents of a bin, and the share of each subset."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataset_builders.contracts.bins import BinPlan
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.storage.store import StorePath
from stages.shared.artifacts.left_out import LeftOut, left_out_table
from stages.shared.pages.report import Histogram, Table, write_report

_SHOWN_BINS = 100_000  # bins in the histograms, evenly chosen
_SHOWN_EPOCHS = 10


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
        "fill": {split: f"{1 - stats['padding_fraction'][split]:.2%}" for split in SPLITS if stats["num_bins"][split]},
        "samples of a bin": stats["samples_per_bin"],
        "images of a bin": stats["images_per_bin"],
        "epochs_planned": stats["num_epochs"]["train"],
        "left_out": len(left_out),
    }
    if stats["copies_in_one_bin"]:
        summary["copies_in_one_bin"] = stats["copies_in_one_bin"]
    write_report(
        work,
        title="Bins",
        summary=summary,
        sections=[
            *_histograms(plans["train"], stats),
            *(_subset_table(number, stats) for number in range(min(len(stats["epochs"]), _SHOWN_EPOCHS))),
            left_out_table(left_out),
        ],
    )


def _histograms(plan: BinPlan, stats: Mapping[str, Any]) -> list[Histogram]:
    count = min(len(plan), _SHOWN_BINS)
    sums = plan.sums(np.arange(count) * len(plan) // count)
    which = "train" if count == len(plan) else f"{count:,} of {len(plan):,} training bins"
    images = "images" if stats["max_images"] is None else f"images, of {stats['max_images']}"
    return [
        Histogram(f"Tokens of a bin ({which})", sums.num_tokens, f"tokens, of {stats['seq_len']}"),
        Histogram(f"Patches of a bin ({which})", sums.num_patches, f"patches, of {stats['max_patches']}"),
        Histogram(f"Samples of a bin ({which})", sums.num_samples, "samples"),
        Histogram(f"Images of a bin ({which})", sums.num_images, images),
    ]


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
            f"{subset['token_fraction']:.2%}",
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
