"""Our Qwen3-VL against transformers': float32, CPU, random weights, two shapes, every kind of sample."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from dataset_builders.contracts.manifest import file_entry
from tests.helpers import parity
from tests.helpers.bins import MIXED, make_samples
from tests.helpers.parity import (
    assert_logits_equal,
    assert_losses_and_gradients_equal,
    assert_nothing_to_learn_gives_gradients_of_zero,
    assert_positions_and_angles_equal,
    assert_weights_leave_as_they_came,
)
from tests.helpers.reference import random_hf_dir
from tests.helpers.single_rank import single_rank
from trainer.data.micro_batch import make_micro_batch

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

SEQ_LEN = 128


class Pair(parity.Pair):
    def __init__(self, shape: str, mesh) -> None:
        super().__init__(random_hf_dir(shape), mesh, MIXED, SEQ_LEN)


@pytest.fixture(scope="module", params=["first", "second"])
def pair(request):
    with single_rank() as mesh:
        yield Pair(request.param, mesh)


def test_vision_encoder_and_every_deepstack_level(pair):
    expected = pair.reference.model.visual(*pair.pixels())
    levels = len(pair.ours.shape.vision.deepstack_layers)
    image_tokens, *features = pair.ours.vision(pair.batch).chunk(1 + levels, dim=-1)
    assert_close(image_tokens, expected.pooler_output, atol=1e-4, rtol=0)
    assert len(features) == len(expected.deepstack_features) >= 2
    for ours, theirs in zip(features, expected.deepstack_features):
        assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_mrope_positions_and_angles(pair):
    assert_positions_and_angles_equal(pair)


def test_logits_of_a_packed_bin(pair):
    assert_logits_equal(pair)


def test_loss_and_the_gradient_of_every_parameter(pair):
    assert_losses_and_gradients_equal(pair)


def test_the_last_layer_goes_on_with_the_loss_tokens_alone(pair):
    seen = []
    last = pair.ours.language.decoder.layers[-1]
    handle = last.mlp.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    try:
        pair.ours(pair.batch)
        pair.ours.hidden_states(pair.batch)
    finally:
        handle.remove()
    assert seen == [pair.batch.num_loss_tokens, SEQ_LEN] and seen[0] < seen[1]


def test_a_bin_with_nothing_to_learn_gives_no_losses_and_gradients_of_zero(pair):
    assert_nothing_to_learn_gives_gradients_of_zero(pair)


@pytest.mark.promise(
    "Weights that were not trained leave in the Hugging Face format with the bits and in the form in which they came."
)
def test_weights_in_and_out_are_bit_equal_in_several_files(pair, tmp_path):
    entries = assert_weights_leave_as_they_came(pair.ours, pair.mesh, pair.hf_dir, tmp_path, file_bytes=60_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert entries == [file_entry(tmp_path, file.name) for file in files]
    assert len(files) > 3 and (tmp_path / "model.safetensors.index.json").is_file()
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 60_000 or len(sizes) == 1, file


@pytest.mark.promise(
    "Samples without, with one and with several images share a bin: each has its losses alone to 1e-5, and no "
    "other changes a bit of them."
)
def test_packed_samples_are_as_each_alone_and_do_not_see_each_other(pair):
    geometry = pair.geometry
    packed = pair.ours(pair.batch)
    alone = torch.cat([pair.ours(make_micro_batch([s], geometry, SEQ_LEN)) for s in pair.samples])
    assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    changed = [make_samples(MIXED, geometry, range(20, 300), seed=7)[0], *pair.samples[1:]]
    assert len(changed[0].input_ids) == len(pair.samples[0].input_ids)
    own = int(changed[0].loss_mask[1:].sum())
    first = int(pair.samples[0].loss_mask[1:].sum())
    again = pair.ours(make_micro_batch(changed, geometry, SEQ_LEN))
    assert not torch.equal(again[:own][: min(own, first)], packed[: min(own, first)])
    assert torch.equal(again[own:], packed[first:])


@pytest.mark.promise(
    "Another order in a bin moves losses by at most 2e-6, another image changes only its sample's, and "
    "reporting losses changes no bit."
)
@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (1, 0, 4, 3, 2), (2, 3, 4, 0, 1)])
def test_the_order_of_samples_in_a_bin_does_not_change_their_losses(pair, order):
    losses = pair.losses_by_sample(pair.samples)
    again = pair.losses_by_sample([pair.samples[number] for number in order])
    assert [len(part) for part in losses.values()] == [int(s.loss_mask[1:].sum()) for s in pair.samples]
    for key, part in losses.items():
        # A sample's sums are over the same numbers; where rows of a matrix product begin may change how it rounds:
        # a few units of float32's last place (1.2e-7) of losses around 6, no more.
        assert_close(again[key], part, atol=2e-6, rtol=0)


@pytest.mark.promise(
    "Another order in a bin moves losses by at most 2e-6, another image changes only its sample's, and "
    "reporting losses changes no bit."
)
def test_the_order_of_bins_does_not_change_their_losses(pair):
    bins = [pair.samples[:2], pair.samples[2:], pair.samples[1:2]]
    forward = [pair.losses_by_sample(samples) for samples in bins]
    backward = [pair.losses_by_sample(samples) for samples in reversed(bins)][::-1]
    for one, other in zip(forward, backward):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.promise(
    "Another order in a bin moves losses by at most 2e-6, another image changes only its sample's, and "
    "reporting losses changes no bit."
)
@pytest.mark.parametrize(
    ("frames", "token"), [("patches", "image_token_id"), ("later_patches", "video_token_id")], ids=["first", "second"]
)
def test_other_pictures_give_other_losses_to_their_sample_alone(pair, frames, token):
    """Also where only the second frames of a video change."""
    losses = pair.losses_by_sample(pair.samples)
    for number, sample in enumerate(pair.samples):
        inverted = dataclasses.replace(sample, **{frames: 255 - getattr(sample, frames)})
        again = pair.losses_by_sample([*pair.samples[:number], inverted, *pair.samples[number + 1 :]])
        for other in pair.samples:
            change = (again[other.key] - losses[other.key]).abs()
            if other is sample and len(getattr(sample, frames)):
                first = int((sample.input_ids == getattr(pair.geometry, token)).argmax())
                seen = torch.from_numpy(sample.loss_mask[1:].nonzero()[0] >= first)
                assert (change[seen] > 1e-4).all() and not change[~seen].any()
            else:
                assert not change.any(), other.key
