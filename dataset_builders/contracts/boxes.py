"""Boxes: rectangles of a sample's images, as numbers, and the places in its texts where they belong.

A box is in pixels of its image as it is shown, after EXIF orientation: x1, y1 is the upper left corner, x2, y2 the
lower right one. In which convention and form a model reads it is decided where a prompt is made
(`stages/shared/chat_format/boxes.py`), so one data set serves models of several conventions.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

BOX_SLOT = "<boxes>"  # in a text: the place where boxes are written

# What the coordinates of a text are: 0 to RELATIVE along each side, or pixels of the image as resized for the model.
Convention = Literal["relative_1000", "resized_pixels"]
RELATIVE = 1000

# EXIF orientation -> where the corner (x, y) of the stored image, of sides (w, h), is in the image as shown.
_UPRIGHT = {
    1: lambda x, y, w, h: (x, y),
    2: lambda x, y, w, h: (w - x, y),
    3: lambda x, y, w, h: (w - x, h - y),
    4: lambda x, y, w, h: (x, h - y),
    5: lambda x, y, w, h: (y, x),
    6: lambda x, y, w, h: (h - y, x),
    7: lambda x, y, w, h: (h - y, w - x),
    8: lambda x, y, w, h: (y, w - x),
}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with sides along the image's, x1 < x2 and y1 < y2, and what it shows."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str = ""

    @property
    def corners(self) -> tuple[float, float, float, float]:
        return self.x1, self.y1, self.x2, self.y2


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxPlace:
    """The boxes at one `BOX_SLOT`: a list of boxes of one image, or the coordinates of a single box."""

    image: int  # number of the image in the sample, from 0
    size: tuple[int, int]  # (width, height) of that image in pixels, as shown
    boxes: tuple[Box, ...]  # exactly one if not `is_list`; a list may be empty: there is nothing to find
    is_list: bool  # False: the text around the place holds what else belongs to the box, its label say

    def fault(self) -> str:
        """Return why the boxes cannot be right; empty if they can."""
        width, height = self.size
        if not self.is_list and len(self.boxes) != 1:
            return f"{len(self.boxes)} boxes at the place of one"
        for box in self.boxes:
            shown = f"box {list(box.corners)} of image {self.image}, {width} x {height} px"
            if not (box.x1 < box.x2 and box.y1 < box.y2):  # also False for NaN
                return f"{shown}, has no area, or its corners are not upper left and lower right"
            if not (box.x1 >= 0 and box.x2 <= width and box.y1 >= 0 and box.y2 <= height):
                return f"{shown}, lies outside of it"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrueBoxes:
    """The right boxes of one answer, all of one image, and what is needed to understand the boxes that a model writes.

    Sizes are (width, height). An answer that should find nothing has no boxes; that is not the same as no `TrueBoxes`.
    """

    convention: Convention  # of the reference's text, and of the prompts that the model was trained on
    image: int  # number of the image in the sample, from 0
    size: tuple[int, int]  # in pixels, as shown
    resized: tuple[int, int]  # in pixels, as resized for the model
    boxes: tuple[Box, ...]  # in pixels of the image as shown, in the order of the data

    def as_shown(
        self, corners: Sequence[float], convention: Convention | None = None
    ) -> tuple[float, float, float, float]:
        """Return written corners x1, y1, x2, y2 in pixels of the image as shown, neither sorted nor cut to the image.

        Args:
            convention: the convention to read them in; None: the own one.
        """
        is_relative = (convention or self.convention) == "relative_1000"
        width, height = (RELATIVE, RELATIVE) if is_relative else self.resized
        x, y = self.size[0] / width, self.size[1] / height
        return corners[0] * x, corners[1] * y, corners[2] * x, corners[3] * y

    def to_json(self) -> str:
        """Return the column `boxes` of predictions.parquet. Inverse of `from_json`."""
        boxes = [[*box.corners, box.label] for box in self.boxes]
        about = {"convention": self.convention, "image": self.image, "size": self.size, "resized": self.resized}
        return json.dumps(about | {"boxes": boxes}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "TrueBoxes":
        value = json.loads(text)
        return cls(
            convention=value["convention"],
            image=value["image"],
            size=tuple(value["size"]),
            resized=tuple(value["resized"]),
            boxes=tuple(Box(*box) for box in value["boxes"]),
        )


def upright(box: Box, size: tuple[int, int], orientation: int) -> Box:
    """Return a box of an image as stored, before EXIF orientation, in pixels of the image as shown.

    Args:
        size: (width, height) of the image as stored.
        orientation: 1 to 8, of EXIF 2.32, tag 0x0112.
    """
    turn = _UPRIGHT[orientation]
    (xa, ya), (xb, yb) = (turn(x, y, *size) for x, y in ((box.x1, box.y1), (box.x2, box.y2)))
    return Box(min(xa, xb), min(ya, yb), max(xa, xb), max(ya, yb), box.label)


def places_to_json(places: Sequence[BoxPlace]) -> list[dict[str, Any]]:
    """Return places as JSON values. Inverse of `places_from_json`."""
    return [
        {
            "image": place.image,
            "size": list(place.size),
            "boxes": [[*box.corners, box.label] for box in place.boxes],
            "is_list": place.is_list,
        }
        for place in places
    ]


def places_from_json(values: Sequence[dict[str, Any]]) -> tuple[BoxPlace, ...]:
    return tuple(
        BoxPlace(
            image=value["image"],
            size=tuple(value["size"]),
            boxes=tuple(Box(*box) for box in value["boxes"]),
            is_list=value["is_list"],
        )
        for value in values
    )
