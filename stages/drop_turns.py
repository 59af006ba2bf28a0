"""Over-long samples: leave out whole last turns, with their images, until the rest fits; nothing else is ever cut."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample
from stages.encode_chat import ChatEncoder, TokenizedText, split_turns


def drop_turns(
    sample: Sample, patches: np.ndarray, chat: ChatEncoder, max_seq_len: int
) -> tuple[Sample, TokenizedText]:
    """The sample with as many of its first turns as fit, and its conversation.

    Args:
        patches: (images,) integers: patches of each image.

    Raises:
        SkipSample: over_length where the first turn alone does not fit; or what is left has nothing to learn.
    """
    turns = split_turns(sample.messages)
    kept, too_many = 0, len(turns)
    while too_many - kept > 1:  # a conversation never gets shorter by a turn more
        tried = (kept + too_many) // 2
        messages = _first(turns, tried)
        images = _count_images(messages)
        tokens = chat.count_tokens(messages) - images + int(patches[:images].sum()) // chat.merge_size**2
        kept, too_many = (tried, too_many) if tokens <= max_seq_len else (kept, tried)
    if not kept:
        detail = f"the first of {len(turns)} turns alone has more than max_seq_len={max_seq_len} tokens"
        raise SkipSample("over_length", detail)
    messages = _first(turns, kept)
    (text,) = chat.tokenize([messages])
    if isinstance(text, SkipSample):
        raise text
    return dataclasses.replace(sample, messages=messages, images=sample.images[: _count_images(messages)]), text


def _first(turns: Sequence[tuple[Message, ...]], number: int) -> tuple[Message, ...]:
    return tuple(message for turn in turns[:number] for message in turn)


def _count_images(messages: Sequence[Message]) -> int:
    return sum(message.text.count(IMAGE_SLOT) for message in messages)
