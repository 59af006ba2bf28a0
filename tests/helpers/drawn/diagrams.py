"""Labelled diagrams with four choices: rows in the shape of ai2d.

    a food chain, a cycle of arrows, or layers that lie on each other; which label is where comes from the seed
    "Question: What does the Frog eat?\\nChoices:\\nA. Snake\\nB. Fly\\nC. Wheat\\nD. Hawk\\nAnswer with the letter."
    "Answer: B"

The right answer is a label of the diagram; the wrong ones are other labels of it, then words of the same kind.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.helpers.drawn.canvas import Canvas
from tests.helpers.drawn.rows import Asked, Row, cauldron_row, choose, row_streams, sample_of

LETTERS = "ABCD"
# from the bottom of a chain to its top
_CHAIN = (
    ("Grass", "Wheat", "Clover", "Barley"),
    ("Fly", "Snail", "Mouse", "Beetle"),
    ("Frog", "Shrew", "Lizard", "Toad"),
    ("Snake", "Heron", "Otter", "Stoat"),
    ("Hawk", "Eagle", "Owl", "Lynx"),
)
_CYCLES = (
    ("Life cycle", "stage", ("Egg", "Larva", "Pupa", "Adult", "Nymph", "Cocoon")),
    ("Water cycle", "step", ("Cloud", "Rain", "River", "Ocean", "Vapour", "Glacier")),
    ("Rock cycle", "step", ("Magma", "Sediment", "Sandstone", "Slate", "Lava", "Gravel")),
)
_LAYERS = ("Topsoil", "Clay", "Sand", "Gravel", "Chalk", "Bedrock", "Coal", "Marl")
_FILLS = ("#dcebd5", "#fbe9c6", "#d8e6f6", "#f3d9d9", "#e6dcf2", "#d5ece9")
_EARTHS = ("#c9a87a", "#e3d1a2", "#b7b0a4", "#d9b48f", "#cfc6b8", "#a8927c")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagram:
    """The content of a diagram.

    Attributes:
        labels: a chain from the eaten to the eater, a cycle along its arrows, or layers from the top down.
        noun: what a label of a cycle is.
        others: words of the same kind that are not in the diagram.
    """

    kind: Literal["chain", "cycle", "layers"]
    title: str
    labels: tuple[str, ...]
    noun: str
    others: tuple[str, ...]


def iter_diagram_rows(seed: int, stream: int) -> Iterator[Row]:
    """Yield an endless sequence of diagrams, each with one or two questions."""
    for rng in row_streams(seed, stream):
        diagram = make_diagram(rng)
        chosen = sample_of(rng, questions_about(diagram), int(rng.integers(1, 3)))
        asked = [_with_choices(question, right, diagram, rng) for question, right in chosen]
        yield cauldron_row(draw_diagram(diagram), asked, "AI2D")


def make_diagram(rng: np.random.Generator) -> Diagram:
    kind = choose(rng, ("chain", "cycle", "layers"))
    if kind == "chain":
        title, noun = "Food chain", "organism"
        labels = tuple(choose(rng, level) for level in _CHAIN[: int(rng.integers(4, 6))])
        pool: Sequence[str] = [name for level in _CHAIN for name in level]
    elif kind == "cycle":
        title, noun, pool = choose(rng, _CYCLES)
        labels = tuple(sample_of(rng, pool, int(rng.integers(4, 6))))
    else:
        title, noun = "Layers of the ground", "layer"
        labels, pool = tuple(sample_of(rng, _LAYERS, int(rng.integers(4, 7)))), _LAYERS
    others = tuple(name for name in pool if name not in labels)
    return Diagram(kind=kind, title=title, labels=labels, noun=noun, others=others)


def questions_about(diagram: Diagram) -> list[tuple[str, str]]:
    """Return every question with its right answer."""
    labels, noun = diagram.labels, diagram.noun
    pairs = list(itertools.pairwise(labels))
    if diagram.kind == "cycle":
        pairs.append((labels[-1], labels[0]))
        found = [(f"Which {noun} comes directly after {a}?", b) for a, b in pairs]
        return found + [(f"Which {noun} comes directly before {b}?", a) for a, b in pairs]
    if diagram.kind == "layers":
        found = [("Which layer is at the top?", labels[0]), ("Which layer is the deepest?", labels[-1])]
        found += [(f"Which layer lies directly below {a}?", b) for a, b in pairs]
        return found + [(f"Which layer lies directly above {b}?", a) for a, b in pairs]
    found = [("Which organism is the producer?", labels[0]), ("Which organism is eaten by no other?", labels[-1])]
    found += [(f"What does the {b} eat?", a) for a, b in pairs]
    return found + [(f"Which organism eats the {a}?", b) for a, b in pairs]


def draw_diagram(diagram: Diagram) -> Canvas:
    draw: dict[str, Callable[[Diagram], Canvas]] = {"chain": _draw_chain, "cycle": _draw_cycle, "layers": _draw_layers}
    return draw[diagram.kind](diagram)


def _with_choices(question: str, right: str, diagram: Diagram, rng: np.random.Generator) -> Asked:
    """Return a question with its choices. Labels that the question names are not among the choices."""
    wrong = [label for label in diagram.labels if label != right and label not in question.rstrip("?").split()]
    wrong = sample_of(rng, wrong, len(wrong))
    wrong += sample_of(rng, diagram.others, len(diagram.others))
    choices = sample_of(rng, [right, *wrong[: len(LETTERS) - 1]], len(LETTERS))
    lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))
    prompt = f"Question: {question}\nChoices:\n{lines}\nAnswer with the letter."
    return Asked(question=prompt, answer=f"Answer: {LETTERS[choices.index(right)]}")


def _draw_chain(diagram: Diagram) -> Canvas:
    """Draw boxes from left to right, with an arrow from the eaten to the eater."""
    width, step = 72, 104
    canvas = Canvas(step * len(diagram.labels) + 8, 200)
    canvas.text((canvas.width / 2, 32), diagram.title, 20, align="center")
    for i, label in enumerate(diagram.labels):
        left = 20 + step * i
        canvas.box((left, 88, left + width, 140), _FILLS[i], "#505050", round_by=10)
        canvas.text((left + width / 2, 114), label, 16, align="center")
        if i + 1 < len(diagram.labels):
            canvas.arrow((left + width + 2, 114), (left + step - 2, 114))
    return canvas


def _draw_cycle(diagram: Diagram) -> Canvas:
    """Draw ovals on a circle, clockwise from the top, with an arrow from each to the next."""
    canvas = Canvas(420, 390)
    x, y, radius = 210, 215, 128
    canvas.text((x, 28), diagram.title, 20, align="center")
    turns = [2 * math.pi * i / len(diagram.labels) - math.pi / 2 for i in range(len(diagram.labels))]
    places = [(x + 1.1 * radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns]
    for i, (at, after) in enumerate(zip(places, places[1:] + places[:1])):
        canvas.arrow(_toward(at, after), _toward(after, at))
        canvas.ellipse((at[0] - 52, at[1] - 26, at[0] + 52, at[1] + 26), _FILLS[i], "#505050")
        canvas.text(at, diagram.labels[i], 16, align="center")
    return canvas


def _toward(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """Return the point just outside the oval at `start`, in the direction of `end`."""
    x, y = end[0] - start[0], end[1] - start[1]
    reach = 1 / math.hypot(x / 58, y / 32)
    return start[0] + reach * x, start[1] + reach * y


def _draw_layers(diagram: Diagram) -> Canvas:
    height = 46
    canvas = Canvas(330, 90 + height * len(diagram.labels))
    canvas.text((165, 30), diagram.title, 20, align="center")
    for i, label in enumerate(diagram.labels):
        top = 64 + height * i
        canvas.box((24, top, 210, top + height), _EARTHS[i], "#505050")
        canvas.line([(180, top + height / 2), (226, top + height / 2)], 2)
        canvas.text((232, top + height / 2), label, 17)
    return canvas
