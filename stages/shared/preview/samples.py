"""Samples on a page: images next to their conversation, in which trained and given answers look different."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from markupsafe import Markup

from dataset_builders.contracts.boxes import BOX_SLOT, BoxPlace
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, SkipSample, file_digests, from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import PILLOW_PIXEL_LIMIT, ImageLimits, check_image, preview_png
from dataset_builders.storage.store import StorePath
from stages.shared.pages.drawn_boxes import BoxLayer, box_words, drawn_boxes
from stages.shared.pages.page import render_part
from stages.shared.pages.report import data_uri
from stages.shared.pages.shown_numbers import counted, show_value

_READ_RECORDS = 400  # number of first records to read from a shard
_SHOWN_IMAGES = 16  # per sample
_SHOWN_CHARS = 8000  # per piece of a message between images and boxes
_NAMED_BOXES = 6  # in words, of each place
_SLOTS = re.compile(f"({IMAGE_SLOT}|{BOX_SLOT})")
TINY_SIDE = 128  # an image with both sides up to this length is enlarged, pixel by pixel
_SIDES = (640, 448, 320)  # pixels; the first side whose PNG is small enough is used, or the last
_PNG_BYTES = 250_000
_LIMITS = ImageLimits(max_pixels=PILLOW_PIXEL_LIMIT, min_side=1)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ShardSample:
    """A sample and the shard that holds it."""

    sample: Sample
    shard: ShardEntry | None
    name: str


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` of the items, evenly spread, in order, starting with the first."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def in_turn(groups: Mapping[str, Sequence[Item]], count: int) -> list[Item]:
    """Return `count` items in rotation: the first of each group, by the groups' names, then the second of each, ..."""
    turns = sorted((turn, name) for name, items in groups.items() for turn in range(len(items)))
    return [groups[name][turn] for turn, name in turns[:count]]


def choose_samples(
    directory: StorePath, shards: Sequence[ShardEntry], count: int, num_shards: int
) -> list[ShardSample]:
    """Choose some samples of every subset, from at most `num_shards` shards spread over the dataset."""
    opened = evenly(shards, min(count, num_shards))
    groups: dict[str, list[ShardSample]] = {}
    for shard in opened:
        of_shard: Counter[str] = Counter()
        for item in islice(_read(directory / shard.name, shard), _READ_RECORDS):
            subset = item.sample.subset
            if of_shard[subset] < -(-count // len(opened)):
                of_shard[subset] += 1
                groups.setdefault(subset, []).append(item)
    return in_turn(groups, count)


def find_sample(directory: StorePath, shards: Sequence[ShardEntry], key: str) -> list[ShardSample]:
    """Search the shards in order for the sample of this key; return it as a list of one.

    Raises:
        InputError: no shard has this key.
    """
    for shard in shards:
        for item in _read(directory / shard.name, shard):
            if item.sample.key == key:
                return [item]
    raise InputError(f"--key {key}: no sample of {directory} has this key; leave --key out to see some that are there")


def samples_of_shard(path: StorePath, key: str | None, count: int) -> list[ShardSample]:
    """Return the first samples of one shard, or the sample of `key`. Raises InputError as `find_sample`."""
    items = (item for item in _read(path, None) if key in (None, item.sample.key))
    chosen = list(islice(items, count if key is None else 1))
    if not chosen:
        raise InputError(f"{path} holds no sample" + (f" of --key {key}" if key else ""))
    return chosen


def _read(path: StorePath, shard: ShardEntry | None) -> Iterator[ShardSample]:
    name = shard.name if shard else path.name
    for key, fields in iter_records(path):  # no entry: a whole shard's digest would cost more than the page
        if "input_ids.i32" in fields:
            raise InputError(
                f"{path} is a tokenized shard without its artifact, whose manifest says how pixels are stored; "
                "give one that lies in its artifact's directory"
            )
        try:
            sample = from_fields(key, fields)
            sample.check()
        except (AttributeError, KeyError, TypeError, ValueError, SkipSample) as error:
            raise InputError(
                f"{path}: record {key} is not one of a sample shard ({type(error).__name__}: {error}); give a shard "
                "that convert wrote, or the directory of a whole artifact"
            ) from error
        yield ShardSample(sample, shard, name)


def samples_html(samples: Sequence[ShardSample]) -> Markup:
    """Return cards of samples, with a navigation bar."""
    return render_part("samples.html.j2", cards=[_card(item) for item in samples])


def _card(item: ShardSample) -> dict[str, Any]:
    """Return the values of samples.html.j2 for one sample."""
    sample = item.sample
    size = sum(map(len, sample.images)) / 1000
    images = f"{counted(len(sample.images), 'image')}, {show_value(size)} kB" if sample.images else "no image"
    split = [item.shard.split] if item.shard else []
    pictures = []
    for place, (data, digest) in enumerate(zip(sample.images[:_SHOWN_IMAGES], file_digests(sample))):
        picture = _describe_picture(data) | {"boxes": boxes_over(sample, place)}
        caption = f"image {place + 1}: {picture['words']}, {show_value(len(data) / 1000)} kB\nsha256 {digest[:16]}"
        pictures.append({**picture, "caption": caption})
    messages, num_images = [], 0
    for message in sample.messages:
        thought = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
        kind, label = (message.role if message.role in ("system", "user") else "other"), message.role
        if message.role == "assistant":
            kind = "assistant learnt" if message.is_learnt else "assistant"  # classes of style.css
            label = "assistant, learnt" if message.is_learnt else "assistant, given"
        pieces = _pieces(thought + message.text, message.boxes, num_images)
        messages.append({"kind": kind, "role": label, "pieces": pieces})
        num_images += message.text.count(IMAGE_SLOT)
    return {
        "key": sample.key,
        "subset": sample.subset,
        "figures": [*split, item.name, images, f"digest {sample.digest()[:12]}"],
        "pictures": pictures,
        "num_images": len(sample.images),
        "messages": messages,
    }


def _pieces(text: str, places: Sequence[BoxPlace], first_image: int) -> list[dict[str, Any]]:
    """Return a message in pieces: text, the number of an image from 0, or boxes in words."""
    pieces: list[dict[str, Any]] = []
    numbers, coming = itertools.count(first_image), iter(places)
    for piece in _SLOTS.split(text):
        is_image, is_boxes = piece == IMAGE_SLOT, piece == BOX_SLOT and bool(places)
        pieces.append(
            {
                "image": next(numbers) if is_image else None,
                "boxes": _place_words(next(coming)) if is_boxes else "",
                "text": _cut(piece),
            }
        )
    return pieces


def _place_words(place: BoxPlace) -> str:
    words = [box_words(box) for box in place.boxes[:_NAMED_BOXES]] or ["no boxes"]
    words += [f"and {len(place.boxes) - _NAMED_BOXES} more"] if len(place.boxes) > _NAMED_BOXES else []
    return f"image {place.image + 1}, px: {'; '.join(words)}"


def boxes_over(sample: Sample, image: int) -> dict[str, Any] | None:
    """Return the drawing of an image's boxes, in pixels of the image as shown; None if it has none."""
    layers, size = [], (0, 0)
    for role, name, kind in (("user", "in questions", "asked"), ("assistant", "in answers", "true")):
        places = [place for m in sample.messages if m.role == role for place in m.boxes if place.image == image]
        if places:
            size = places[0].size
            boxes = [box for place in places for box in place.boxes]
            layers.append(BoxLayer(name=name, kind=kind, boxes=boxes))
    return drawn_boxes(size, layers) if layers else None


def _cut(text: str) -> str:
    more = len(text) - _SHOWN_CHARS
    return text if more <= 0 else f"{text[:_SHOWN_CHARS]}\n[{more:,} more characters are not on this page]"


def small_picture(draw: Callable[[int], bytes]) -> str:
    """Return an image as the source of an <img>, small enough to be embedded.

    Args:
        draw: side in pixels -> a PNG that fits into side x side.
    """
    for side in _SIDES:
        png = draw(side)
        if len(png) <= _PNG_BYTES:
            break
    return data_uri(png)


def _describe_picture(data: bytes) -> dict[str, object]:
    """Return an encoded image as training gets it (upright, transparency on white), and its size and format in words.

    Returns:
        `source` of the <img> and `is_tiny`, or `lost`, the reason why there is no image; and `words`.
    """
    try:
        info = check_image(data, _LIMITS, decode=False)
        source = small_picture(lambda side: preview_png([data], side))
    except SkipSample as skip:
        return {"source": None, "lost": skip.reason, "words": "no picture"}
    turned = f", turned by EXIF {info.orientation}" if info.orientation != 1 else ""
    words = f"{info.width} x {info.height} px, {info.format} {info.mode}{turned}"
    return {"source": source, "is_tiny": max(info.width, info.height) <= TINY_SIDE, "words": words}
