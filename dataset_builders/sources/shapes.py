"""Drawn shapes to be found, with the box of each in pixels, as rows of `openai_messages`: small, exact, offline.

A picture has a few coloured shapes that do not overlap, on a light ground, and no two of the same colour and kind.
There are two subsets, whose answers state boxes as Qwen's cookbook does:

    shapes_one    "Find the red ellipse."     [{"bbox_2d": [12, 30, 44, 62], "label": "red ellipse"}]
    shapes_many   "Find every ellipse."       a list of any number of them, from the top to the bottom; [] without one

A box holds exactly the pixels of its shape: x1, y1 are the first column and row with its colour, x2, y2 are behind the
last ones.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataset_builders.pictures.images import pixels_png

SUBSETS = ("shapes_one", "shapes_many")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 200, 30),
    "black": (30, 30, 30),
}
KINDS = ("ellipse", "rectangle", "triangle")

_TRIES = 50  # places that are tried for a shape


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeCounts:
    """The numbers of rows, and what their pictures hold."""

    one: int  # rows of shapes_one
    many: int
    most: int  # shapes of a picture, at most
    sides: tuple[int, ...]  # pixels; each side of a picture is one of them


Row = dict[str, list[dict[str, Any]]]
Shape = tuple[tuple[int, int, int, int], str, str]  # box, colour, kind


def iter_shape_rows(seed: int, counts: ShapeCounts) -> Iterator[tuple[str, Row]]:
    """Yield (subset, row) in order of the subsets; the rows are the same for the same seed and counts."""
    for stream, (subset, number) in enumerate(zip(SUBSETS, (counts.one, counts.many))):
        rng = np.random.default_rng([seed, stream])
        for _ in range(number):
            picture, shapes = _picture(rng, counts)
            question, found = (_one if subset == "shapes_one" else _many)(shapes, rng)
            found.sort(key=lambda shape: (shape[0][1], shape[0][0]))
            boxes = [{"bbox_2d": list(box), "label": f"{colour} {kind}"} for box, colour, kind in found]
            yield (
                subset,
                {
                    "messages": [
                        {"role": "user", "content": f"<image>{question}"},
                        {"role": "assistant", "content": json.dumps(boxes)},
                    ],
                    "images": [{"bytes": pixels_png(picture), "path": None}],
                },
            )


def _one(shapes: list[Shape], rng: np.random.Generator) -> tuple[str, list[Shape]]:
    chosen = shapes[rng.integers(len(shapes))]
    return f"Find the {chosen[1]} {chosen[2]}.", [chosen]


def _many(shapes: list[Shape], rng: np.random.Generator) -> tuple[str, list[Shape]]:
    """Ask for a kind, for a colour, or for all shapes, in equal parts; for a kind or colour that is there, mostly."""
    about, is_there = rng.integers(3), rng.random() < 0.75
    _, colour, kind = shapes[rng.integers(len(shapes))]
    if about == 0:
        kind = kind if is_there else KINDS[rng.integers(len(KINDS))]
        return f"Find every {kind}.", [shape for shape in shapes if shape[2] == kind]
    if about == 1:
        colour = colour if is_there else tuple(COLOURS)[rng.integers(len(COLOURS))]
        return f"Find every {colour} shape.", [shape for shape in shapes if shape[1] == colour]
    return "Find every shape.", list(shapes)


def _picture(rng: np.random.Generator, counts: ShapeCounts) -> tuple[np.ndarray, list[Shape]]:
    """Return (h, w, 3) uint8 pixels, and the shapes on them, at least one."""
    width, height = (int(side) for side in rng.choice(counts.sides, 2))
    picture = np.empty((height, width, 3), np.uint8)
    picture[:] = rng.integers(200, 256, 3)
    looks = [(colour, kind) for colour in COLOURS for kind in KINDS]
    shapes: list[Shape] = []
    for look in rng.permutation(len(looks))[: rng.integers(1, counts.most + 1)]:
        # A fifth to a half of the shorter side.
        across, down = (int(size) for size in rng.integers(min(width, height) // 5, min(width, height) // 2 + 1, 2))
        for _ in range(_TRIES):
            left, top = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
            box = (left, top, left + across, top + down)
            if all(_are_apart(box, other) for other, *_ in shapes):
                colour, kind = looks[look]
                picture[top : top + down, left : left + across][mask(kind, across, down)] = COLOURS[colour]
                shapes.append((box, colour, kind))
                break
    return picture, shapes


def _are_apart(one: tuple[int, int, int, int], two: tuple[int, int, int, int]) -> bool:
    return one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]


def mask(kind: str, width: int, height: int) -> np.ndarray:
    """Return (height, width) bool: the pixels of a shape that touches all four sides."""
    y, x = (np.arange(height)[:, None] + 0.5) / height, (np.arange(width) + 0.5) / width  # centres of pixels, 0 to 1
    if kind == "rectangle":
        return np.ones((height, width), bool)
    if kind == "ellipse":
        return (x - 0.5) ** 2 + (y - 0.5) ** 2 <= 0.25
    return np.abs(x - 0.5) <= y / 2 + 0.5 / width  # stands on its base; half a pixel more, so that it has a tip
