"""The report of the tokenize stage: the trained tokens, next to each image as the model gets it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import SIZES, PatchFormat, PixelStore, TokenizedSample, iter_index
from dataset_builders.pictures.pixel_codecs import decode_sample
from dataset_builders.storage.store import StorePath
from stages.artifacts.quarantine import LeftOut, left_out_table
from stages.encode.chat import ChatEncoder
from stages.encode.images import patches_png
from stages.pages.histogram import Histogram
from stages.pages.page import render_part
from stages.pages.report import Table, Text, data_uri, write_report
from stages.preview.samples import in_turn
from stages.preview.token_runs import token_runs

_SHOWN_SAMPLES = 12
_COUNTED_SAMPLES = 1_000_000  # the histograms of a larger index count this number of samples, evenly spread
_PREVIEW_SIDE = 160  # pixels


def write_tokenize_report(
    work: StorePath, left_out: Sequence[LeftOut], stats: Mapping[str, Any], chat: ChatEncoder, pixels: PixelStore
) -> None:
    """Write report.json and report.html to `work`, which already has the index."""
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
            Text("What is trained on: green is learnt, grey is given", _learnt_html(work, chat, pixels)),
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


def _learnt_html(work: StorePath, chat: ChatEncoder, pixels: PixelStore) -> Markup:
    samples = []
    for row in _spread_over_subsets(iter_index(work)):
        record = read_record(work / row["shard"], row["offset"], row["size"], checksum=row["checksum"])
        samples.append(_sample_values(decode_sample(row["key"], record, pixels), chat, pixels.config.patch_format))
    return render_part("learnt.html.j2", samples=samples)


def _spread_over_subsets(tables: Iterable[pa.Table]) -> list[dict[str, Any]]:
    """Return rows of the index: the first of every subset, then the second of every subset, until there are enough."""
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for table in tables:
        for subset in pc.unique(table["subset"]).to_pylist():
            rows = rows_of.setdefault(subset, [])
            if len(rows) < _SHOWN_SAMPLES:
                chosen = table.filter(pc.equal(table["subset"], subset)).slice(0, _SHOWN_SAMPLES - len(rows))
                rows += chosen.to_pylist()
    return in_turn(rows_of, _SHOWN_SAMPLES)


def _sample_values(sample: TokenizedSample, chat: ChatEncoder, patch_format: PatchFormat) -> dict[str, Any]:
    """Return the values of learnt.html.j2 for one sample."""
    offsets = np.cumsum([0, *sample.image_grid_thw.prod(-1)])
    runs = token_runs(sample, chat.image_token_id, chat.merge_size)
    return {
        "key": sample.key,
        "num_tokens": len(sample.input_ids),
        "num_learnt": int(sample.loss_mask.sum()),
        "sources": [
            data_uri(patches_png(sample.patches[start:end], grid, patch_format, _PREVIEW_SIDE))
            for grid, start, end in zip(sample.image_grid_thw, offsets, offsets[1:])
        ],
        "runs": [
            (run, "" if run.kind == "image" else chat.decode(sample.input_ids[run.start : run.end])) for run in runs
        ],
    }
