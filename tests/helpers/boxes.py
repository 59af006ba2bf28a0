"""Samples with boxes in an image of 640 x 480 pixels, and their texts, written by hand.

The tiny model scales the image to 288 x 192, so the halves of 10 / 640 * 288 = 4.5 go to the even 4.
"""

from dataset_builders.contracts.boxes import BOX_SLOT, Box, BoxPlace
from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample
from tests.helpers.samples import make_image

SIZE, RESIZED = (640, 480), (288, 192)
CAT, DOG = Box(10, 20, 300, 400, "cat"), Box(320, 0, 640, 5, "a dog")
# (convention, form) -> the text of [CAT, DOG] in the given order
WRITTEN = {
    ("relative_1000", "bbox_2d"): '[{"bbox_2d": [16, 42, 469, 833], "label": "cat"}, '
    '{"bbox_2d": [500, 0, 1000, 10], "label": "a dog"}]',
    ("relative_1000", "fenced"): '```json\n[{"bbox_2d": [16, 42, 469, 833], "label": "cat"}, '
    '{"bbox_2d": [500, 0, 1000, 10], "label": "a dog"}]\n```',
    ("relative_1000", "lines"): "cat: [16, 42, 469, 833]\na dog: [500, 0, 1000, 10]",
    ("resized_pixels", "bbox_2d"): '[{"bbox_2d": [4, 8, 135, 160], "label": "cat"}, '
    '{"bbox_2d": [144, 0, 288, 2], "label": "a dog"}]',
    ("resized_pixels", "fenced"): '```json\n[{"bbox_2d": [4, 8, 135, 160], "label": "cat"}, '
    '{"bbox_2d": [144, 0, 288, 2], "label": "a dog"}]\n```',
    ("resized_pixels", "lines"): "cat: [4, 8, 135, 160]\na dog: [144, 0, 288, 2]",
}
ONE = {"relative_1000": "[500, 0, 1000, 10]", "resized_pixels": "[144, 0, 288, 2]"}  # DOG alone


def place(*boxes: Box, is_list: bool = True, image: int = 0) -> BoxPlace:
    return BoxPlace(image=image, size=SIZE, boxes=boxes, is_list=is_list)


def boxed_sample(key: str = "boxed/00000000", *boxes: Box) -> Sample:
    """Return a sample that finds boxes, CAT and DOG if none are given, and then is asked about DOG."""
    sample = Sample(
        key=key,
        images=(make_image(*SIZE),),
        messages=(
            Message(role="user", text=f"{IMAGE_SLOT}Find all."),
            Message(role="assistant", text=f"Here: {BOX_SLOT}", boxes=(place(*(boxes or (CAT, DOG))),)),
            Message(role="user", text=f"What is at {BOX_SLOT}?", boxes=(place(DOG, is_list=False),)),
            Message(role="assistant", text="a dog"),
        ),
    )
    sample.check()
    return sample


def asked_sample(key: str = "asked/00000000") -> Sample:
    """Return a sample whose only question names DOG by its box."""
    question = Message(role="user", text=f"{IMAGE_SLOT}What is at {BOX_SLOT}?", boxes=(place(DOG, is_list=False),))
    return Sample(key=key, images=(make_image(*SIZE),), messages=(question, Message(role="assistant", text="a dog")))
