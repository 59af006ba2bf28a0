"""A model learns from pictures what only the pictures say: the word of a colour, also for shades it has not seen."""

import dataclasses

import numpy as np
import pytest
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import Kind, make_sample
from tests.helpers.reference import load_reference, random_hf_dir, reference_logits
from tests.helpers.run_dir import OPTIM, write_job
from tests.helpers.world import exported, run_world
from trainer.data.micro_batch import geometry_of
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Another order in a bin moves losses by at most 2e-6, another image changes only its sample's, and "
    "reporting losses changes no bit."
)

# word's token id -> red, green and blue as parts of the brightest
COLOURS = {40: (1, 0, 0), 41: (0, 1, 0), 42: (0, 0, 1), 43: (1, 1, 0), 44: (1, 0, 1), 45: (0, 1, 1)}
BRIGHTNESS = {"seen": range(110, 250, 10), "unseen": range(115, 250, 20)}
STEPS, BIN_TOKENS = 60, 128


def solid(word: int, brightness: int) -> TokenizedSample:
    """A picture of one colour, the question, and the colour's word, which alone is to be learnt."""
    sample = make_sample(
        Kind(8, ((1, 4, 4),)), geometry_of(read_model(random_hf_dir("first"))[1]), range(50, 300), seed=1
    )
    pixels = np.repeat(np.array(COLOURS[word]) * brightness, sample.patches.shape[1] // 3)  # channel by channel
    loss_mask = np.zeros_like(sample.loss_mask)
    loss_mask[-1] = 1
    return dataclasses.replace(
        sample,
        input_ids=np.append(sample.input_ids[:-1], word).astype(np.int32),
        loss_mask=loss_mask,
        patches=np.tile(pixels.astype(np.uint8), (len(sample.patches), 1)),
    )


def shades(kind: str) -> list[TokenizedSample]:
    return [solid(word, brightness) for word in COLOURS for brightness in BRIGHTNESS[kind]]


def recognised(model, samples: list[TokenizedSample]) -> float:
    """The share of samples whose last word is the likeliest of all colours' words."""
    words = torch.tensor(list(COLOURS))
    with torch.no_grad():
        answers = [words[reference_logits(model, sample)[-2, words].argmax()].item() for sample in samples]
    return float(np.mean([answer == sample.input_ids[-1] for answer, sample in zip(answers, samples)]))


@pytest.mark.full
def test_unseen_shades_are_called_by_their_colour(tmp_path):
    before = load_reference(random_hf_dir("first"))
    seen, unseen = shades("seen"), shades("unseen")
    assert recognised(before, unseen) < 0.5
    order = np.random.default_rng(3).permutation(len(seen))
    a_bin = BIN_TOKENS // max(len(sample.input_ids) for sample in seen)
    bins = [[seen[place] for place in order[first : first + a_bin]] for first in range(0, len(order), a_bin)]
    run = write_job(tmp_path, num_steps=STEPS, bins=bins, optim=OPTIM.model_copy(update={"weight_decay": 0.0}))
    run_world(run, 1)
    after = load_reference(random_hf_dir("first"))
    unset = after.load_state_dict(exported(run), strict=False)
    assert unset.missing_keys == ["lm_head.weight"] and not unset.unexpected_keys  # the one that is tied
    assert recognised(after, unseen) > 0.9
