"""Samples packed into one bin: the tokens that each of them sees, and its positions."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.testing import assert_close

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import MIXED, Kind, make_samples
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_config, hybrid_hf_dir
from tests.museum.fault import fault_seen
from trainer.data.micro_batch import MicroBatch, geometry_of, make_micro_batch
from trainer.data.packed_chunks import PackedChunks
from trainer.layers.segments import mrope_angles
from trainer.parts.delta.rule import plain

pytestmark = pytest.mark.promise(
    "athanor has none of the museum's published faults, and each test fails where the fault is put in."
)

SEQ_LEN = 192
KINDS = [Kind(70), *MIXED]


@pytest.fixture(scope="module")
def packed():
    """Return a model with attention and with layers of the delta rule, and a bin of samples of every kind."""
    with single_rank() as mesh:
        model = build_tiny(hybrid_hf_dir(), mesh, SEQ_LEN)
        geometry = geometry_of(model.shape)
        samples = make_samples(KINDS, geometry, range(20, 300))
        yield SimpleNamespace(model=model, geometry=geometry, samples=samples)


def losses_of(packed, samples: list[TokenizedSample], **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the losses of each sample's loss tokens in one bin. `changes` replaces fields of the micro batch."""
    batch = dataclasses.replace(make_micro_batch(samples, packed.geometry, SEQ_LEN), **changes)
    with torch.no_grad():
        return dict(zip(batch.keys, packed.model(batch).split(batch.loss_lengths), strict=True))


def check_apart(packed) -> None:
    """Check that another first sample of the same length changes no bit of the other samples' losses."""
    first = packed.samples[0]
    other = dataclasses.replace(
        make_samples(KINDS, packed.geometry, range(20, 300), seed=7)[0], key=first.key, loss_mask=first.loss_mask
    )
    before, after = losses_of(packed, packed.samples), losses_of(packed, [other, *packed.samples[1:]])
    assert all(torch.equal(after[sample.key], before[sample.key]) for sample in packed.samples[1:])


def check_as_alone(packed, **changes: torch.Tensor) -> None:
    """Check that each sample's losses in the bin are the losses that it has alone."""
    together = losses_of(packed, packed.samples, **changes)
    for sample in packed.samples:
        assert_close(together[sample.key], losses_of(packed, [sample])[sample.key], atol=1e-5, rtol=1e-5)


def one_segment(chunks: PackedChunks) -> PackedChunks:
    return PackedChunks.of([0, sum(chunks.lengths())])


def test_the_convolution_ends_with_a_sample(packed, monkeypatch):
    """The short convolution before the delta rule crossed the bounds of samples, so three tokens saw the neighbouring
    sample.

    https://github.com/EvolvingLMMs-Lab/lmms-engine/pull/167 https://github.com/modelscope/ms-swift/issues/9618
    """
    check_apart(packed)
    convolve = plain.convolve
    monkeypatch.setattr(plain, "convolve", lambda *inputs: convolve(*inputs[:-1], one_segment(inputs[-1])))
    with fault_seen():
        check_apart(packed)


def test_positions_of_a_packed_image_are_its_own(packed):
    """A packed row got the positions of plain text, 0 to n, although an image has rows and columns.

    https://github.com/NVIDIA-NeMo/Automodel/pull/2172 https://github.com/hiyouga/LlamaFactory/pull/7754
    """
    check_as_alone(packed)
    with fault_seen():
        check_as_alone(packed, position_ids=torch.arange(SEQ_LEN).expand(3, -1))


def test_positions_begin_again_with_each_sample(packed):
    """The positions of a packed row were those of one long sample, so they ran on over the ends of samples.

    https://github.com/radixark/miles/pull/1272
    """

    def check(position_ids: torch.Tensor) -> None:
        for sample, own in zip(packed.samples, position_ids.split(batch.sample_lengths, 1)):
            assert torch.equal(own, positions_of([sample])[:, : own.size(1)])

    def positions_of(samples: list[TokenizedSample]) -> torch.Tensor:
        return make_micro_batch(samples, packed.geometry, SEQ_LEN).position_ids

    batch = make_micro_batch(packed.samples, packed.geometry, SEQ_LEN)
    check(batch.position_ids[:, : sum(batch.sample_lengths)])
    names = ("input_ids", "loss_mask", "image_grid_thw", "is_video", "patches", "later_patches")
    one = {name: np.concatenate([getattr(sample, name) for sample in packed.samples]) for name in names}
    long = dataclasses.replace(packed.samples[0], **one)
    with fault_seen():
        check(positions_of([long])[:, : sum(batch.sample_lengths)])


def mrope_reference() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return transformers' rotary embedding, and (3, T) positions with three different rows, some of them very
    large."""
    config = transformers.AutoConfig.for_model(**hybrid_config()).text_config
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(4000, (3, 64), generator=generator)
    module = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(config)
    return module, positions


def check_angles(angles_of) -> None:
    rotary, positions = mrope_reference()
    cos, sin = rotary(torch.zeros(1), positions[:, None])
    angles = angles_of(positions).float()
    assert_close(angles.cos().tile(2), cos[0], atol=1e-3, rtol=0)
    assert_close(angles.sin().tile(2), sin[0], atol=1e-3, rtol=0)


def test_angles_are_computed_in_float32(packed):
    """Angles were computed in bfloat16, which has no odd numbers above 256, so distant positions became equal.

    https://github.com/huggingface/transformers/pull/29285 https://github.com/EleutherAI/gpt-neox/issues/1003
    """
    shape = packed.model.shape.language
    check_angles(partial(mrope_angles, shape=shape))
    with fault_seen():
        check_angles(lambda positions: mrope_angles(positions.bfloat16(), shape))


def test_every_row_of_a_bin_is_written(packed):
    """Rows after the last sample belonged to no segment, so that kernels left NaN in them and in the gradients.

    https://github.com/Dao-AILab/flash-attention/pull/2324 https://github.com/pytorch/pytorch/pull/188933
    """
    batch = make_micro_batch(packed.samples[:2], packed.geometry, SEQ_LEN)
    assert sum(batch.sample_lengths) < SEQ_LEN

    def check(batch: MicroBatch) -> None:
        """Check with a kernel that writes only the rows of its segments. Zero times NaN is NaN in the weight's
        gradient."""
        rows = torch.full((SEQ_LEN, 4), torch.nan)
        for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:]):
            rows[start:stop] = 1.0
        assert (rows.T @ torch.zeros(SEQ_LEN, 4)).isfinite().all()

    check(batch)
    with fault_seen():
        check(dataclasses.replace(batch, cu_seqlens=batch.cu_seqlens[:-1]))
