"""The plain gated delta net: against the recurrence token by token, segments against each alone."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from trainer.data.packed_chunks import PackedChunks
from trainer.parts.delta.rule import plain
from trainer.parts.delta.rule.gated_delta_net import DeltaHeads, DeltaParameters, gated_delta_net

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

BOUNDS = (0, 1, 64, 128, 193, 320)  # 1, 63, 64, 65 and 127 tokens


def drawn_inputs(key_heads: int, value_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, g, beta of BOUNDS."""
    torch.manual_seed(0)
    tokens = BOUNDS[-1]
    q, k = (F.normalize(torch.randn(tokens, key_heads, dim, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(tokens, value_heads, dim, dtype=dtype)
    g = -0.3 * torch.rand(tokens, value_heads, dtype=dtype)
    beta = torch.rand(tokens, value_heads, dtype=dtype)
    return [x.requires_grad_() for x in (q * dim**-0.5, k, v, g, beta)]


def by_token(q, k, v, g, beta, bounds: tuple[int, ...]) -> torch.Tensor:
    """S <- exp(g) S; S <- S + k (beta (v - k S)); o = q S, one token after another."""
    repeat = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    outs = []
    for begin, end in itertools.pairwise(bounds):
        state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        for t in range(begin, end):
            state = state * g[t].exp()[:, None, None]
            new = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t][:, None]
            state = state + k[t][:, :, None] * new[:, None, :]
            outs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outs)


@pytest.mark.parametrize("value_heads", [1, 3])
def test_chunks_are_the_recurrence(value_heads):
    inputs = drawn_inputs(1, value_heads, 16, torch.float64)
    o, expected = plain.gated_delta_rule(*inputs, PackedChunks.of(BOUNDS)), by_token(*inputs, BOUNDS)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-13)
    gradient = torch.randn_like(o)
    for got, right in zip(*(torch.autograd.grad(x, inputs, gradient) for x in (o, expected))):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-12)


def layer_of(tokens: slice, bounds: tuple[int, ...], inputs: list[torch.Tensor], heads: DeltaHeads) -> torch.Tensor:
    return gated_delta_net(
        *(x[tokens] for x in inputs[:4]), DeltaParameters(*inputs[4:]), heads, PackedChunks.of(bounds)
    )


def layer_inputs(heads: DeltaHeads) -> list[torch.Tensor]:
    torch.manual_seed(1)
    tokens, channels, value = BOUNDS[-1], sum(heads.widths), heads.value
    per_token = [torch.randn(tokens, n) for n in (channels, heads.widths[2], value, value)]
    return [*per_token, torch.randn(channels, 4), torch.randn(value), torch.randn(value), torch.randn(heads.dim)]


def test_segments_of_a_bin_are_each_alone_to_the_bit():
    heads = DeltaHeads(2, 4, 16)
    inputs = layer_inputs(heads)
    together = layer_of(slice(None), BOUNDS, inputs, heads)
    for begin, end in itertools.pairwise(BOUNDS):
        alone = layer_of(slice(begin, end), (0, end - begin), inputs, heads)
        assert torch.equal(together[begin:end], alone)


def test_the_convolution_is_torchs_for_a_segment_alone():
    torch.manual_seed(2)
    mixed, weight = torch.randn(7, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    expected = F.silu(F.conv1d(F.pad(mixed.T, (3, 0)), weight.unsqueeze(1), groups=6).T)
    torch.testing.assert_close(plain.convolve(mixed, weight, PackedChunks.of((0, 7))), expected)
