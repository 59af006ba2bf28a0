"""A person's messages and images as the model's prompt, with the checks and the pixels of training."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample
from dataset_builders.pictures.images import PILLOW_PIXEL_LIMIT, ImageLimits, check_image
from stages.answer.greedy_decoder import EncodedImages, Prompt
from stages.answer.transformers_engine import Generator

_KEY = "chat/00000000"
USABLE = f"a PNG, JPEG or WebP file of at most {PILLOW_PIXEL_LIMIT // 10**6} million pixels"
_LIMITS = ImageLimits(max_pixels=PILLOW_PIXEL_LIMIT, min_side=1)


class UnusableImage(SkipSample):
    """One image of a conversation cannot be used.

    Attributes:
        place: number of the image, from 0.
    """

    def __init__(self, place: int, why: SkipSample) -> None:
        super().__init__(why.reason, why.detail)
        self.place = place


def check_text(text: str) -> None:
    """Check the text that a person wrote.

    Raises:
        SkipSample: the text holds the mark of an image slot.
    """
    if IMAGE_SLOT in text:
        raise SkipSample("special_token_in_text", f"the text holds {IMAGE_SLOT}, which stands for an image")


def check_conversation(messages: Sequence[Message], images: Sequence[bytes]) -> None:
    """Check messages and the headers of their images, without a model.

    Raises:
        UnusableImage: a file is not an image, or has too many pixels.
        SkipSample: a text is empty or holds control characters, or the number of images is wrong. An earlier answer is
            taken as the model wrote it, so it may be empty or hold such characters.
    """
    checked = tuple(_written(message) if message.role == "assistant" else message for message in messages)
    Sample(key=_KEY, messages=checked, images=tuple(images)).check()
    for place, image in enumerate(images):
        try:
            check_image(image, _LIMITS, decode=False)
        except SkipSample as error:
            raise UnusableImage(place, error) from error


def _written(answer: Message) -> Message:
    return replace(answer, text="answer " + "".join(letter for letter in answer.text if letter >= " "))


def prompt_of(generator: Generator, messages: Sequence[Message], images: Sequence[bytes]) -> Prompt:
    """Return the prompt for the answer to the last message, a user's.

    Args:
        images: encoded image files, one per image slot of the messages, in order.

    Raises:
        UnusableImage: a file is not a usable image.
        SkipSample: as `check_conversation`, or a text holds special tokens.
    """
    check_conversation(messages, images)
    return generator.encode_prompt(messages, _encode(generator, images))


def _encode(generator: Generator, images: Sequence[bytes]) -> EncodedImages:
    encoded = []
    for place, image in enumerate(images):
        try:
            encoded.append(generator.encode_images([image]))
        except SkipSample as error:
            raise UnusableImage(place, error) from error
    if not encoded:
        return generator.encode_images([])
    return EncodedImages(np.concatenate([i.grids for i in encoded]), tuple(i.patches[0] for i in encoded))
