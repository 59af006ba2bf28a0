"""The report of the tokenize stage: which tokens are learnt, beside what the model sees of each picture."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import PatchFormat, TokenizedSample, from_fields
from stages.encode_chat import ChatEncoder
from stages.encode_image import patches_png
from stages.histogram import Histogram
from stages.quarantine import LeftOut, left_out_table
from stages.report import Table, Text, write_report

_SHOWN_SAMPLES = 12
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
    work: Path,
    index: pa.Table,
    left_out: Sequence[LeftOut],
    stats: Mapping[str, Any],
    chat: ChatEncoder,
    patch_format: PatchFormat,
) -> None:
    """Write report.json and report.html into `work`."""
    total = stats["total"]
    columns = ("num_samples", "num_tokens", "num_loss_tokens", "num_patches", "num_images")
    write_report(
        work,
        title="Tokenized samples",
        summary={
            "samples": {split: stats["splits"][split]["num_samples"] for split in stats["splits"]},
            "tokens": total["num_tokens"],
            "loss_tokens": total["num_loss_tokens"],
            "images": total["num_images"],
            "patches": total["num_patches"],
            "left_out": len(left_out),
        },
        sections=[
            Text("What is trained on: green is learnt, grey is given", _learnt_html(work, index, chat, patch_format)),
            Histogram("Tokens of a sample", index["num_tokens"].to_numpy(), "tokens"),
            Histogram("Loss tokens of a sample", index["num_loss_tokens"].to_numpy(), "loss tokens"),
            Histogram("Patches of a sample", index["num_patches"].to_numpy(), "patches before merging"),
            Table(
                "Subsets",
                ["subset", *(name.removeprefix("num_") for name in columns)],
                [[name, *(sums[c] for c in columns)] for name, sums in stats["subsets"].items()],
            ),
            left_out_table(left_out),
        ],
    )


def _learnt_html(work: Path, index: pa.Table, chat: ChatEncoder, patch_format: PatchFormat) -> str:
    parts = [_STYLE]
    for row in _spread_over_subsets(index):
        record = read_record(work / row["shard"], row["offset"], row["size"])
        parts.append(_sample_html(from_fields(row["key"], record, patch_format), chat, patch_format))
    return "".join(parts)


def _spread_over_subsets(index: pa.Table) -> list[dict[str, Any]]:
    """The first rows of every subset in turn: the first of each, the second of each, until enough."""
    places: dict[str, list[int]] = {}
    for i, subset in enumerate(index["subset"].to_pylist()):
        places.setdefault(subset, []).append(i)
    turns = sorted((turn, subset, i) for subset, rows in places.items() for turn, i in enumerate(rows[:_SHOWN_SAMPLES]))
    return index.take([i for _, _, i in turns[:_SHOWN_SAMPLES]]).to_pylist()


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
