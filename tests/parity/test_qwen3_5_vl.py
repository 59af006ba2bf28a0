"""Our Qwen3.5 against transformers': float32, CPU, random weights, four shapes, every kind of sample.

transformers takes one sample at a time, our bins are packed: its torch rule of the delta layers has no segments.
"""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tests.helpers.bins import MIXED, Kind, make_samples
from tests.helpers.parity import assert_logits_equal, assert_losses_and_gradients_equal
from tests.helpers.reference import load_reference, reference_inputs
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import full
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from trainer.checkpoint.hf_weights import HFTensors, save_hf_weights
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.families.qwen3_vl.family import rules
from trainer.layers.segments import mrope_angles
from trainer.parts.attention.part import Attention

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

# Samples end one before, at and one after the end of a chunk of the delta rule, one has a single token, and so has the
# padding.
SEQ_LEN = 349
KINDS = [*MIXED, Kind(63), Kind(1), Kind(64), Kind(65), Kind(90, ((1, 4, 6),)), Kind(2)]


class Pair:
    """Ours and the reference with the same weights, and one bin of mixed samples."""

    def __init__(self, shape: str, mesh) -> None:
        self.mesh = mesh
        self.hf_dir = hybrid_hf_dir(shape)
        self.reference = load_reference(self.hf_dir)
        self.ours = build_tiny(self.hf_dir, mesh, SEQ_LEN)
        self.geometry = geometry_of(self.ours.shape)
        self.samples = make_samples(KINDS, self.geometry, range(20, 300))
        self.batch = make_micro_batch(self.samples, self.geometry, SEQ_LEN)
        assert {1, 63, 64, 65, 96} < set(self.batch.chunks.lengths()) and self.batch.chunks.lengths()[-1] == 1


@pytest.fixture(scope="module", params=["first", "second", full("third"), full("linear")])
def pair(request):
    with single_rank() as mesh:
        yield Pair(request.param, mesh)


def test_the_vision_encoder_has_no_deepstack_and_an_exact_gelu(pair):
    inputs = [reference_inputs(s, pair.reference.config.image_token_id) for s in pair.samples]
    inputs = [i for i in inputs if "pixel_values" in i]
    pixels, grids = (torch.cat([i[name] for i in inputs]) for name in ("pixel_values", "image_grid_thw"))
    expected = pair.reference.model.visual(pixels, grids).pooler_output
    assert_close(pair.ours.vision(pair.batch), expected, atol=1e-5, rtol=1e-5)


def test_positions_and_angles_turn_the_first_quarter_of_a_head(pair):
    rotary = pair.reference.model.language_model.rotary_emb
    start = 0
    for sample in pair.samples:
        inputs = reference_inputs(sample, pair.reference.config.image_token_id)
        inputs.pop("pixel_values", None)
        positions, _ = pair.reference.model.get_rope_index(**inputs)
        ours = pair.batch.position_ids[:, start : start + len(sample.input_ids)]
        assert torch.equal(ours, positions[:, 0])
        cos, sin = rotary(torch.zeros(1), positions)
        angles = mrope_angles(ours, pair.ours.shape.language)
        assert angles.shape[1] == 4
        assert {m.head_dim for m in pair.ours.shape.language.mixers if isinstance(m, Attention)} <= {32}
        assert_close(angles.cos().tile(2), cos[0], atol=1e-6, rtol=0)
        assert_close(angles.sin().tile(2), sin[0], atol=1e-6, rtol=0)
        start += len(sample.input_ids)


def test_logits_of_a_packed_bin(pair):
    assert_logits_equal(pair)


def test_loss_and_the_gradient_of_every_parameter(pair):
    assert_losses_and_gradients_equal(pair, list(rules(pair.ours.shape)))


def losses_by_sample(model, samples) -> dict[str, torch.Tensor]:
    """Losses of each sample's loss tokens, of one bin."""
    batch = make_micro_batch(samples, geometry_of(model.shape), SEQ_LEN)
    with torch.no_grad():
        return dict(zip(batch.keys, model(batch).split(batch.loss_lengths), strict=True))


@pytest.mark.promise(
    "Samples without, with one and with several images share a bin: each has its losses alone to 1e-5, and no "
    "other changes a bit of them."
)
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_another_sample_changes_no_bit_of_the_others(pair, number):
    """Neither its state nor its convolution reaches over its end: other tokens and other pixels, of the same number."""
    losses = losses_by_sample(pair.ours, pair.samples)
    other = make_samples(KINDS, pair.geometry, range(20, 300), seed=7)[number]
    own = pair.samples[number]
    other = dataclasses.replace(other, key=own.key, loss_mask=own.loss_mask)
    again = losses_by_sample(pair.ours, [*pair.samples[:number], other, *pair.samples[number + 1 :]])
    for key, before in losses.items():
        assert torch.equal(again[key], before) is (key != own.key or len(before) == 0), key


@pytest.mark.promise(
    "Samples without, with one and with several images share a bin: each has its losses alone to 1e-5, and no "
    "other changes a bit of them."
)
def test_a_sample_in_a_bin_is_as_it_is_alone(pair):
    packed = losses_by_sample(pair.ours, pair.samples)
    for sample in pair.samples:
        assert_close(losses_by_sample(pair.ours, [sample])[sample.key], packed[sample.key], atol=1e-5, rtol=1e-5)


def test_a_bin_with_nothing_to_learn_gives_gradients_of_zero(pair):
    pair.ours.zero_grad()
    pair.ours(make_micro_batch([], pair.geometry, SEQ_LEN)).sum().backward()
    for name, param in pair.ours.named_parameters():
        assert param.grad is not None and not param.grad.any(), name


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
    save_hf_weights([ours], pair.mesh, list(rules(ours.shape)), base, tmp_path / "out", file_bytes=60_000)
    before, after = HFTensors(base), HFTensors(tmp_path / "out")
    assert before.names() == after.names() and any(name.startswith("mtp.") for name in after.names())
    for name in before.names():
        assert before.get(name).dtype == after.get(name).dtype
        assert torch.equal(before.get(name), after.get(name)), name


def test_what_needs_float32_has_it_in_bfloat16_too(pair):
    ours = build_tiny(pair.hf_dir, pair.mesh, SEQ_LEN, torch.bfloat16)
    kept = {name.rpartition(".")[2] for name, param in ours.named_parameters() if param.dtype is torch.float32}
    assert kept == {"a_log", "dt_bias"}
    assert ours(pair.batch).isfinite().all()
