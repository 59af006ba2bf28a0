"""The report of the tokenize stage: lengths of the samples, figures of the subsets, samples that were left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataset_builders.contracts.tokenized import SIZES, PixelStore, iter_index
from dataset_builders.storage.store import StorePath
from stages.shared.artifacts.left_out import LeftOut, left_out_table
from stages.shared.pages.report import Histogram, Table, write_report

_COUNTED_SAMPLES = 1_000_000  # the histograms of a larger index count this number of samples, evenly spread


def write_tokenize_report(
    work: StorePath, left_out: Sequence[LeftOut], stats: Mapping[str, Any], pixels: PixelStore
) -> None:
    """Write report.json to `work`, which already has the index."""
    total = stats["total"]
    columns = ("num_samples", *SIZES)
    lengths = _lengths(work, total["num_samples"])
    write_report(
        work,
        title="Tokenized samples",
        summary={
            "samples": {split: stats["splits"][split]["num_samples"] for split in stats["splits"]},
            "tokens": total["num_tokens"],
            "loss_tokens": total["num_loss_tokens"],
            "images": total["num_images"],
            "patches": total["num_patches"],
            "pixels": f"{pixels.codec}, {pixels.config.min_pixels} to {pixels.config.max_pixels} an image",
            "left_out": len(left_out),
            "shortened": stats["num_shortened"],
            **_reasoning_summary(stats),
            "checked": f"{stats['checked']['samples']} samples, with transformers' tokenizer and "
            f"{stats['checked']['pixels_against'].partition(';')[0]}",
        },
        sections=[
            Histogram("Tokens of a sample", lengths["num_tokens"], "tokens"),
            Histogram("Loss tokens of a sample", lengths["num_loss_tokens"], "loss tokens"),
            Histogram("Patches of a sample", lengths["num_patches"], "patches before merging"),
            Table(
                "Subsets",
                ["subset", *(name.removeprefix("num_") for name in columns)],
                [[name, *(sums[c] for c in columns)] for name, sums in stats["subsets"].items()],
            ),
            left_out_table(left_out),
        ],
    )


def cut_words(cut: Mapping[str, int]) -> str:
    """Return stats["cut"] of the manifest in words."""
    return f"{cut['conversations']:,} conversations were cut into {cut['samples']:,} samples, as few as are exact"


def _reasoning_summary(stats: Mapping[str, Any]) -> dict[str, str]:
    """Return rows of the summary for templates that rewrite earlier turns, and for data with reasoning."""
    rows = {}
    if "cut" in stats:
        rows["cut"] = f"{cut_words(stats['cut'])}: the chat template writes a turn in another way once it is history"
    if "reasoning" in stats:
        learnt = "learnt" if stats["reasoning"]["is_learnt"] else "left out (tokenize.learn.reasoning, or the template)"
        rows["reasoning"] = f"of {stats['reasoning']['answers']:,} answers, {learnt}"
    return rows


def _lengths(work: StorePath, num_samples: int) -> dict[str, np.ndarray]:
    """Return name -> (n,) column of every sample's length; for a large index, of every second, third, ... sample's."""
    step = -(-num_samples // _COUNTED_SAMPLES) or 1
    names = ("num_tokens", "num_loss_tokens", "num_patches")
    parts = [{name: table[name].to_numpy()[::step] for name in names} for table in iter_index(work)]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}
