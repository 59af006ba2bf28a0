"""Cores of attention on a GPU against float32, where all fresh memory holds NaN: a kernel that reads what it has not
written shows."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.helpers.hardware import ON_CUDA, requires_gpus
from trainer.layers.modules.choice import choose_modules
from trainer.layers.segments import PackedSegments

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

BINS = {
    "shapes of a bin": [745] * 3 + [63, 64, 65, 1, 300, 4, 128, 1, 1187],
    "one sample": [4096],
    "one token each": [1] * 64,
    "745": [745],
    "5,000 beside 1": [5000, 1],
}
CAUSAL, FULL = AttnMaskType.causal, AttnMaskType.no_mask
BF16_GRADIENTS = 5e-3  # relative distance of bfloat16 gradients from float32's; 2.4e-3 to 3.1e-3 was measured


@pytest.fixture
def dirty_memory(monkeypatch) -> Iterator[None]:
    """New tensors are full of NaN, as torch does it for its deterministic algorithms."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def in_float32(q, k, v, bounds: list[int], causal: bool) -> torch.Tensor:
    outs = []
    for start, stop in itertools.pairwise(bounds):
        parts = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True)
        outs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outs)


def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.detach().float() - exact.detach()).norm() / exact.detach().norm().clamp(min=1e-6))


@requires_gpus(1)
@pytest.mark.parametrize("modules", [*ON_CUDA[:2], "flash 4"])
@pytest.mark.parametrize("name", BINS)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "mask"),
    [
        (16, 8, 128, CAUSAL),
        (8, 2, 256, CAUSAL),
        (16, 4, 256, CAUSAL),
        (24, 4, 256, CAUSAL),
        (16, 16, 64, FULL),
        (16, 16, 72, FULL),
    ],
)
def test_attention_and_its_gradients_are_those_of_float32(name, heads, groups, dim, mask, modules, dirty_memory):
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=dim,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    if modules == "flash 4":
        kind = pytest.importorskip("trainer.layers.modules.flash_4", exc_type=ImportError).FlashAttention4
    else:
        kind = choose_modules(modules, torch.device("cuda", 0)).core_attention(dim, causal=mask == CAUSAL)
    groups_of_ranks = ProcessGroupCollection(tp=None, cp=None)
    core = kind(
        config=config, layer_number=1, attn_mask_type=mask, attention_type="self", pg_collection=groups_of_ranks
    )
    lengths = BINS[name]
    bounds = [0, *itertools.accumulate(lengths)]
    segments = PackedSegments.of(torch.tensor(bounds, dtype=torch.int32, device="cuda"), max(lengths))
    like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(bounds[-1], n, dim, **like) for n in (heads, groups, groups)]
    exact = [x.detach().float().requires_grad_() for x in inputs]
    wanted = in_float32(*exact, bounds, mask == CAUSAL)
    grad = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, exact, grad)
    for _ in range(2):  # the first call of Transformer Engine's goes another way
        out = core(*inputs, None, attn_mask_type=mask, packed_seq_params=segments)
        grads = torch.autograd.grad(out, inputs, grad.bfloat16())
        assert distance(out, wanted) < BF16_GRADIENTS
        for ours, exact_grad in zip(grads, wanted_grads, strict=True):
            assert distance(ours, exact_grad) < BF16_GRADIENTS or exact_grad.norm() < 1e-3 * grad.norm()
            assert bool(ours.isfinite().all())
