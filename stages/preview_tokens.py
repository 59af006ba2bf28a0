"""Tokenized samples of a preview: every token, what is learnt, and each picture with its patches."""

import functools
import html
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.store import StorePath, is_local, local_copy, location
from dataset_builders.contracts.tokenized import (
    PatchFormat,
    PixelStore,
    TokenizedSample,
    index_partitions,
    read_partition,
    read_pixel_store,
)
from dataset_builders.pixel_codecs import decode_sample
from stages.artifact import Artifact
from stages.encode_chat import ChatEncoder
from stages.encode_image import patches_png
from stages.hf_directory import processor_input
from stages.preview_page import walk_bar
from stages.preview_pictures import TINY_SIDE, data_uri
from stages.preview_samples import counted, evenly, in_turn
from trainer.contract import HF_EXPORT, RUN_JSON

_OPENED_PARTITIONS = 4  # of the index of a large dataset, evenly spread
_SHOWN_TOKENS = 4000  # of one sample, image tokens aside
_SHOWN_IMAGES = 16
_COARSE_GRID = 24  # patches a side; the lines of a finer grid are drawn thinner
_LONGEST_CHARACTER = 8  # tokens that are tried together until their bytes are whole characters
_BROKEN = "\ufffd"
_DOT = " \u00b7 "
_TOGGLES = (
    '<label><input type="checkbox" value="nogrid" checked> patch grid</label>'
    '<label><input type="checkbox" value="bounds"> token bounds</label>'
)


@dataclass(frozen=True, slots=True)
class Speller:
    """How token ids are spelt.

    Attributes:
        decode: token ids -> text; None: there is no tokenizer here, and ids are shown.
        note: about the tokenizer, for the reader of the page.
    """

    decode: Callable[[np.ndarray], str] | None
    note: str


def find_speller(tokenized: Artifact, hf_dir: Path | None) -> Speller:
    """The tokenizer of a tokenized artifact: the given directory's, or one of the same root with the same digest."""
    parent = tokenized.manifest.parents.get("processor")
    digest = parent.fingerprint if parent else ""
    if hf_dir is not None:
        same = processor_input(hf_dir).digest == digest
        note = "" if same else "The tokenizer given is not the one that wrote these tokens; the text may be wrong."
        return Speller(ChatEncoder(hf_dir).decode, note)
    for candidate in _hf_dirs(tokenized.dir.parent.parent):
        if (candidate / "config.json").is_file() and processor_input(candidate).digest == digest:
            return Speller(_load(candidate).decode, "")
    return Speller(
        None, "No tokenizer with the digest of this artifact lies in its root: give --model to see text, not token ids."
    )


def _hf_dirs(artifacts: StorePath) -> Iterator[StorePath]:
    """Model directories that a root's artifacts hold or name."""
    for stage in ("embedded_model", "export"):
        if (artifacts / stage).is_dir():
            yield from (made / HF_EXPORT for made in sorted((artifacts / stage).iterdir(), key=str))
    if (artifacts / "train").is_dir():
        for made in sorted((artifacts / "train").iterdir(), key=str):
            if (made / RUN_JSON).is_file():
                yield location(json.loads((made / RUN_JSON).read_text(encoding="utf-8"))["hf_dir"])


def _load(hf_dir: StorePath) -> ChatEncoder:
    """The directory's encoder; of one in a store only the small files are fetched, not the weights."""
    if is_local(hf_dir):
        return ChatEncoder(hf_dir)
    with tempfile.TemporaryDirectory() as folder:
        for file in hf_dir.iterdir():
            if file.suffix in (".json", ".jinja", ".txt"):
                Path(folder, file.name).write_bytes(local_copy(file).read_bytes())
        return ChatEncoder(Path(folder))


def choose_rows(directory: StorePath, count: int, key: str | None, shard: str | None) -> list[dict[str, Any]]:
    """Rows of the index: some of every subset, or the one of `key`; of one shard where it is given.

    Raises:
        InputError: there is none of that key or shard.
    """
    partitions = index_partitions(directory)
    opened = partitions if key or shard else evenly(partitions, _OPENED_PARTITIONS)
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in opened:
        table = read_partition(path)
        for column, value in (("key", key), ("shard", shard)):
            table = table if value is None else table.filter(pc.equal(table[column], value))
        _gather(table, -(-count // len(opened)) if shard is None else count, groups)
        if (key or shard) and groups:  # a partition holds whole shards
            break
    if not groups and (key or shard):
        asked = f"--key {key}" if key else f"{directory / shard}"
        raise InputError(
            f"{asked}: the index of {directory} has no such sample; leave {'--key' if key else 'the shard'} out "
            "and see some that are there"
        )
    return in_turn(groups, count)


def _gather(table: pa.Table, count: int, groups: dict[str, list[dict[str, Any]]]) -> None:
    for subset in pc.unique(table["subset"]).to_pylist():
        rows = groups.setdefault(subset, [])
        some = table.filter(pc.equal(table["subset"], subset))
        chosen = evenly(range(len(some)), count)
        rows += some.take(pa.array(chosen, pa.int64())).to_pylist()


def tokens_html(
    tokenized: Artifact, count: int, key: str | None = None, shard: str | None = None, hf_dir: Path | None = None
) -> str:
    """Cards of tokenized samples under a bar to walk through them; raises InputError as `choose_rows` does."""
    manifest = tokenized.manifest
    pixels = read_pixel_store(tokenized.dir, manifest.stats)
    speller = find_speller(tokenized, hf_dir)
    rows = choose_rows(tokenized.dir, count, key, shard)
    subsets = sorted({html.escape(row["subset"]) for row in rows})
    cards = []
    for row in rows:
        record = read_record(tokenized.dir / row["shard"], row["offset"], row["size"], checksum=row["checksum"])
        sample = decode_sample(row["key"], record, pixels)
        cards.append(_card(row, sample, pixels, speller, manifest.stats.get("image_token_id", -1)))
    note = f'<p class="note">{html.escape(speller.note)}</p>' if speller.note else ""
    return f"{note}{walk_bar(subsets, 'subset', _TOGGLES)}<main>\n{''.join(cards)}</main>\n"


def _card(
    row: dict[str, Any], sample: TokenizedSample, pixels: PixelStore, speller: Speller, image_token_id: int
) -> str:
    figures = [row["split"], f"{row['num_tokens']:,} tokens", f"{row['num_loss_tokens']:,} learnt"]
    if row["num_images"]:
        inside = int((sample.input_ids == image_token_id).sum())
        figures += [f"{inside:,} of images", f"{row['num_patches']:,} patches", counted(row["num_images"], "image")]
    figures += [f"{row['size'] / 1000:,.1f} kB as {pixels.codec}"]
    side = f'<div class="side">{_pictures(sample, pixels.config.patch_format)}</div>' if row["num_images"] else ""
    tokens = "".join(_runs(sample, pixels.config.patch_format.merge_size, speller, image_token_id))
    return (
        f'<section class="wide card" data-group="{html.escape(row["subset"])}"><h2><code>{html.escape(row["key"])}'
        f"</code><small>{_DOT.join(figures)}</small></h2>\n"
        f'<div class="sample{"" if side else " text"}">{side}<pre class="tokens">{tokens}</pre></div>\n</section>\n'
    )


def _pictures(sample: TokenizedSample, patch_format: PatchFormat) -> str:
    size, merge = patch_format.patch_size, patch_format.merge_size
    offsets = np.cumsum([0, *sample.image_grid_thw.prod(-1)])
    shown = []
    for place, (grid, start, end) in enumerate(zip(sample.image_grid_thw[:_SHOWN_IMAGES], offsets, offsets[1:])):
        time, rows, columns = (int(n) for n in grid)
        source = data_uri(functools.partial(patches_png, sample.patches[start:end], grid, patch_format))
        tiny = max(rows, columns) * size <= TINY_SIDE
        density = " fine" if max(rows, columns) > _COARSE_GRID else " tiny" if tiny else ""
        caption = (
            f"image {place + 1}: {columns * size} x {rows * size} px, grid {time} x {rows} x {columns}\n"
            f"{rows * columns:,} patches of {size} px, {rows * columns // merge**2:,} tokens"
        )
        shown.append(
            f'<figure class="shot"><div class="patched{density}"><img alt="" src="{source}">'
            f"{_grid_svg(rows, columns, merge)}</div><figcaption>{caption}</figcaption></figure>"
        )
    more = len(sample.image_grid_thw) - _SHOWN_IMAGES
    return "".join(shown) + (f'<p class="note">{more} more images are not on this page</p>' if more > 0 else "")


def _grid_svg(rows: int, columns: int, merge: int) -> str:
    """Lines between patches, and stronger ones around blocks of merge x merge; a unit is a patch."""
    lines = {"patches": "", "blocks": ""}
    for x in range(columns + 1):
        lines["patches" if x % merge else "blocks"] += f"M{x} 0V{rows}"
    for y in range(rows + 1):
        lines["patches" if y % merge else "blocks"] += f"M0 {y}H{columns}"
    paths = "".join(f'<path class="{name}" d="{path}"/>' for name, path in lines.items() if path)
    return f'<svg viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" aria-hidden="true">{paths}</svg>'


def _runs(sample: TokenizedSample, merge: int, speller: Speller, image_token_id: int) -> Iterator[str]:
    """Runs of tokens of one kind: given, learnt, and a chip an image."""
    kinds = np.where(sample.input_ids == image_token_id, 2, sample.loss_mask)
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    image, left = 0, _SHOWN_TOKENS
    for start, end in zip(starts, [*starts[1:], len(kinds)]):
        if kinds[start] == 2:
            _, rows, columns = sample.image_grid_thw[image] // [1, merge, merge]
            image += 1
            yield (
                f'<span class="chip" title="{end - start} times token {image_token_id}">'
                f"image {image}: {columns} x {rows} = {end - start} tokens</span>"
            )
            continue
        shown = min(end, start + left)
        kind = "learnt" if kinds[start] else "given"
        yield f'<span class="{kind}">{"".join(_tokens(sample.input_ids, start, shown, speller))}</span>'
        left -= shown - start
        if shown < end:
            yield f'<span class="chip">{len(kinds) - shown:,} more tokens are not on this page</span>'
            return


def _tokens(ids: np.ndarray, start: int, end: int, speller: Speller) -> Iterator[str]:
    """Each token as an element that knows its id; tokens that are one character together are one element."""
    while start < end:
        stop, text = _next_text(ids, start, end, speller)
        numbers = " ".join(map(str, ids[start:stop]))
        yield f'<i data-t="{numbers} at {start}">{html.escape(text)}</i>'
        start = stop


def _next_text(ids: np.ndarray, start: int, end: int, speller: Speller) -> tuple[int, str]:
    if speller.decode is None:
        return start + 1, f"{ids[start]} "
    for stop in range(start + 1, min(end, start + _LONGEST_CHARACTER) + 1):
        text = speller.decode(ids[start:stop])
        if _BROKEN not in text:
            return stop, text
    return start + 1, speller.decode(ids[start : start + 1])
