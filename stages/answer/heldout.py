"""The held-out samples, and a model's answers to them.

answers.jsonl has a line for each assistant turn, in the order of the samples. A sample that cannot be asked has a
single line, with the reason.

    {"key": "ai2d/00001234", "turn": 0, "answer": "4", "stopped": true, "ids": [19]}
    {"key": "ai2d/00001235", "skip": "decode_error", "detail": "..."}
"""

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import xxhash

from dataset_builders.contracts.sample import Sample, from_fields, subset_of
from dataset_builders.contracts.shard_io import RecordRange, iter_located, iter_records
from dataset_builders.storage.store import StorePath
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.prompt import PromptFormat

ANSWERS_JSONL = "answers.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedAnswer:
    """The answer for one assistant turn."""

    key: str
    turn: int  # number of the assistant turn in its sample, from 0
    answer: str  # the text without special tokens
    stopped: bool  # whether the model generated an end-of-turn token
    ids: list[int]  # the generated tokens, without the end-of-turn token

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSample:
    """A sample that cannot be asked."""

    key: str
    skip: str  # a member of SKIP_REASONS
    detail: str


Line = GeneratedAnswer | SkippedSample


def heldout_samples(
    samples: Artifact, prompt: PromptFormat | None, max_per_subset: int | None = None
) -> Iterator[Sample]:
    """Return an iterator over the held-out samples of a convert artifact, in shard order.

    Args:
        prompt: the form of the model's prompts, in which boxes are written in the texts; None: they are not written,
            for a caller that reads no text or writes them itself.
        max_per_subset: number of samples to draw from each subset; None: all.
    """
    return (sample for sample, *_ in heldout_records(samples, prompt, max_per_subset))


def heldout_records(
    samples: Artifact, prompt: PromptFormat | None, max_per_subset: int | None = None
) -> Iterator[tuple[Sample, str, RecordRange]]:
    """Yield the samples of `heldout_samples`, each with the name of its shard and the byte range of its record."""
    shards = [entry for entry in samples.manifest.shards if entry.split == "heldout"]
    drawn: set[str] | None = None
    if max_per_subset is not None:
        keys: dict[str, list[str]] = {}
        for entry in shards:
            for key, _ in iter_records(samples.dir / entry.name, entry):
                keys.setdefault(subset_of(key), []).append(key)

        def hash_of(key: str) -> int:
            return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape"))

        # The smallest hashes are the same samples in every run, spread over the subset, and a part of a larger draw.
        drawn = {key for each in keys.values() for key in heapq.nsmallest(max_per_subset, each, key=hash_of)}
    for entry in shards:
        for record, fields in iter_located(samples.dir / entry.name, entry):
            if drawn is None or record.key in drawn:
                sample = from_fields(record.key, fields)
                yield sample if prompt is None else prompt.with_boxes(sample), entry.name, record


def read_answers(path: StorePath) -> Iterator[Line]:
    """Return an iterator over the lines of an answers file, in the order of the samples."""
    return map(line_of, iter_rows(path.read_text(encoding="utf-8")))


def to_line(line: Line) -> str:
    return json.dumps(asdict(line), ensure_ascii=False) + "\n"


def line_of(row: dict) -> Line:
    return SkippedSample(**row) if "skip" in row else GeneratedAnswer(**row)


def iter_rows(text: str) -> Iterator[dict]:
    # Not splitlines(), which also splits at U+2028 and other characters that an answer may hold.
    return (json.loads(line) for line in text.split("\n") if line)


def in_order_of_samples(lines: Iterable[tuple[int, Line]]) -> list[Line]:
    """Return the file's lines, in order, from the numbered lines of all parts. A sample with a skipped turn keeps only
    its first skip."""
    ordered = [line for _, line in sorted(lines, key=lambda item: item[0])]
    skipped: dict[str, SkippedSample] = {}
    for line in ordered:
        if isinstance(line, SkippedSample):
            skipped.setdefault(line.key, line)
    return [line for line in ordered if skipped.get(line.key, line) is line]
