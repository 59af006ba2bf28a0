"""The image of a question with its boxes: those of the question, the right ones, and those of models' answers."""

from collections.abc import Sequence
from typing import Literal

from dataset_builders.contracts.boxes import Box, TrueBoxes
from dataset_builders.contracts.sample import Sample
from dataset_builders.pictures.images import preview_png
from stages.shared.chat_format.boxes import read_boxes
from stages.shared.pages.drawn_boxes import BoxLayer, drawn_boxes
from stages.shared.pages.report import Picture

_SIDE = 320  # pixels; a smaller picture has no room for labels


def answer_layer(name: str, kind: Literal["before", "answer"], answer: str, truth: TrueBoxes) -> BoxLayer:
    """Return the boxes that a model's answer states, in pixels of the image as shown."""
    found = read_boxes(answer)
    if found is None:
        return BoxLayer(name=name, kind=kind, note="no boxes can be read")
    return BoxLayer(name=name, kind=kind, boxes=[Box(*truth.as_shown(corners), label) for corners, label in found])


def answer_picture(
    sample: Sample, turn: int, truth: TrueBoxes | None, layers: Sequence[BoxLayer], caption: str
) -> Picture | None:
    """Return the image that a question or its answer has boxes of, with these boxes drawn; None if both have none.

    Args:
        turn: number of the answer in the sample, from 0.
        truth: the right boxes of the answer.
        layers: the boxes of models' answers, in the image of the right ones.
    """
    places = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
    asked = sample.messages[places[turn] - 1].boxes
    if truth is None and not asked:
        return None
    image, size = (truth.image, truth.size) if truth else (asked[0].image, asked[0].size)
    of_question = [box for place in asked if place.image == image for box in place.boxes]
    drawn = [BoxLayer(name="in the question", kind="asked", boxes=of_question)] if of_question else []
    if truth is not None:
        drawn += [BoxLayer(name="reference", kind="true", boxes=truth.boxes), *layers]
    shows, drawing = f"image {image + 1} of {sample.key}", drawn_boxes(size, drawn, room=(_SIDE, _SIDE))
    return Picture(preview_png([sample.images[image]], _SIDE), shows, caption, drawing)
