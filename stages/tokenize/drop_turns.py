"""Over-long samples: drop whole last turns, with their images, until the rest fits; nothing else is cut."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample
from stages.shared.chat_format.chat import ChatEncoder, TokenizedText, split_turns


def drop_turns(
    sample: Sample, patches: np.ndarray, chat: ChatEncoder, max_seq_len: int
) -> tuple[Sample, TokenizedText]:
    """Return the sample with as many of its first turns as fit, and its tokenized conversation. `patches` are (images,)
    integers: the number of patches of each image. SkipSample: not even the first turn fits, or what fits has nothing to
    train on."""
    turns = split_turns(sample.messages)

    def count_tokens(num_turns: int) -> int:
        messages = _first(turns, num_turns)
        images = _count_images(messages)
        # `count_tokens` has one placeholder per image.
        return chat.count_tokens(messages) - images + int(patches[:images].sum()) // chat.merge_size**2

    def is_exact(num_turns: int) -> bool:
        messages = _first(turns, num_turns)
        return count_tokens(num_turns) <= max_seq_len and chat.cut([messages]) == [[messages]]

    # It is known that all turns together do not fit.
    if chat.format.is_fixed:  # then a further turn never makes a conversation shorter
        num_fit = bisect.bisect_right(range(1, len(turns)), max_seq_len, key=count_tokens)
    else:
        num_fit = next(filter(is_exact, range(len(turns) - 1, 0, -1)), 0)
    if not num_fit:
        detail = f"the first of {len(turns)} turns alone has more than max_seq_len={max_seq_len} tokens"
        raise SkipSample("over_length", detail)
    messages = _first(turns, num_fit)
    (text,) = chat.tokenize([messages])
    if isinstance(text, SkipSample):
        raise text
    return with_first(sample, messages), text


def with_first(sample: Sample, messages: tuple[Message, ...]) -> Sample:
    """Return the sample with only `messages`, its first ones, and the images that they show."""
    return dataclasses.replace(sample, messages=messages, images=sample.images[: _count_images(messages)])


def _first(turns: Sequence[tuple[Message, ...]], number: int) -> tuple[Message, ...]:
    return tuple(message for turn in turns[:number] for message in turn)


def _count_images(messages: Sequence[Message]) -> int:
    return sum(message.text.count(IMAGE_SLOT) for message in messages)
