"""Tokenized samples on a page: every token, whether it is trained on, each image with its patches, and a sheet of the
frames of videos with the times that the model reads."""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from dataset_builders.contracts.boxes import RELATIVE, Box
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import (
    PatchFormat,
    PixelStore,
    TokenizedSample,
    index_partitions,
    read_partition,
    read_pixel_store,
)
from dataset_builders.errors import InputError
from dataset_builders.pictures.pixels import decode_sample
from dataset_builders.storage.store import StorePath, is_local, local_copy, location
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.boxes import read_boxes
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import BoxFormat
from stages.shared.chat_format.images import patches_png
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.shared.pages.drawn_boxes import BoxLayer, drawn_boxes
from stages.shared.pages.page import render_part
from stages.shared.pages.report import data_uri
from stages.shared.pages.shown_numbers import counted, show_value
from stages.shared.preview.samples import TINY_SIDE, evenly, in_turn, small_picture
from trainer.contract.names import HF_EXPORT, RUN_JSON

_OPENED_PARTITIONS = 4  # most partitions of a large index to open, evenly spread
_SHOWN_TOKENS = 4000  # per sample, without tokens of images and frames
_SHOWN_IMAGES = 16
_SHOWN_GROUPS = 64  # pairs of frames of videos
_GROUP_SIDE = 224  # pixels of a pair of frames, at most
_TIME = re.compile(r"<(\d+\.\d) seconds>")
_TIME_TOKENS = 24  # more than a time and a vision token have
_COARSE_GRID = 24  # patches per side; a finer grid has thinner lines
_LONGEST_CHARACTER = 8  # most tokens that are decoded together until their bytes are whole characters
_BROKEN = "\ufffd"
_NOT_DRAWN = "The boxes in the text are not drawn, since it does not say of which of the images they are."


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of one kind from `start` to before `end`; an image, or a temporal group of a video, has its size in tokens
    and a name: image 1, or frames at 0.3 seconds."""

    kind: Literal["given", "learnt", "visual"]
    start: int
    end: int
    name: str = ""
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True, slots=True)
class Speller:
    """The decoder of token ids."""

    decode: Callable[[np.ndarray], str] | None  # token ids -> text; None: there is no tokenizer, and the page shows ids
    note: str  # about the tokenizer, for the reader of the page


def find_speller(tokenized: Artifact, model: ModelDirectory | None) -> Speller:
    """Return the speller of a tokenized artifact: the model's, or from the root's tokenizer with the same digest."""
    parent = tokenized.manifest.parents.get("processor")
    digest = parent.fingerprint if parent else ""
    if model is not None:
        is_same = processor_input(model).digest == digest
        note = "" if is_same else "The tokenizer given is not the one that wrote these tokens; the text may be wrong."
        return Speller(ChatEncoder(model).decode, note)
    for candidate in _hf_dirs(tokenized.dir.parent.parent):
        if (candidate / "config.json").is_file():
            with _small_files(candidate) as folder:
                model = ModelDirectory(folder)
                if processor_input(model).digest == digest:
                    return Speller(ChatEncoder(model).decode, "")
    return Speller(
        None, "No tokenizer with the digest of this artifact lies in its root: give --model to see text, not token ids."
    )


def _hf_dirs(artifacts: StorePath) -> Iterator[StorePath]:
    """Yield model directories that a root's artifacts contain or name."""
    for stage in ("embedded_model", "export"):
        if (artifacts / stage).is_dir():
            yield from (artifact / HF_EXPORT for artifact in sorted((artifacts / stage).iterdir(), key=str))
    if (artifacts / "train").is_dir():
        for artifact in sorted((artifacts / "train").iterdir(), key=str):
            if (artifact / RUN_JSON).is_file():
                yield location(json.loads((artifact / RUN_JSON).read_text(encoding="utf-8"))["hf_dir"])


@contextlib.contextmanager
def _small_files(hf_dir: StorePath) -> Iterator[Path]:
    """Yield a local directory with all files of a model directory; from a store, without the weights."""
    if is_local(hf_dir):
        yield hf_dir
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in hf_dir.iterdir():
            if file.suffix in (".json", ".jinja", ".txt"):
                Path(folder, file.name).write_bytes(local_copy(file).read_bytes())
        yield Path(folder)


def choose_rows(directory: StorePath, count: int, key: str | None, shard: str | None) -> list[dict[str, Any]]:
    """Choose rows of the index: some of every subset, or the row of `key`; only from `shard`, if it is given.

    Raises:
        InputError: there is no such key or shard.
    """
    partitions = index_partitions(directory)
    opened = partitions if key or shard else evenly(partitions, _OPENED_PARTITIONS)
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in opened:
        table = read_partition(path)
        for column, value in (("key", key), ("shard", shard)):
            table = table if value is None else table.filter(pc.equal(table[column], value))
        of_each = -(-count // len(opened)) if shard is None else count
        for subset in pc.unique(table["subset"]).to_pylist():
            of_subset = table.filter(pc.equal(table["subset"], subset))
            chosen = pa.array(evenly(range(len(of_subset)), of_each), pa.int64())
            groups.setdefault(subset, []).extend(of_subset.take(chosen).to_pylist())
        if (key or shard) and groups:  # a shard is completely in one partition
            break
    if not groups and (key or shard):
        name = f"--key {key}" if key else f"{directory / shard}"
        raise InputError(
            f"{name}: the index of {directory} has no such sample; leave {'--key' if key else 'the shard'} out "
            "to see some that are there"
        )
    return in_turn(groups, count)


def tokens_html(
    tokenized: Artifact,
    count: int,
    key: str | None = None,
    shard: str | None = None,
    model: ModelDirectory | None = None,
) -> Markup:
    """Return cards of tokenized samples, with a navigation bar. Raises InputError as `choose_rows`."""
    stats = tokenized.manifest.stats
    pixels = read_pixel_store(tokenized.dir, stats)
    speller = find_speller(tokenized, model)
    boxes = BoxFormat.model_validate(stats["boxes"]) if stats.get("boxes") else None
    cards = []
    for row in choose_rows(tokenized.dir, count, key, shard):
        record = read_record(tokenized.dir / row["shard"], row["offset"], row["size"], checksum=row["checksum"])
        sample = decode_sample(row["key"], record, pixels)
        ids = (stats.get("image_token_id", -1), stats.get("video_token_id", -1))
        cards.append(_card(row, sample, pixels, speller, ids, boxes))
    return render_part("tokens.html.j2", cards=cards, note=speller.note)


def _card(
    row: dict[str, Any],
    sample: TokenizedSample,
    pixels: PixelStore,
    speller: Speller,
    visual_ids: tuple[int, int],
    boxes: BoxFormat | None,
) -> dict[str, Any]:
    """Return the values of tokens.html.j2 for one sample."""
    figures = [row["split"], f"{row['num_tokens']:,} tokens", f"{row['num_loss_tokens']:,} learnt"]
    if row["num_images"]:
        groups = int(sample.is_video.sum())
        kinds = ((visual_ids[0], "image", len(sample.is_video) - groups), (visual_ids[1], "frame pair", groups))
        kinds = [(int((sample.input_ids == token).sum()), noun, count) for token, noun, count in kinds if count]
        figures += [f"{tokens:,} of {noun}s" for tokens, noun, _ in kinds]
        figures += [f"{row['num_patches']:,} patches"]
        figures += [counted(count, noun) for _, noun, count in kinds]
    figures += [f"{show_value(row['size'] / 1000)} kB as {pixels.codec}"]
    runs = list(token_runs(sample, visual_ids, pixels.config.patch_format.merge_size, speller))
    pictures = _pictures(sample, pixels.config.patch_format)
    names = [run.name for run in runs if run.kind == "visual"]
    groups = _groups(sample, pixels.config.patch_format, names)
    layers = [] if boxes is None else list(_box_layers(runs, sample.input_ids, speller))
    if layers and len(pictures) == 1:
        size = pictures[0]["width"], pictures[0]["height"]
        pictures[0]["boxes"] = drawn_boxes(size, [_in_pixels(layer, size, boxes) for layer in layers])
    return {
        "key": row["key"],
        "subset": row["subset"],
        "figures": figures,
        "num_images": int((~sample.is_video).sum()),
        "num_groups": int(sample.is_video.sum()),
        "pictures": pictures,
        "groups": groups,
        "not_drawn": _NOT_DRAWN if layers and len(pictures) > 1 else "",
        "runs": list(_spelt(runs, sample.input_ids, speller)),
    }


def _box_layers(runs: Sequence[TokenRun], ids: np.ndarray, speller: Speller) -> Iterator[BoxLayer]:
    """Yield the boxes that the decoded texts state, as they are written: those that are given, and those learnt."""
    if speller.decode is None:
        return
    for kind, name, drawn in (("given", "given", "asked"), ("learnt", "learnt", "true")):
        texts = [speller.decode(ids[run.start : run.end]) for run in runs if run.kind == kind]
        found = [box for text in texts for box in read_boxes(text) or ()]
        if found:
            yield BoxLayer(name=name, kind=drawn, boxes=[Box(*corners, label) for corners, label in found])


def _in_pixels(layer: BoxLayer, size: tuple[int, int], boxes: BoxFormat) -> BoxLayer:
    """Return written boxes in pixels of the resized image, of this (width, height)."""
    if boxes.convention == "resized_pixels":
        return layer
    x, y = (side / RELATIVE for side in size)
    scaled = [Box(box.x1 * x, box.y1 * y, box.x2 * x, box.y2 * y, box.label) for box in layer.boxes]
    return dataclasses.replace(layer, boxes=scaled)


def token_runs(
    sample: TokenizedSample, visual_ids: tuple[int, int], merge_size: int, speller: Speller
) -> Iterator[TokenRun]:
    """Yield all tokens of a sample as consecutive runs. `visual_ids` are the ids of tokens of images and of videos."""
    ids = sample.input_ids
    kinds = np.where(np.isin(ids, visual_ids), 2, sample.loss_mask)
    starts = np.flatnonzero(np.diff(kinds, prepend=-1)).tolist()
    sizes = iter((sample.image_grid_thw // [1, merge_size, merge_size]).tolist())
    images, groups = itertools.count(1), itertools.count(1)
    for start, end in zip(starts, [*starts[1:], len(kinds)]):
        if kinds[start] != 2:
            yield TokenRun("learnt" if kinds[start] else "given", start, end)
            continue
        _, rows, columns = next(sizes)
        if ids[start] == visual_ids[0]:
            name = f"image {next(images)}"
        else:
            number = next(groups)
            before = speller.decode(ids[max(0, start - _TIME_TOKENS) : start]) if speller.decode else ""
            times = _TIME.findall(before)
            name = f"frames at {times[-1]} seconds" if times else f"frames {2 * number - 1} and {2 * number}"
        yield TokenRun("visual", start, end, name, rows, columns)


def _pictures(sample: TokenizedSample, patch_format: PatchFormat) -> list[dict[str, Any]]:
    size, merge = patch_format.patch_size, patch_format.merge_size
    pictures = []
    images = [visual for visual, is_video in zip(sample.visuals(), sample.is_video) if not is_video]
    for image in images[:_SHOWN_IMAGES]:
        time, rows, columns = (int(n) for n in image.grid)
        is_tiny = max(rows, columns) * size <= TINY_SIDE
        pictures.append(
            {
                "source": small_picture(functools.partial(patches_png, [image.patches], image.grid, patch_format)),
                "density": " fine" if max(rows, columns) > _COARSE_GRID else " tiny" if is_tiny else "",
                "lines": _grid_lines(rows, columns, merge),
                "boxes": None,
                **{"time": time, "rows": rows, "columns": columns, "width": columns * size, "height": rows * size},
                **{"patch_size": size, "num_patches": rows * columns, "num_tokens": rows * columns // merge**2},
            }
        )
    return pictures


def _groups(sample: TokenizedSample, patch_format: PatchFormat, names: Sequence[str]) -> list[dict[str, str]]:
    """Return both frames of each temporal group as one picture, and its name. `names` are those of all visuals."""
    visuals = zip(sample.visuals(), sample.is_video, names, strict=True)
    groups = [(visual, name) for visual, is_video, name in visuals if is_video]
    return [
        {"source": data_uri(patches_png([*visual[1:]], visual.grid, patch_format, _GROUP_SIDE)), "name": name}
        for visual, name in groups[:_SHOWN_GROUPS]
    ]


def _grid_lines(rows: int, columns: int, merge: int) -> dict[str, str]:
    """Return SVG paths of lines between patches and around blocks of merge x merge patches; the unit is a patch."""
    lines = {"patches": "", "blocks": ""}
    for x in range(columns + 1):
        lines["patches" if x % merge else "blocks"] += f"M{x} 0V{rows}"
    for y in range(rows + 1):
        lines["patches" if y % merge else "blocks"] += f"M0 {y}H{columns}"
    return lines


def _spelt(runs: Sequence[TokenRun], ids: np.ndarray, speller: Speller) -> Iterator[TokenRun | dict[str, Any]]:
    """Yield runs of images and frames unchanged, other runs with their tokens as text, up to _SHOWN_TOKENS tokens."""
    room = _SHOWN_TOKENS
    for run in runs:
        if run.kind == "visual":
            yield run
            continue
        shown = min(run.end, run.start + room)
        yield {"kind": run.kind, "tokens": list(_tokens(ids, run.start, shown, speller))}
        room -= shown - run.start
        if shown < run.end:
            yield {"kind": "more", "count": len(ids) - shown}
            return


def _tokens(ids: np.ndarray, start: int, end: int, speller: Speller) -> Iterator[tuple[str, str]]:
    """Yield (id and position, text) of each token; tokens that form one character stay together."""
    while start < end:
        stop, text = start + 1, f"{ids[start]} "
        if speller.decode is not None:
            alone = text = speller.decode(ids[start:stop])
            while _BROKEN in text and stop < min(end, start + _LONGEST_CHARACTER):
                stop += 1
                text = speller.decode(ids[start:stop])
            if _BROKEN in text:  # no character even with the tokens after it
                stop, text = start + 1, alone
        yield f"{' '.join(map(str, ids[start:stop]))} at {start}", text
        start = stop
