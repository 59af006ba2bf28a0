"""Boxes over an image of a page, as SVG: layers of boxes in colours and lines of their own, with labels and a legend.

The unit of the SVG is a pixel of the image that the boxes are given in, so its numbers are theirs. A line keeps its
width however large the image is, and has a white rim, so that it is seen on any picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dataset_builders.contracts.boxes import Box

_PAGE = (340, 560)  # pixels on the screen of an image beside its conversation, roughly and at most
_TINY_SIDE, _TINY_WIDTH = 128, 176  # a smaller image is enlarged to this width (`.tiny` of style.css)
_FONT = 11  # pixels on the screen
_LETTER = 0.66  # width of a bold letter, as a share of the font's size
_MOST_LABELS = 24  # of all layers; with more boxes, lines are thin and a label is shown when the mouse is on its box
_LABEL_CHARS = 24
_MOST_TOLD = 12  # boxes of a layer in words


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxLayer:
    """Boxes that are drawn alike."""

    name: str  # in the legend
    # Colour and line (style.css), and the corner of a label: above the box for true and asked, else below.
    kind: Literal["true", "asked", "before", "answer"]
    boxes: Sequence[Box] = ()  # their corners may be in any order
    note: str = ""  # in the legend in place of the number of boxes


def drawn_boxes(size: tuple[int, int], layers: Sequence[BoxLayer], room: tuple[int, int] = _PAGE) -> dict[str, Any]:
    """Return the values of boxes.html.j2, as JSON values, for boxes in an image of this (width, height).

    Args:
        room: (width, height) of the image on the screen, at most, in pixels: labels are as large as other texts there.
    """
    is_tiny = max(size) <= _TINY_SIDE
    scale = _TINY_WIDTH / size[0] if is_tiny else min(1, room[0] / size[0], room[1] / size[1])
    font = round(_FONT / scale, 1)
    is_many = sum(len(layer.boxes) for layer in layers) > _MOST_LABELS
    told, drawn = [], []
    for layer in layers:
        rects = [_rect(box, size, font, layer.kind, not is_many) for box in layer.boxes]
        note = layer.note or f"{len(rects) or 'no'} {'box' if len(rects) == 1 else 'boxes'}"
        outside = sum(rect["is_outside"] for rect in rects)
        note += f", {outside} outside the picture" if outside else ""
        drawn.append({"kind": layer.kind, "legend": f"{layer.name}: {note}", "rects": rects})
        words = [rect["title"] for rect in rects[:_MOST_TOLD]]
        words += [f"and {len(rects) - _MOST_TOLD} more"] if len(rects) > _MOST_TOLD else []
        told.append(f"{layer.name}: {'; '.join(words) or note}")
    return {
        **{"width": size[0], "height": size[1], "font": font, "is_tiny": is_tiny, "is_many": is_many},
        **{"layers": drawn, "told": ". ".join(told)},
    }


def box_words(box: Box) -> str:
    """Return a box in words: its label and its corners x1, y1, x2, y2."""
    corners = ", ".join(f"{round(corner, 1):g}" for corner in box.corners)  # without separators, which are commas too
    return f"{box.label} {corners}" if box.label else corners


def _rect(box: Box, size: tuple[int, int], font: float, kind: str, has_label: bool) -> dict[str, Any]:
    (left, right), (top, bottom) = sorted((box.x1, box.x2)), sorted((box.y1, box.y2))
    is_outside = not (left < size[0] and top < size[1] and right > 0 and bottom > 0)
    label = box.label if len(box.label) <= _LABEL_CHARS else f"{box.label[: _LABEL_CHARS - 1]}\u2026"
    if kind in ("true", "asked"):  # above the box, or inside it at the image's edge
        y = top - 0.35 * font if top > 1.2 * font else top + font
    else:  # below
        y = bottom + font if bottom + 1.3 * font < size[1] else bottom - 0.35 * font
    return {
        "x": _short(left),
        "y": _short(top),
        # SVG draws no rectangle of no width.
        "width": _short(max(right - left, size[0] / 1000)),
        "height": _short(max(bottom - top, size[1] / 1000)),
        "label": label if has_label and not is_outside else "",
        "label_x": _short(max(0, min(left, size[0] - _LETTER * font * len(label)))),
        "label_y": _short(min(max(y, font), size[1] - 0.2 * font)),
        "title": box_words(box),
        "is_outside": is_outside,
    }


def _short(value: float) -> float:
    return round(float(value), 2)
