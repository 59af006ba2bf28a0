"""The report of the tokenize stage: which tokens are learnt, beside what the model sees of each picture."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.store import StorePath
from dataset_builders.contracts.tokenized import PatchFormat, PixelStore, TokenizedSample, iter_index
from dataset_builders.pixel_codecs import decode_sample
from stages.encode_chat import ChatEncoder
from stages.encode_image import patches_png
from stages.histogram import Histogram
from stages.quarantine import LeftOut, left_out_table
from stages.report import Table, Text, write_report

_SHOWN_SAMPLES = 12
_COUNTED_SAMPLES = 1_000_000  # of a larger index the histograms count as many, evenly spread
_PREVIEW_SIDE = 160  # pixels

_STYLE = """<style>
.learn{display:grid;grid-template-columns:168px 1fr;gap:16px;padding:14px 0;border-top:1px solid var(--line)}
.learn img{display:block;max-width:100%;margin-bottom:6px;border:1px solid var(--line)}
.learn .given{color:var(--soft)}.learn .learnt{background:#b7e4c0;color:#0b3d1b;border-radius:3px}
.learn .chip{background:#e4e7ec;color:#344054;border-radius:9px;padding:0 7px}
@media (max-width:520px){.learn{grid-template-columns:1fr}}
</style>"""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind, as text."""

    kind: Literal["given", "learnt", "image"]
    text: str


def segments(sample: TokenizedSample, chat: ChatEncoder) -> list[Segment]:
    """A tokenized sample as readable runs: given text, learnt text, and one chip for each image."""
    is_image = sample.input_ids == chat.image_token_id
    kinds = np.where(is_image, 2, sample.loss_mask)
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    grids = iter(sample.image_grid_thw // [1, chat.merge_size, chat.merge_size])
    runs: list[Segment] = []
    for start, end in zip(starts, [*starts[1:], len(kinds)]):
        if kinds[start] == 2:
            _, rows, columns = next(grids)
            runs.append(Segment("image", f"image {columns}x{rows} = {end - start} tokens"))
        else:
            runs.append(Segment("learnt" if kinds[start] else "given", chat.decode(sample.input_ids[start:end])))
    return runs


def write_tokenize_report(
    work: StorePath, left_out: Sequence[LeftOut], stats: Mapping[str, Any], chat: ChatEncoder, pixels: PixelStore
) -> None:
    """Write report.json and report.html into `work`, whose index is there."""
    total = stats["total"]
    columns = ("num_samples", "num_tokens", "num_loss_tokens", "num_patches", "num_images")
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
            "checked": f"{stats['checked']['samples']} samples; pixels against {stats['checked']['pixels_against']}",
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


def _lengths(work: StorePath, num_samples: int) -> dict[str, np.ndarray]:
    """Columns of lengths: of every sample, or of a large index every second, third, ..."""
    step = -(-num_samples // _COUNTED_SAMPLES) or 1
    names = ("num_tokens", "num_loss_tokens", "num_patches")
    parts = [{name: table[name].to_numpy()[::step] for name in names} for table in iter_index(work)]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _learnt_html(work: StorePath, chat: ChatEncoder, pixels: PixelStore) -> str:
    parts = [_STYLE]
    for row in _spread_over_subsets(iter_index(work)):
        record = read_record(work / row["shard"], row["offset"], row["size"], checksum=row["checksum"])
        parts.append(_sample_html(decode_sample(row["key"], record, pixels), chat, pixels.config.patch_format))
    return "".join(parts)


def _spread_over_subsets(tables: Iterable[pa.Table]) -> list[dict[str, Any]]:
    """The first rows of every subset in turn: the first of each, the second of each, until enough."""
    found: dict[str, list[dict[str, Any]]] = {}
    for table in tables:
        for subset in pc.unique(table["subset"]).to_pylist():
            rows = found.setdefault(subset, [])
            if len(rows) < _SHOWN_SAMPLES:
                chosen = table.filter(pc.equal(table["subset"], subset)).slice(0, _SHOWN_SAMPLES - len(rows))
                rows += chosen.to_pylist()
    turns = sorted((turn, subset) for subset, rows in found.items() for turn in range(len(rows)))
    return [found[subset][turn] for turn, subset in turns[:_SHOWN_SAMPLES]]


def _sample_html(sample: TokenizedSample, chat: ChatEncoder, patch_format: PatchFormat) -> str:
    images = []
    offsets = np.cumsum([0, *sample.image_grid_thw.prod(-1)])
    for grid, start, end in zip(sample.image_grid_thw, offsets, offsets[1:]):
        png = base64.b64encode(patches_png(sample.patches[start:end], grid, patch_format, _PREVIEW_SIDE)).decode()
        images.append(f'<img alt="" src="data:image/png;base64,{png}">')
    text = "".join(
        f'<span class="chip">{s.text}</span>'
        if s.kind == "image"
        else f'<span class="{s.kind}">{html.escape(s.text)}</span>'
        for s in segments(sample, chat)
    )
    note = f"{html.escape(sample.key)}: {len(sample.input_ids)} tokens, {int(sample.loss_mask.sum())} learnt"
    return (
        f'<div class="learn"><div>{"".join(images)}</div><div><pre>{text}</pre><p class="note">{note}</p></div></div>\n'
    )
