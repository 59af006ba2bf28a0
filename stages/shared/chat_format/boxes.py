"""Boxes in texts: how a model's prompts and answers write them, and how they are read back from an answer.

relative_1000    0 to 1000 along each side of the image, whatever its size: Qwen3-VL and Qwen3.5, Qwen2-VL
                 (QwenLM/Qwen3-VL issues 1427, 1623, 1927); rounded as ms-swift does, int(round(x / width * 1000))
resized_pixels   pixels of the image as it is resized for the model: Qwen2.5-VL (QwenLM/Qwen3-VL issue 721)

bbox_2d          [{"bbox_2d": [10, 20, 300, 400], "label": "cat"}]      the form of Qwen's cookbook
fenced           the same in a block of code, ```json, as Qwen's models write it unasked
lines            cat: [10, 20, 300, 400]                                 one box a line
"""

import dataclasses
import json
from typing import Literal

from pydantic import Field

from dataset_builders.contracts.boxes import BOX_SLOT, RELATIVE, Box, BoxPlace, Convention, TrueBoxes
from dataset_builders.contracts.sample import Message, Sample
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import PixelConfig
from dataset_builders.pictures.pixels import smart_resize


class BoxFormat(StrictModel):
    """The settings of boxes in texts."""

    convention: Convention = Field(
        default="relative_1000",
        description="coordinates: relative_1000, 0 to 1000 along each side (Qwen3-VL and later); resized_pixels, "
        "pixels of the resized image (Qwen2.5-VL)",
    )
    form: Literal["bbox_2d", "fenced", "lines"] = Field(
        default="bbox_2d",
        description='lists of boxes: bbox_2d, [{"bbox_2d": [x1, y1, x2, y2], "label": ".."}]; fenced, the same in a '
        "block of code; lines, label: [x1, y1, x2, y2]",
    )
    order: Literal["given", "sorted"] = Field(
        default="given", description="boxes of a list: given, as in the data; sorted, by label, then y1, x1, y2, x2"
    )


def with_boxes_written(sample: Sample, boxes: BoxFormat, pixels: PixelConfig | None) -> Sample:
    """Return the sample with the boxes in its texts, as a model of this format reads and writes them.

    Args:
        pixels: the settings of images; None only for a model without images.
    """
    if not any(message.boxes for message in sample.messages):
        return sample
    messages = tuple(_written(message, boxes, pixels) for message in sample.messages)
    return dataclasses.replace(sample, messages=messages)


def true_boxes(message: Message, boxes: BoxFormat, pixels: PixelConfig) -> TrueBoxes | None:
    """Return the boxes of a message before they are written; None if it has no place for boxes, or places of several
    images: nothing in an answer's text says of which image a box is."""
    if len({place.image for place in message.boxes}) != 1:
        return None
    first = message.boxes[0]
    height, width = smart_resize(first.size[1], first.size[0], pixels)
    return TrueBoxes(
        convention=boxes.convention,
        image=first.image,
        size=first.size,
        resized=(width, height),
        boxes=tuple(box for place in message.boxes for box in place.boxes),
    )


def in_convention(box: Box, size: tuple[int, int], convention: Convention, pixels: PixelConfig) -> list[int]:
    """Return [x1, y1, x2, y2] as a model of this convention writes them; `size` is the image's (width, height)."""
    width, height = size
    sides = (RELATIVE,) * 2 if convention == "relative_1000" else smart_resize(height, width, pixels)[::-1]
    # Divided first, as its makers do: the order decides which halves are rounded up.
    return [round(x / side * new) for x, side, new in zip(box.corners, size * 2, sides * 2)]


def _written(message: Message, boxes: BoxFormat, pixels: PixelConfig) -> Message:
    if not message.boxes:
        return message
    first, *others = message.text.split(BOX_SLOT)
    pieces = [first]
    for place, text in zip(message.boxes, others, strict=True):
        pieces += [_place_text(place, boxes, pixels), text]
    return dataclasses.replace(message, text="".join(pieces), boxes=())


def _place_text(place: BoxPlace, boxes: BoxFormat, pixels: PixelConfig) -> str:
    chosen = place.boxes
    if boxes.order == "sorted":
        chosen = sorted(chosen, key=lambda box: (box.label, box.y1, box.x1, box.y2, box.x2))
    written = [(in_convention(box, place.size, boxes.convention, pixels), box.label) for box in chosen]
    if not place.is_list:
        return str(written[0][0])
    if boxes.form == "lines":
        return "\n".join(f"{label}: {corners}" if label else str(corners) for corners, label in written) or "none"
    items = [{"bbox_2d": corners} | ({"label": label} if label else {}) for corners, label in written]
    text = json.dumps(items, ensure_ascii=False)
    return f"```json\n{text}\n```" if boxes.form == "fenced" else text
