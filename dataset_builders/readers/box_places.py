"""Boxes of a row -> places of a sample, in pixels of the image as shown: ms-swift's `objects`, and boxes in texts.

ms-swift (template/base.py): `<bbox>` and `<ref-object>` in the texts take the entries of `objects` in order, over all
messages. `image_id` has an image's number, 0 where it has none; `bbox_type` is real (pixels) or norm1 (0 to 1).

    {"messages": [{"role": "user", "content": "<image>Find <ref-object>."}, {"role": "assistant", "content": "<bbox>"}],
     "images": ["1.png"], "objects": {"ref": ["the cat"], "bbox": [[10, 20, 300, 400]]}}

Boxes in texts (`box_texts.py`) are of the sample's only image, or of the only image of their turn; where a turn has
several, nothing says of which one they are, and the row is left out.

    pixels          of the image as shown
    relative_1000   0 to 1000 along each side
    relative_1      0 to 1
    loc_1024        PaliGemma's bins, k / 1024, as `supervision` reads them
    florence        Florence-2's bins, (k + 0.5) / 1000: the middle of the bin, as its processor reads them

Pixels of a resized image cannot be read: their numbers say nothing without the limits by which it was resized.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from dataset_builders.contracts.boxes import BOX_SLOT, Box, BoxPlace, upright
from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.pictures.images import header_size
from dataset_builders.readers.box_texts import (
    FLORENCE,
    PALIGEMMA,
    Corners,
    bare_box,
    find_boxes,
    is_bare,
    is_empty_list,
    is_number,
    may_hold_boxes,
)
from dataset_builders.readers.text_files import json_type, parse_json

BBOX, REF = "<bbox>", "<ref-object>"  # ms-swift's marks
CONVENTIONS = ("pixels", "relative_1000", "relative_1")
_ROUNDING = 0.5  # pixels by which a box may reach over its image's edge: its numbers were rounded
_WHOLE = {"relative_1000": 1000, "relative_1": 1, PALIGEMMA: 1024, FLORENCE: 1000}  # the length of a side
_LARGEST = {"relative_1000": 1000, PALIGEMMA: 1023, FLORENCE: 999}
_MARKS = re.compile(f"({BBOX}|{REF})")
_KEYS = ("ref", "bbox", "bbox_type", "image_id")


class BoxOptions(StrictModel):
    """The meaning of the numbers of boxes in texts."""

    boxes: Literal["pixels", "relative_1000", "relative_1", "literal"] | None = Field(
        default=None,
        description="the numbers of boxes in texts (marks of Qwen-VL, Qwen2-VL and InternVL, JSON with bbox_2d or "
        "box_2d, answers of four numbers alone): pixels of the image, relative_1000 (0 to 1000) or relative_1 (0 to "
        "1); literal: they stay text, as they are; null: rows with such boxes are left out, but for answers of four "
        "numbers alone. The tokens of PaliGemma and Florence-2 need no value",
    )
    boxes_of: Literal["shown", "stored"] = Field(
        default="shown",
        description="the image that boxes were measured on, where EXIF turns it: shown, as viewers show it; stored, "
        "before it is turned",
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """An image's size and turn, from its header."""

    stored: tuple[int, int]  # (width, height)
    orientation: int  # of EXIF, 1 to 8

    @property
    def shown(self) -> tuple[int, int]:
        return self.stored if self.orientation < 5 else self.stored[::-1]


def measured(data: bytes) -> Measured:
    """Return an image's size and turn. Raises SkipSample if the bytes are no image."""
    return Measured(*header_size(data))


def pixel_box(
    corners: Corners, label: str, convention: str, image: Measured, boxes_of: Literal["shown", "stored"]
) -> Box:
    """Return a box in pixels of the image as shown, from corners in a convention.

    Raises:
        SkipSample: bad_box, with the numbers.
    """
    size = image.shown if boxes_of == "shown" else image.stored
    width, height = size
    x1, y1, x2, y2 = corners
    written = f"box [{', '.join(f'{number:g}' for number in corners)}] in {convention}, image of {width} x {height} px"
    if convention in _LARGEST and not (min(corners) >= 0 and max(corners) <= _LARGEST[convention]):
        raise SkipSample("bad_box", f"{written}: such numbers are 0 to {_LARGEST[convention]}")
    if convention in ("pixels", "relative_1000") and max(corners) <= 1:
        raise SkipSample("bad_box", f"{written}: no number is above 1, as in relative_1")
    if not (x1 < x2 and y1 < y2):
        raise SkipSample("bad_box", f"{written}: it has no area, or its corners are not upper left and lower right")
    if convention in _WHOLE:
        middle, whole = 0.5 if convention == FLORENCE else 0, _WHOLE[convention]
        # Multiplied first: corners at whole pixels stay whole numbers.
        x1, x2 = ((x + middle) * width / whole for x in (x1, x2))
        y1, y2 = ((y + middle) * height / whole for y in (y1, y2))
    sides = (width, height) * 2
    if any(x < -_ROUNDING or x > side + _ROUNDING for x, side in zip((x1, y1, x2, y2), sides)):
        raise SkipSample("bad_box", f"{written}: it lies outside of it")
    box = Box(*(min(max(x, 0), side) for x, side in zip((x1, y1, x2, y2), sides)), label)
    return box if boxes_of == "shown" else upright(box, image.stored, image.orientation)


class Images:
    """The images of a row, each measured once, when a box of it is found."""

    def __init__(self, read: Callable[[int], bytes], number: int, boxes_of: Literal["shown", "stored"]) -> None:
        self.number, self.boxes_of = number, boxes_of
        self._read = read
        self._known: dict[int, Measured] = {}

    def place(self, image: int, boxes: Sequence[tuple[Corners, str]], convention: str, *, is_list: bool) -> BoxPlace:
        """Return a place of boxes; SkipSample if the image cannot be read, or a box cannot be right."""
        if not 0 <= image < self.number:
            raise SkipSample("bad_box", f"a box of image {image}, and the row has {self.number}, from 0")
        if image not in self._known:
            self._known[image] = measured(self._read(image))
        about = self._known[image]
        placed = tuple(pixel_box(corners, label, convention, about, self.boxes_of) for corners, label in boxes)
        return BoxPlace(image=image, size=about.shown, boxes=placed, is_list=is_list)


def with_boxes(
    messages: Sequence[Message], images: Sequence[bytes] | Images, options: BoxOptions
) -> tuple[Message, ...]:
    """Return messages with places for the boxes that their texts write.

    Raises:
        SkipSample: undeclared_boxes, where no option says what the numbers are; bad_box.
    """
    if options.boxes == "literal":
        return tuple(messages)
    if not isinstance(images, Images):
        images = Images(images.__getitem__, len(images), options.boxes_of)
    slots = [message.text.count(IMAGE_SLOT) for message in messages]
    if sum(slots) != images.number:
        return tuple(messages)  # Sample.check says so
    return tuple(_with_boxes(message, image_of(i, slots), images, options) for i, message in enumerate(messages))


def image_of(message: int, slots: Sequence[int]) -> int | None:
    """Return the image of the boxes in a message's text: the sample's only one, or the only one of its turn."""
    if sum(slots) == 1:
        return 0
    turn = next((i for i in range(message, -1, -1) if slots[i]), None)
    return None if turn is None or slots[turn] > 1 else sum(slots[:turn])


def _with_boxes(message: Message, image: int | None, images: Images, options: BoxOptions) -> Message:
    if not any(map(may_hold_boxes, (message.text, message.reasoning, *message.references))):
        return message
    is_answer = message.role == "assistant"
    pieces = message.text.split(BOX_SLOT)
    if len(pieces) - 1 != len(message.boxes):
        return message  # Sample.check says so
    texts: list[str] = []
    places: list[BoxPlace] = []
    for i, piece in enumerate(pieces):
        if i:
            texts.append(BOX_SLOT)
            places.append(message.boxes[i - 1])
        at = 0
        found = find_boxes(piece, is_answer and len(pieces) == 1)
        if is_answer and options.boxes is not None and image is not None and is_bare(message.text):
            found = [bare_box(message.text)]
        if options.boxes is None and not any(each.boxes for each in found):
            found = []
        for each in found:
            convention = each.convention or options.boxes
            if convention is None:
                raise SkipSample(
                    "undeclared_boxes",
                    f"{piece[each.start : each.end][:80]!r}: say in options.boxes what such numbers are "
                    f"({', '.join(CONVENTIONS)}), or keep them as text (literal)",
                )
            texts += [piece[at : each.start], each.before]
            if each.boxes:
                texts.append(BOX_SLOT)
                number = _only(image, piece[each.start : each.end], images)
                places.append(images.place(number, each.boxes, convention, is_list=each.is_list))
            at = each.end
        texts.append(piece[at:])
    if is_answer and options.boxes is not None and images.number and is_empty_list(message.text):
        number = _only(image, message.text, images)
        texts, places = [BOX_SLOT], [images.place(number, (), options.boxes, is_list=True)]
    if find_boxes(message.reasoning, False):
        raise SkipSample(
            "bad_box", "a box in the reasoning, where none is read; remove it, or set options.boxes: literal"
        )
    references = message.references
    if any(find_boxes(text, True) for text in references):
        if set(references) != {message.text}:
            raise SkipSample("bad_box", "boxes in several right answers, of which only the answer's own are read")
        references = ()
    return dataclasses.replace(message, text="".join(texts), boxes=tuple(places), references=references)


def _only(image: int | None, text: str, images: Images) -> int:
    if image is None:
        which = f"which of {images.number} images it is of" if images.number else "of an image, and the row has none"
        raise SkipSample("bad_box", f"{text[:80]!r}: the row does not say {which}")
    return image


def place_objects(messages: Sequence[Message], objects: Any, images: Images) -> tuple[Message, ...]:
    """Return messages with places for ms-swift's marks.

    Args:
        objects: the row's `objects`, an object or its JSON text; None if it has none.

    Raises:
        SkipSample: box_count_mismatch, bad_box, or schema_error for objects of another shape.
    """
    texts = [message.text for message in messages]
    if not objects and not any(mark in text for text in texts for mark in (BBOX, REF)):
        return tuple(messages)
    refs, boxes, convention, numbers = _entries(objects)
    for mark, key, entries in ((REF, "ref", refs), (BBOX, "bbox", boxes)):
        count = sum(text.count(mark) for text in texts)
        if count != len(entries):
            way_out = f"write {mark} at the place of each, or remove objects" if not count else "one is for each mark"
            detail = f"{count} {mark} in the texts, and objects.{key} has {len(entries)}; {way_out}"
            raise SkipSample("box_count_mismatch", detail)
    next_ref = next_box = 0
    placed = []
    for message in messages:
        pieces, places = [], []
        for piece in _MARKS.split(message.text):
            if piece == REF:
                pieces.append(refs[next_ref])
                next_ref += 1
            elif piece == BBOX:
                # One name for each box, or the last name before it: "Find <ref-object>." "<bbox><bbox>"
                label = refs[next_box] if len(refs) == len(boxes) else refs[next_ref - 1] if next_ref else ""
                box = [(boxes[next_box], label)]
                places.append(images.place(numbers[next_box], box, convention, is_list=False))
                pieces.append(BOX_SLOT)
                next_box += 1
            else:
                pieces.append(piece)
        placed.append(dataclasses.replace(message, text="".join(pieces), boxes=tuple(places)))
    return tuple(placed)


def _entries(objects: Any) -> tuple[list[str], list[Corners], str, list[int]]:
    """Return the names, the boxes, their convention, and the number of each box's image."""
    objects = parse_json(objects) if isinstance(objects, str) and objects else objects or {}
    if not isinstance(objects, Mapping):
        raise SkipSample("schema_error", f"objects is {json_type(objects)}, not an object")
    fields = {name: value for name, value in objects.items() if value is not None}
    if unread := [name for name in fields if name not in _KEYS]:
        raise SkipSample("schema_error", f"objects has {unread[0]!r}, which is not read; it has {', '.join(_KEYS)}")
    for name in ("ref", "bbox", "image_id"):
        if not isinstance(fields.setdefault(name, []), list):
            raise SkipSample("schema_error", f"objects.{name} is {json_type(fields[name])}, not an array")
    refs, boxes, numbers = fields["ref"], fields["bbox"], fields["image_id"]
    kind = fields.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise SkipSample("schema_error", f"objects.bbox_type is {str(kind)[:40]!r}; known: real, norm1")
    for i, ref in enumerate(refs):
        if not isinstance(ref, str):
            raise SkipSample("schema_error", f"objects.ref[{i}] is {json_type(ref)}, not text")
    for i, box in enumerate(boxes):
        if not isinstance(box, list) or not all(map(is_number, box)):
            raise SkipSample("bad_box", f"objects.bbox[{i}] is {str(box)[:80]}, no array of numbers")
        if len(box) != 4:
            what = "a point, and points are not read" if len(box) == 2 else "no box of x1, y1, x2, y2"
            raise SkipSample("bad_box", f"objects.bbox[{i}] has {len(box)} numbers: {what}")
    if len(numbers) > len(boxes):
        raise SkipSample("box_count_mismatch", f"objects.image_id has {len(numbers)} numbers for {len(boxes)} boxes")
    if not all(type(number) is int for number in numbers):
        raise SkipSample("schema_error", f"objects.image_id is {str(numbers)[:80]}, no array of whole numbers")
    numbers = numbers + [0] * (len(boxes) - len(numbers))
    corners = [tuple(map(float, box)) for box in boxes]
    return refs, corners, "pixels" if kind == "real" else "relative_1", numbers
