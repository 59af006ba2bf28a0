"""Hostile conversations through the checks of a sample and the chat encoder; see watch.py."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dataset_builders.contracts.sample import Message, Sample, SkipSample
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.inputs.model_directory import ModelDirectory
from tests.fuzz.hostile import SNIPPETS, long_text, text
from tests.fuzz.sources import IMAGES
from tests.fuzz.watch import run
from tests.helpers.tiny_model import tiny_hf_dir


def chat_inputs(kind: str, rng: random.Random, count: int, directory: Path) -> Iterator[str]:
    encoder = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    long = [long_text(snippet) for snippet in ("x", " \u200b", "\U0001f600", "\u0301")]
    for i in range(count):
        texts = [rng.choice((text(rng), "seven", rng.choice(SNIPPETS))) for _ in range(rng.randrange(1, 6))]
        if i < len(long):
            texts = [long[i], "seven"]
        roles = [rng.choice(("system", "user", "assistant")) if rng.random() < 0.1 else ("user", "assistant")[j % 2]
                 for j in range(len(texts))]  # fmt: skip
        messages = tuple(Message(role=role, text=words) for role, words in zip(roles, texts))
        slots = sum(words.count("<image>") for words in texts)
        images = (IMAGES[0],) * (slots if rng.random() < 0.9 else rng.randrange(3))
        try:
            Sample(key="s/00000000", messages=messages, images=images).check()
            ids, mask = encoder.encode(messages, np.full((len(images), 3), (1, 2, 2), np.int32))
        except SkipSample as skip:
            yield skip.reason
            continue
        assert ids.shape == mask.shape and ids.min() >= 0 and ids.max() < encoder.vocab_size
        yield "sample"


if __name__ == "__main__":
    ChatEncoder(
        ModelDirectory(tiny_hf_dir())
    )  # imports, a model and the template's process, before the watch measures time
    run(chat_inputs, *sys.argv[1:])
