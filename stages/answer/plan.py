"""The questions and their batches, planned before the model is loaded, from texts and image headers.

    plan.jsonl    one line per question, in the order of the samples, with the number of tokens of its prompt

All questions are sorted by length, the longest first, and cut into parts. A worker takes whole parts, and a killed run
keeps whole parts. A part is cut into groups; the model reads the prompts of a group in one call. Parts and groups
depend only on the lengths and the config, not on the number of workers or on an earlier run.
"""

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, SkipSample, from_fields, subset_of
from dataset_builders.contracts.shard_io import iter_located, iter_records
from dataset_builders.contracts.tokenized import PixelConfig
from dataset_builders.pictures.images import image_size
from dataset_builders.pictures.pixels import image_grid
from dataset_builders.storage.files import read_sealed, write_sealed
from stages.answer.records import rows_of
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.chat import ChatEncoder

PLAN_JSONL = "plan.jsonl"
_GROUPS_SIDE_BY_SIDE = 4  # groups that fill a decoding batch; a new group enters as old rows end


@dataclass(frozen=True, slots=True)
class Question:
    """An assistant turn to be answered."""

    key: str
    turn: int  # number of the assistant turn in its sample, from 0
    place: int  # index of the answer among the messages; the messages before it are the prompt
    num_images: int  # in the prompt, which has the sample's first ones
    num_tokens: int  # in the prompt, including image tokens; 0 if it cannot be asked
    shard: str  # shard, offset, size and checksum are the place of the sample's record
    offset: int
    size: int
    checksum: int
    skip: str = ""  # why it cannot be asked, judged by its text and its images' headers; empty if it can be asked
    detail: str = ""


class StoredQuestion(NamedTuple):
    """The byte range of a sample's record; `checksum` is xxh3_64 of its bytes."""

    shard: str
    offset: int
    size: int
    checksum: int


def heldout_records(samples: Artifact, max_per_subset: int | None = None) -> Iterator[tuple[Sample, StoredQuestion]]:
    """Yield the held-out samples of a convert artifact in shard order, each with the place of its record; of each
    subset, all or a draw of `max_per_subset`."""
    shards = [entry for entry in samples.manifest.shards if entry.split == "heldout"]
    drawn = None if max_per_subset is None else _draw(samples, shards, max_per_subset)
    for entry in shards:
        for place, fields in iter_located(samples.dir / entry.name, entry):
            if drawn is None or place.key in drawn:
                stored = StoredQuestion(entry.name, place.offset, place.size, place.checksum)
                yield from_fields(place.key, fields), stored


def _draw(samples: Artifact, shards: Sequence[ShardEntry], number: int) -> set[str]:
    """Return the keys of the samples that are drawn: `number` of each subset, or all of it."""
    keys: dict[str, list[str]] = {}
    for entry in shards:
        for key, _ in iter_records(samples.dir / entry.name, entry):
            keys.setdefault(subset_of(key), []).append(key)
    # The smallest hashes are the same samples in every run, spread over the subset, and a part of a larger draw.
    return {key for each in keys.values() for key in heapq.nsmallest(number, each, key=_draw_of)}


def _draw_of(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape"))


def heldout_samples(samples: Artifact, max_per_subset: int | None = None) -> Iterator[Sample]:
    """Return an iterator over the samples of `heldout_records`."""
    return (sample for sample, _ in heldout_records(samples, max_per_subset))


def plan_questions(
    samples: Artifact, chat: ChatEncoder, pixels: PixelConfig, max_per_subset: int | None
) -> Iterator[Question]:
    """Yield every assistant turn of the held-out samples, in their order; no image is decoded."""
    for sample, record in heldout_records(samples, max_per_subset):
        answers = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
        for turn, place in enumerate(answers):
            before = sample.messages[:place]
            shown = sum(message.text.count(IMAGE_SLOT) for message in before)
            length, skip, detail = 0, "", ""
            try:
                # EXIF may swap an image's sides, but the number of its tokens does not change.
                grids = [image_grid(*image_size(image), pixels) for image in sample.images[:shown]]
                length = len(chat.encode_prompt(before, grids))
            except SkipSample as error:
                skip, detail = error.reason, error.detail
            yield Question(sample.key, turn, place, shown, length, *record, skip=skip, detail=detail)


def write_plan(path: Path, questions: Sequence[Question]) -> None:
    write_sealed(path, "".join(json.dumps(asdict(question), ensure_ascii=False) + "\n" for question in questions))


def read_plan(path: Path) -> list[Question] | None:
    """Return the questions in a plan's file; None if there is no whole plan."""
    text = read_sealed(path)
    return None if text is None else [Question(**row) for row in rows_of(text)]


def cut_parts(questions: Sequence[Question], part_size: int) -> list[list[int]]:
    """Return the question numbers of each part: all that can be asked, the longest first, `part_size` per part."""
    numbers = [number for number, question in enumerate(questions) if not question.skip]
    numbers.sort(key=lambda number: (-questions[number].num_tokens, number))
    return [numbers[start : start + part_size] for start in range(0, len(numbers), part_size)]


def cut_groups(lengths: Sequence[int], batch_size: int, batch_tokens: int) -> list[list[int]]:
    """Return the indices of the prompts in each group.

    Args:
        lengths: number of tokens of each prompt, the longest first.
        batch_size, batch_tokens: the limits of a decoding batch; a group, including padding, has at most a quarter of
            each (a single prompt may be longer).
    """
    rows, tokens = max(1, batch_size // _GROUPS_SIDE_BY_SIDE), batch_tokens // _GROUPS_SIDE_BY_SIDE
    groups: list[list[int]] = []
    for place in range(len(lengths)):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or len(groups[-1]) == rows or (len(groups[-1]) + 1) * longest > tokens:
            groups.append([])
        groups[-1].append(place)
    return groups
