"""Our Qwen3.5 against transformers': float32, CPU, random weights, four shapes, every kind of sample.

transformers takes one sample at a time, our bins are packed: its torch rule of the delta layers has no segments.
"""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tests.helpers import parity
from tests.helpers.bins import make_samples
from tests.helpers.parity import (
    KINDS,
    SEQ_LEN,
    assert_logits_equal,
    assert_losses_and_gradients_equal,
    assert_nothing_to_learn_gives_gradients_of_zero,
    assert_positions_and_angles_equal,
    assert_weights_leave_as_they_came,
)
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import full
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from trainer.checkpoint.hf_weights import HFTensors
from trainer.layers.segments import mrope_angles
from trainer.parts.attention.part import Attention

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)


class Pair(parity.Pair):
    def __init__(self, shape: str, mesh) -> None:
        super().__init__(hybrid_hf_dir(shape), mesh)
        assert {1, 63, 64, 65, 96} < set(self.batch.chunks.lengths()) and self.batch.chunks.lengths()[-1] == 1


@pytest.fixture(scope="module", params=["first", "second", full("third"), full("linear")])
def pair(request):
    with single_rank() as mesh:
        yield Pair(request.param, mesh)


@pytest.fixture(scope="module")
def losses(pair) -> dict[str, torch.Tensor]:
    return pair.losses_by_sample(pair.samples)


def test_the_vision_encoder_has_no_deepstack_and_an_exact_gelu(pair):
    expected = pair.reference.model.visual(*pair.pixels()).pooler_output
    assert_close(pair.ours.vision(pair.batch), expected, atol=1e-5, rtol=1e-5)


def test_positions_and_angles_turn_the_first_quarter_of_a_head(pair):
    language = pair.ours.shape.language
    assert mrope_angles(pair.batch.position_ids, language).shape[1] == 4
    assert {m.head_dim for m in language.mixers if isinstance(m, Attention)} <= {32}
    assert_positions_and_angles_equal(pair)


def test_logits_of_a_packed_bin(pair):
    assert_logits_equal(pair)


def test_loss_and_the_gradient_of_every_parameter(pair):
    assert_losses_and_gradients_equal(pair)


@pytest.mark.promise(
    "Samples without, with one and with several images share a bin: each has its losses alone to 1e-5, and no "
    "other changes a bit of them."
)
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_another_sample_changes_no_bit_of_the_others(pair, losses, number):
    """Neither its state nor its convolution reaches over its end: other tokens and other pixels, of the same number."""
    other = make_samples(KINDS, pair.geometry, range(20, 300), seed=7)[number]
    own = pair.samples[number]
    other = dataclasses.replace(other, key=own.key, loss_mask=own.loss_mask)
    again = pair.losses_by_sample([*pair.samples[:number], other, *pair.samples[number + 1 :]])
    for key, before in losses.items():
        assert torch.equal(again[key], before) is (key != own.key or len(before) == 0), key


@pytest.mark.promise(
    "Samples without, with one and with several images share a bin: each has its losses alone to 1e-5, and no "
    "other changes a bit of them."
)
def test_a_sample_in_a_bin_is_as_it_is_alone(pair, losses):
    for sample in pair.samples:
        assert_close(pair.losses_by_sample([sample])[sample.key], losses[sample.key], atol=1e-5, rtol=1e-5)


def test_a_bin_with_nothing_to_learn_gives_gradients_of_zero(pair):
    assert_nothing_to_learn_gives_gradients_of_zero(pair)


@pytest.mark.promise(
    "Weights that were not trained leave in the Hugging Face format with the bits and in the form in which they came."
)
def test_weights_in_and_out_are_bit_equal_in_their_dtypes_and_mtp_is_carried(pair, tmp_path):
    """The directory is as the published ones are: bfloat16, with float32 where precision is needed."""
    base = tmp_path / "base"
    shutil.copytree(pair.hf_dir, base)
    tensors = load_file(base / "model.safetensors")
    exact = ("A_log", "dt_bias", "norm.weight", "mtp.layers.0.mlp.down_proj.weight")
    tensors = {name: value if name.endswith(exact) else value.bfloat16() for name, value in tensors.items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    ours = build_tiny(base, pair.mesh, SEQ_LEN)
    assert_weights_leave_as_they_came(ours, pair.mesh, base, tmp_path / "out", file_bytes=60_000)
    assert any(name.startswith("mtp.") for name in HFTensors(tmp_path / "out").names())


def test_what_needs_float32_has_it_in_bfloat16_too(pair):
    ours = build_tiny(pair.hf_dir, pair.mesh, SEQ_LEN, torch.bfloat16)
    kept = {name.rpartition(".")[2] for name, param in ours.named_parameters() if param.dtype is torch.float32}
    assert kept == {"a_log", "dt_bias"}
    assert ours(pair.batch).isfinite().all()
