"""A sheet to draw on: lines, shapes and text in Pillow's own font, so that no font file is needed.

Positions are (x, y) pixels from the upper left corner. Every drawn text is kept with the bounding box of its ink. Tests
check that no two boxes overlap and none leaves the sheet. The same calls give the same PNG with the same Pillow.
"""

import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom

INK = "#202020"
PAPER = "#ffffff"
_ANCHOR_OF = {"left": "lm", "center": "mm", "right": "rm"}


@dataclass(frozen=True, slots=True)
class PrintedText:
    """A text on the sheet, and the bounding box of its ink in pixels."""

    text: str
    box: Box


class Canvas:
    """An image that is being drawn.

    Attributes:
        width, height: size in pixels.
        texts: all printed texts, in order.
    """

    def __init__(self, width: int, height: int, paper: str = PAPER) -> None:
        self.width, self.height = width, height
        self.texts: list[PrintedText] = []
        self._image = Image.new("RGB", (width, height), paper)
        self._draw = ImageDraw.Draw(self._image)

    def text(self, at: Point, text: str, size: int, *, align: str = "left", ink: str = INK, paper: str = "") -> Box:
        """Print one line of text whose vertical middle is at `at`.

        Args:
            align: which end of the text is at `at`: left, center or right.
            paper: background colour of the text; empty for none.

        Returns:
            the bounding box of the ink.
        """
        font, anchor = _font(size), _ANCHOR_OF[align]
        box = self._draw.textbbox(at, text, font=font, anchor=anchor)
        if paper:
            self._draw.rectangle(_grown(box, 2), fill=paper)
        self._draw.text(at, text, fill=ink, font=font, anchor=anchor)
        self.texts.append(PrintedText(text, box))
        return box

    def line(self, points: Sequence[Point], width: int = 1, ink: str = INK) -> None:
        self._draw.line(list(points), fill=ink, width=width, joint="curve")

    def box(self, box: Box, fill: str | None = None, outline: str | None = None, *, round_by: int = 0) -> None:
        """Draw a rectangle. `round_by` is the radius of its corners in pixels."""
        self._draw.rounded_rectangle(box, round_by, fill=fill, outline=outline)

    def ellipse(self, box: Box, fill: str | None = None, outline: str | None = None) -> None:
        self._draw.ellipse(box, fill=fill, outline=outline)

    def polygon(self, points: Sequence[Point], fill: str) -> None:
        self._draw.polygon(list(points), fill=fill)

    def slice(self, box: Box, start: float, end: float, fill: str) -> None:
        """Draw a slice of the ellipse in `box`, from `start` to `end` degrees, clockwise from three o'clock."""
        self._draw.pieslice(box, start, end, fill=fill, outline=PAPER, width=2)

    def arrow(self, start: Point, end: Point, width: int = 3, ink: str = INK) -> None:
        """Draw a line with an arrowhead at `end`."""
        length, head = math.dist(start, end), 4 * width
        x, y = (end[0] - start[0]) / length, (end[1] - start[1]) / length
        neck = (end[0] - head * x, end[1] - head * y)
        side = 0.6 * head
        self.line([start, neck], width, ink)
        self.polygon([end, (neck[0] - side * y, neck[1] + side * x), (neck[0] + side * y, neck[1] - side * x)], ink)

    def png(self) -> bytes:
        """Return the sheet as an RGB PNG."""
        out = io.BytesIO()
        self._image.save(out, "PNG")
        return out.getvalue()


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's bundled font. Its basic layout engine is used, whatever libraries are installed."""
    return ImageFont.load_default(size=size)


def _grown(box: Box, margin: float) -> Box:
    return (box[0] - margin, box[1] - margin, box[2] + margin, box[3] + margin)
