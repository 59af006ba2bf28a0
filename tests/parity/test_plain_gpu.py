"""On a GPU in float32: the plain modules and those of older GPUs against transformers, every family; their attention,
and that a model of each computes with our kernels or without."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.bins import MIXED
from tests.helpers.hardware import requires_gpus
from tests.helpers.parity import KINDS, SEQ_LEN, Pair, assert_logits_equal, assert_losses_and_gradients_equal
from tests.helpers.reference import random_hf_dir
from tests.helpers.single_rank import single_rank
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir
from tests.parity.test_qwen3 import KINDS as TEXT_KINDS
from tests.parity.test_qwen3 import SEQ_LEN as TEXT_SEQ_LEN
from tests.trainer.layers.test_attention_gpu import in_float32
from trainer.layers.attention_cores import FlashAttention
from trainer.layers.segments import PackedSegments

pytestmark = pytest.mark.promise(
    "On GPUs each set of modules differs from float32, and each layout from one GPU, at most twice as much as "
    "transformers' bfloat16 from its float32."
)

MODELS = {
    "qwen3_vl": (random_hf_dir, ("first", "second"), MIXED, 128),
    "qwen3_5": (hybrid_hf_dir, ("first", "second", "third"), KINDS, SEQ_LEN),
    "qwen3_vl_moe": (experts_hf_dir, ("listed", "sparse"), KINDS, SEQ_LEN),
    "qwen3_5_moe": (experts_hf_dir, ("shared", "many"), KINDS, SEQ_LEN),
    "qwen3": (text_hf_dir, ("first", "second"), TEXT_KINDS, TEXT_SEQ_LEN),
}
CASES = [(name, shape) for name, (_, shapes, *_) in MODELS.items() for shape in shapes]


@requires_gpus(1)
@pytest.mark.parametrize("modules", ["plain", "portable"])
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_logits_and_the_gradient_of_every_parameter(name, shape, modules):
    with single_rank() as mesh:
        torch.backends.cuda.matmul.allow_tf32 = False
        directory, _, kinds, seq_len = MODELS[name]
        pair = Pair(directory(shape), mesh, kinds, seq_len, modules)
        assert_logits_equal(pair)
        assert_losses_and_gradients_equal(pair)


@requires_gpus(1)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 16), (16, 8, 128), (16, 16, 72), (8, 2, 256)])
def test_attention_in_float32(heads, groups, dim, causal):
    from types import SimpleNamespace

    from megatron.core.transformer.enums import AttnMaskType

    torch.manual_seed(0)
    bounds = [0, *itertools.accumulate([745, 63, 64, 65, 1, 300])]
    segments = PackedSegments.of(torch.tensor(bounds, dtype=torch.int32, device="cuda"), 745)
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    core = FlashAttention(config=SimpleNamespace(context_parallel_size=1), attn_mask_type=mask)
    inputs = [torch.randn(bounds[-1], n, dim, device="cuda", requires_grad=True) for n in (heads, groups, groups)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted, found = in_float32(*exact, bounds, causal), core(*inputs, packed_seq_params=segments)
    assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(found)
    pairs = zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True
    )
    for ours, theirs in pairs:
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 1e-5
