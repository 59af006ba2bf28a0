"""answers.jsonl: a model's answer at each assistant turn of the held-out samples, in their order.

    {"key": "ai2d/00001234", "turn": 0, "answer": "4", "stopped": true, "ids": [19]}
    {"key": "ai2d/00001235", "skip": "decode_error", "detail": "..."}

A sample that cannot be asked has a single line, with the reason.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from dataset_builders.storage.store import StorePath

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


def to_line(line: Line) -> str:
    return json.dumps(asdict(line), ensure_ascii=False) + "\n"


def iter_jsonl(path: StorePath) -> Iterator[dict]:
    return rows_of(path.read_text(encoding="utf-8"))


def rows_of(text: str) -> Iterator[dict]:
    # Not splitlines(), which also splits at U+2028 and other characters that an answer may hold.
    return (json.loads(line) for line in text.split("\n") if line)


def line_of(row: dict) -> Line:
    return SkippedSample(**row) if "skip" in row else GeneratedAnswer(**row)


def read_answers(path: StorePath) -> Iterator[Line]:
    """Return an iterator over the lines of an answers file, in the order of the samples."""
    return map(line_of, iter_jsonl(path))


def in_order_of_samples(lines: Iterable[tuple[int, Line]]) -> list[Line]:
    """Return the file's lines, in order, from the numbered lines of all parts. A sample with a skipped turn keeps only
    its first skip."""
    ordered = [line for _, line in sorted(lines, key=lambda item: item[0])]
    skipped: dict[str, SkippedSample] = {}
    for line in ordered:
        if isinstance(line, SkippedSample):
            skipped.setdefault(line.key, line)
    return [line for line in ordered if skipped.get(line.key, line) is line]
