"""Raw rows of drawn images in the schema and the wording of the_cauldron.

The wording follows build_ds_sft.py, the script that built the_cauldron: a short question ends with a line that asks for
a short answer; an answer begins with a capital and ends with a full stop, also a number: "14.". So it is on the hub
("OCTOBER 17, 1995." in docvqa), and a metric has to cope with it. Choices and captions have wordings of their own.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tests.helpers.drawn.canvas import Canvas

Row = dict[str, list[dict[str, object]]]
T = TypeVar("T")

SHORT_ANSWER_LINES = ("Give a very brief answer.", "Answer briefly.", "Short answer required.", "Keep it brief.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A question and its answer.

    Attributes:
        answer: the answer that is trained on.
        references: all right answers if there is more than one, with repeats.
    """

    question: str
    answer: str
    references: tuple[str, ...] = ()


def cauldron_row(canvas: Canvas, asked: Sequence[Asked], source: str) -> Row:
    """Return a row with one image and its questions, in the_cauldron's schema with an additional list of references."""
    texts = [
        {"user": a.question, "assistant": a.answer, "source": source, "references": list(a.references) or None}
        for a in asked
    ]
    return {"images": [{"bytes": canvas.png(), "path": None}], "texts": texts}


def sentence(text: str) -> str:
    """Return the_cauldron's form of an answer: its first letter is a capital, and it ends with a full stop."""
    text = text.capitalize() if text[:1].islower() else text
    return text if text.endswith(".") else text + "."


def shortly(question: str, rng: np.random.Generator) -> str:
    """Return the question with a line that asks for a short answer."""
    return f"{question}\n{choose(rng, SHORT_ANSWER_LINES)}"


def choose(rng: np.random.Generator, items: Sequence[T]) -> T:
    """Return one of the items."""
    return items[int(rng.integers(len(items)))]


def sample_of(rng: np.random.Generator, items: Sequence[T], count: int) -> list[T]:
    """Return `count` different items in random order."""
    return [items[i] for i in rng.permutation(len(items))[:count]]


def row_streams(seed: int, stream: int) -> Iterator[np.random.Generator]:
    """Yield a separate random generator for each row, without end, so that a row does not depend on the number
    of rows."""
    return (np.random.default_rng([seed, stream, i]) for i in itertools.count())
