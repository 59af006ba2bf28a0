"""Samples of a preview: pictures beside their conversation, what is learnt and what is given."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample, image_digests
from dataset_builders.contracts.sample_record import from_fields
from dataset_builders.contracts.shard_io import BrokenShard, iter_records
from dataset_builders.contracts.store import StorePath, is_local
from stages.preview_page import walk_bar
from stages.preview_pictures import picture_html

_OPENED_SHARDS = 8  # of a large dataset, evenly spread; a shard in a store is fetched whole
_OPENED_REMOTE = 2
_READ_RECORDS = 400  # of a shard, its first ones
_SHOWN_IMAGES = 16  # of one sample
_SHOWN_CHARS = 8000  # of one message

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Found:
    """A sample and the shard that holds it."""

    sample: Sample
    shard: ShardEntry | None
    name: str


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of them, in order, from the first one on."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def in_turn(groups: Mapping[str, Sequence[Item]], count: int) -> list[Item]:
    """The first of each group in order of their names, then the second of each, ... until there are `count`."""
    turns = sorted((turn, name) for name, items in groups.items() for turn in range(len(items)))
    return [groups[name][turn] for turn, name in turns[:count]]


def counted(number: int, noun: str) -> str:
    """1 image, 2 images."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def choose_samples(directory: StorePath, shards: Sequence[ShardEntry], count: int) -> list[Found]:
    """Some samples of every subset, out of shards that are spread over the dataset."""
    opened = evenly(shards, min(count, _OPENED_SHARDS if is_local(directory) else _OPENED_REMOTE))
    groups: dict[str, list[Found]] = {}
    for shard in opened:
        here: dict[str, int] = {}
        for number, found in enumerate(_read(directory / shard.name, shard)):
            subset = found.sample.subset
            if number == _READ_RECORDS:
                break
            if here.get(subset, 0) < -(-count // len(opened)):
                here[subset] = here.get(subset, 0) + 1
                groups.setdefault(subset, []).append(found)
    return in_turn(groups, count)


def find_sample(directory: StorePath, shards: Sequence[ShardEntry], key: str) -> list[Found]:
    """The sample of this key, looked for in one shard after another; a list of one.

    Raises:
        InputError: no shard holds it.
    """
    for shard in shards:
        for found in _read(directory / shard.name, shard):
            if found.sample.key == key:
                return [found]
    raise InputError(f"--key {key}: no sample of {directory} has this key; leave --key out and see some that are there")


def samples_of_shard(path: StorePath, key: str | None, count: int) -> list[Found]:
    """Samples of one shard, its first ones, or the one of `key`; raises InputError as `find_sample` does."""
    chosen: list[Found] = []
    for found in _read(path, None):
        if key in (None, found.sample.key):
            chosen.append(found)
        if len(chosen) == (count if key is None else 1):
            break
    if not chosen:
        raise InputError(f"{path} holds no sample" + (f" of --key {key}" if key else ""))
    return chosen


def _read(path: StorePath, shard: ShardEntry | None) -> Iterator[Found]:
    name = shard.name if shard else path.name
    try:
        for key, fields in iter_records(path, shard.sha256 if shard else None):
            yield Found(_sample(path, key, fields), shard, name)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing, which the manifest names; make the artifact again") from error
    except BrokenShard as error:
        raise InputError(f"{path} cannot be read as a shard ({error}); make the artifact again") from error


def _sample(path: StorePath, key: str, fields: dict[str, bytes]) -> Sample:
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
            f"{path}: record {key} is no sample of a sample shard ({type(error).__name__}: {error}); give a shard that "
            "convert wrote, or the directory of a whole artifact"
        ) from error
    return sample


def samples_html(found: Sequence[Found]) -> str:
    """Cards of samples under a bar to walk through them."""
    subsets = sorted({html.escape(one.sample.subset) for one in found})
    cards = "".join(_card(number, one) for number, one in enumerate(found))
    return walk_bar(subsets, "subset") + f"<main>\n{cards}</main>\n"


def _card(number: int, found: Found) -> str:
    sample, split = found.sample, found.shard.split + " \u00b7 " if found.shard else ""
    size = sum(map(len, sample.images)) / 1000
    images = f"{counted(len(sample.images), 'image')}, {size:,.1f} kB" if sample.images else "no image"
    about = f"{split}{html.escape(found.name)} \u00b7 {images} \u00b7 digest {sample.digest()[:12]}"
    chat = "".join(_bubbles(number, sample))
    side = f'<div class="side">{_pictures(number, sample)}</div>' if sample.images else ""
    return (
        f'<section class="wide card" data-group="{html.escape(sample.subset)}"><h2><code>{html.escape(sample.key)}'
        f'</code><small>{about}</small></h2>\n<div class="sample{"" if side else " text"}">{side}<div>{chat}</div>'
        "</div>\n</section>\n"
    )


def _pictures(number: int, sample: Sample) -> str:
    shown = []
    for place, (data, digest) in enumerate(zip(sample.images[:_SHOWN_IMAGES], image_digests(sample))):
        picture, words = picture_html(data, f"p{number}-{place}")
        caption = f"image {place + 1}: {words}, {len(data) / 1000:,.1f} kB\nsha256 {digest[:16]}"
        shown.append(f'<figure class="shot">{picture}<figcaption>{caption}</figcaption></figure>')
    more = len(sample.images) - _SHOWN_IMAGES
    return "".join(shown) + (f'<p class="note">{more} more images are not on this page</p>' if more > 0 else "")


def _bubbles(number: int, sample: Sample) -> Iterator[str]:
    place = 0
    for message in sample.messages:
        parts = []
        for i, text in enumerate(message.text.split(IMAGE_SLOT)):
            if i:
                parts.append(_chip(number, place))
                place += 1
            parts.append(html.escape(_cut(text)))
        kind, role = _kind(message)
        yield f'<div class="msg {kind}"><div class="role">{role}</div><div class="say">{"".join(parts)}</div></div>\n'


def _chip(number: int, place: int) -> str:
    copy = f'<img alt="" data-of="p{number}-{place}">' if place < _SHOWN_IMAGES else ""
    return f'<span class="chip">{copy}image {place + 1}</span>'


def _kind(message: Message) -> tuple[str, str]:
    """CSS classes and the words above a bubble."""
    role = message.role if message.role in ("system", "user", "assistant") else "other"
    if role != "assistant":
        return role, html.escape(message.role)
    return ("assistant learnt", "assistant, learnt") if message.is_learnt else ("assistant", "assistant, given")


def _cut(text: str) -> str:
    more = len(text) - _SHOWN_CHARS
    return text if more <= 0 else f"{text[:_SHOWN_CHARS]}\n[{more:,} more characters are not on this page]"
