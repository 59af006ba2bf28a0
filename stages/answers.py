"""answers.jsonl: what a model said at each assistant turn of the held-out samples, in their order.

    {"key": "ai2d/00001234", "turn": 0, "answer": "4", "stopped": true, "num_tokens": 1}
    {"key": "ai2d/00001235", "skip": "decode_error", "detail": "..."}

A sample that cannot be asked has one line with the reason, whatever its turns.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.contracts.store import StorePath

ANSWERS_JSONL = "answers.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedAnswer:
    """What was said at one assistant turn.

    Attributes:
        turn: number of the assistant turn in its sample, from 0.
        answer: without special tokens.
        stopped: the model ended its turn by itself.
        num_tokens: generated tokens, without the end-of-turn token.
    """

    key: str
    turn: int
    answer: str
    stopped: bool
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NotAsked:
    """A sample that cannot be asked.

    Attributes:
        skip: reason, a member of SKIP_REASONS.
        detail: what was found.
    """

    key: str
    skip: str
    detail: str

    @classmethod
    def of(cls, key: str, error: SkipSample) -> "NotAsked":
        return cls(key=key, skip=error.reason, detail=error.detail)


Line = GeneratedAnswer | NotAsked


def to_line(line: Line) -> str:
    """One line of the file, with its end."""
    return json.dumps(asdict(line), ensure_ascii=False) + "\n"


def iter_jsonl(path: StorePath) -> Iterator[dict]:
    """The objects of a JSON Lines file."""
    # Not splitlines(): an answer may hold U+2028 and other characters that it takes for line ends.
    return (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)


def read_answers(path: StorePath) -> Iterator[Line]:
    """Every line of an answers file, in the order of the samples."""
    return (NotAsked(**row) if "skip" in row else GeneratedAnswer(**row) for row in iter_jsonl(path))


def in_order_of_samples(lines: Iterable[tuple[int, Line]]) -> list[Line]:
    """Numbered lines of the parts as they stand in the file: a sample of which one turn cannot be asked has no others.

    Args:
        lines: (number of the question, line), in any order; numbers go with the samples.
    """
    ordered = [line for _, line in sorted(lines, key=lambda item: item[0])]
    skipped: dict[str, NotAsked] = {}
    for line in ordered:
        if isinstance(line, NotAsked):
            skipped.setdefault(line.key, line)
    kept: list[Line] = []
    for line in ordered:
        if line.key not in skipped or skipped[line.key] is line:
            kept.append(line)
    return kept
