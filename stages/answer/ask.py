"""Questions to an exported model, with images, a video or neither, with the same prompts and pixels as in training."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Sample, SkipSample, Video
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import PILLOW_PIXEL_LIMIT, ImageLimits, check_image
from dataset_builders.readers.source_files import VIDEO_SUFFIXES
from stages.answer.greedy_decoder import NO_VIDEOS, EncodedImages
from stages.answer.transformers_engine import Generator
from stages.shared.artifacts.verify import check_written
from stages.shared.chat_format.text import slots_of
from stages.shared.inputs.adapter_directory import open_model_to_answer

_KEY = "chat/00000000"
_USABLE = f"a PNG, JPEG or WebP file of at most {PILLOW_PIXEL_LIMIT // 10**6} million pixels, or a whole video"
_LIMITS = ImageLimits(max_pixels=PILLOW_PIXEL_LIMIT, min_side=1)


def ask(
    hf_dir: Path, picture: Path | None, question: str, max_new_tokens: int = 64, adapter_dir: Path | None = None
) -> str:
    """Return the model's greedy answer to one question, stripped; `picture`, an image or a file with the suffix of a
    video, is shown before the question."""
    pictures = [] if picture is None else [picture]
    is_video = picture is not None and picture.suffix.lower().removeprefix(".") in VIDEO_SUFFIXES
    messages = [user_message(question, len(pictures), VIDEO_SLOT if is_video else IMAGE_SLOT)]
    if picture is not None:
        _read_picture(picture, is_video)  # a wrong path is refused before the model is loaded
    shown = {"videos" if is_video else "pictures": pictures}
    return ChatModel(hf_dir, adapter_dir).answer(messages, max_new_tokens=max_new_tokens, **shown)


def user_message(question: str, num_shown: int, slot: str = IMAGE_SLOT) -> Message:
    """Return a person's message that shows images, or videos, before the question; InputError if it cannot be asked."""
    if not question.strip():
        raise InputError('the question is empty; ask for example "Which digit is in the picture?"')
    if slots := slots_of([Message(role="user", text=question)]):
        raise InputError(f"the question holds {slots[0]}, which stands for {slots[0][1:-1]}s; write it in another way")
    try:
        Sample(key=_KEY, messages=(Message(role="user", text=question),), images=()).check()
    except SkipSample as error:
        raise _not_askable(error) from error
    return Message(role="user", text=slot * num_shown + question)


class ChatModel:
    """A loaded model, perhaps with an adapter, that answers conversations as the evaluation does."""

    def __init__(self, hf_dir: Path, adapter_dir: Path | None = None) -> None:
        for directory in filter(None, (hf_dir, adapter_dir)):
            check_written(directory.resolve())
        model, adapter = open_model_to_answer(hf_dir, adapter_dir)
        self._generator = Generator(model, adapter=adapter)

    def answer(
        self,
        messages: Sequence[Message],
        pictures: Sequence[Path] = (),
        max_new_tokens: int = 64,
        videos: Sequence[Path] = (),
    ) -> str:
        """Return the greedy answer to the last message, a user's, stripped; InputError if it cannot be asked.

        Args:
            messages: those of `user_message` and the answers between them.
            pictures: one image file per image slot of the messages, in order.
            videos: one file per video slot, in order.
        """
        generator = self._generator
        encoded: list[EncodedImages] = []
        for picture in pictures:
            try:
                encoded.append(generator.encode_images([_read_picture(picture)]))
            except SkipSample as error:
                raise _unusable(picture, error) from error
        grids = np.concatenate([np.zeros((0, 3), np.int32), *(images.grids for images in encoded)])
        images = EncodedImages(grids, tuple(patches for images in encoded for patches in images.patches))
        clips = NO_VIDEOS
        if videos:
            try:
                clips = generator.encode_videos([Video(data=_read_picture(video, True)) for video in videos])
            except SkipSample as error:
                raise _unusable(videos[0], error) from error
        try:
            prompt = generator.encode_prompt(messages, images, clips)
        except SkipSample as error:
            raise _not_askable(error) from error
        if (length := len(prompt.input_ids) + max_new_tokens) > generator.context_length:
            raise InputError(
                f"the conversation and its answer have up to {length:,} tokens, and the model has positions for "
                f"{generator.context_length:,}; begin a new conversation"
            )
        return generator.generate([prompt], max_new_tokens)[0].text.strip()


def _read_picture(picture: Path, is_video: bool = False) -> bytes:
    if not picture.is_file():
        raise InputError(f"picture {picture} does not exist, or is not a file; check the path")
    try:
        data = picture.read_bytes()
        if is_video:
            Video(data=data).check()
        else:
            check_image(data, _LIMITS, decode=False)
    except OSError as error:
        raise InputError(f"picture {picture} cannot be read ({error.strerror}); check its permissions") from error
    except SkipSample as error:
        raise _unusable(picture, error) from error
    return data


def _unusable(picture: Path, error: SkipSample) -> InputError:
    return InputError(f"picture {picture} cannot be used ({error}); give {_USABLE}")


def _not_askable(error: SkipSample) -> InputError:
    return InputError(f"the question cannot be asked ({error}); give plain text without the model's special tokens")
