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
import re

from dataset_builders.contracts.boxes import BOX_SLOT, RELATIVE, Box, BoxPlace, Convention, TrueBoxes
from dataset_builders.contracts.sample import Message, Sample
from dataset_builders.contracts.tokenized import PixelConfig
from stages.shared.chat_format.config import BoxFormat

ReadBox = tuple[tuple[float, float, float, float], str]  # four numbers as they stand in a text, and the label or ""

_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_NUMBERS = re.compile(rf"\[\s*({_NUMBER}(?:\s*,\s*{_NUMBER})*)\s*\]")  # one or more in brackets
_OTHER_KEY = re.compile(r"""[{,]\s*["'][^"'{,]*["']\s*:\s*\Z""")  # of an object, right before its value
_NOTHING = re.compile(r"(?:```\w*\s*)?none\.?(?:\s*```)?|[^\[\]{}]*\[\s*\][^\[\]{}]*", re.IGNORECASE)
_KEY = '"bbox_2d"'
_LARGEST = 1e6  # no image has a side of as many pixels


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
    return TrueBoxes(
        convention=boxes.convention,
        image=first.image,
        size=first.size,
        resized=_resized(first.size, pixels),
        # The place of a single box writes no label, so an answer cannot have it.
        boxes=tuple(
            box if place.is_list else dataclasses.replace(box, label="")
            for place in message.boxes
            for box in place.boxes
        ),
    )


def in_convention(box: Box, size: tuple[int, int], convention: Convention, pixels: PixelConfig) -> list[int]:
    """Return [x1, y1, x2, y2] as a model of this convention writes them; `size` is the image's (width, height)."""
    sides = (RELATIVE, RELATIVE) if convention == "relative_1000" else _resized(size, pixels)
    # Divided first, as its makers do: the order decides which halves are rounded up.
    return [round(x / side * new) for x, side, new in zip(box.corners, size * 2, sides * 2)]


def _resized(size: tuple[int, int], pixels: PixelConfig) -> tuple[int, int]:
    # Not imported above: its module loads torch, which `athanor plan` does not need.
    from dataset_builders.pictures.pixels import smart_resize

    height, width = smart_resize(size[1], size[0], pixels)
    return width, height


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


def read_boxes(text: str) -> list[ReadBox] | None:
    """Return the boxes that an answer states, in its order; empty where it says that there are none; None where it does
    not parse.

    A form is read with or without text around it, and whatever form the recipe chose; of reasoning, only what follows:

        JSON objects with bbox_2d, in a list, a block of code, or alone; other keys than the label are ignored. Single
        quotes are read where the text has no double ones and no apostrophe (`man's` would end a text). Of a list that
        was cut off, the whole objects count, as in the reader of Qwen's cookbook
        label: [x1, y1, x2, y2], one a line; the label may have brackets
        [x1, y1, x2, y2] anywhere: a box without a label
        none, alone; [] as the only bracket: no boxes

    Everything else is None: an object that is broken before the end, another number of coordinates, coordinates in
    quotes, another key (`bbox` is x, y, width, height in COCO), (x1,y1),(x2,y2), "there is no cat", an empty text.
    """
    text = text.rpartition("</think>")[2]
    if "bbox_2d" in text:
        return _read_objects(text if '"' in text else text.replace("'", '"'))
    if _NOTHING.fullmatch(text.strip()):
        return []
    found: list[ReadBox] = []
    for line in text.split("\n"):
        groups = [(at, _corners([float(n) for n in at[1].split(",")])) for at in _NUMBERS.finditer(line)]
        label = ""
        if groups and not line[groups[-1][0].end() :].strip(" .,;\r"):  # the line ends with brackets
            before = line[: groups[-1][0].start()].rstrip()
            if before.endswith(":") and all(corners is None for _, corners in groups[:-1]):
                label, groups = before[:-1].strip().removeprefix("- ").removeprefix("* ").strip(), groups[-1:]
        if any(corners is None or _OTHER_KEY.search(line[: at.start()][-200:]) for at, corners in groups):
            return None
        found += [(corners, label) for _, corners in groups]
    return found or None


def _read_objects(text: str) -> list[ReadBox] | None:
    found: list[ReadBox] = []
    decoder, start, end = json.JSONDecoder(), -1, 0
    while (start := text.find("{", max(start + 1, end))) >= 0:
        try:
            value, after = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if "bbox_2d" not in value:  # an object around a list
            continue
        corners, label = _corners(value["bbox_2d"]), value.get("label", "")
        if corners is None or not isinstance(label, str) or _KEY in text[end:start]:
            return None
        found.append((corners, label))
        end = after
    rest = text[end:]
    is_cut = found and "}" not in rest  # while the next object was written
    return found if found and (is_cut or _KEY not in rest) else None


def _corners(numbers: object) -> tuple[float, float, float, float] | None:
    """Return four numbers as floats; None for anything else."""
    if not isinstance(numbers, list) or len(numbers) != 4:
        return None
    if not all(type(number) in (int, float) and -_LARGEST < number < _LARGEST for number in numbers):  # no NaN either
        return None
    x1, y1, x2, y2 = map(float, numbers)
    return x1, y1, x2, y2
