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
    """The answer for one assistant turn.

    Attributes:
        turn: number of the assistant turn in its sample, from 0.
        answer: the text without special tokens.
        stopped: whether the model generated an end-of-turn token.
        ids: the generated tokens, without the end-of-turn token.
    """

    key: str
    turn: int
    answer: str
    stopped: bool
    ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSample:
    """A sample that cannot be asked.

    Attributes:
        skip: the reason, a member of SKIP_REASONS.
        detail: the fault, in words for the user.
    """

    key: str
    skip: str
    detail: str


Line = GeneratedAnswer | SkippedSample


def to_line(line: Line) -> str:
    """Return one line of the file, with its line break."""
    return json.dumps(asdict(line), ensure_ascii=False) + "\n"


def iter_jsonl(path: StorePath) -> Iterator[dict]:
    """Return an iterator over the objects of a JSON Lines file."""
    return rows_of(path.read_text(encoding="utf-8"))


def rows_of(text: str) -> Iterator[dict]:
    """Return an iterator over the objects of JSON lines."""
    # Not splitlines(), which also splits at U+2028 and other characters that an answer may hold.
    return (json.loads(line) for line in text.split("\n") if line)


def line_of(row: dict) -> Line:
    """Return the line of one JSON object."""
    return SkippedSample(**row) if "skip" in row else GeneratedAnswer(**row)


def read_answers(path: StorePath) -> Iterator[Line]:
    """Return an iterator over the lines of an answers file, in the order of the samples."""
    return map(line_of, iter_jsonl(path))


def in_order_of_samples(lines: Iterable[tuple[int, Line]]) -> list[Line]:
    """Return the file's lines from the lines of all parts. A sample with a skipped turn keeps only its first skip.

    Args:
        lines: (number of the question, line), in any order; the numbers follow the order of the samples.
    """
    ordered = [line for _, line in sorted(lines, key=lambda item: item[0])]
    skipped: dict[str, SkippedSample] = {}
    for line in ordered:
        if isinstance(line, SkippedSample):
            skipped.setdefault(line.key, line)
    return [line for line in ordered if skipped.get(line.key, line) is line]
