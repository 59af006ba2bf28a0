"""The kernel from the projection to queries, keys and values against plain torch in float64, forward and backward."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from tests.helpers.hardware import requires_gpus

EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer; `pairs` of components are rotated."""

    tokens: int
    groups: int
    per_group: int
    dim: int
    pairs: int
    norm: bool = True
    gated: bool = False
    zero_centred: bool = False


SHAPES = {
    "Qwen3-VL-2B": Heads(8192, 8, 2, 128, 64),
    "Qwen3-VL-4B": Heads(4096, 8, 4, 128, 64),
    "vision of 2B": Heads(25180, 16, 1, 64, 32, norm=False),
    "vision of 8B": Heads(5000, 16, 1, 72, 36, norm=False),
    "Qwen3.5-2B": Heads(4096, 2, 4, 256, 32, gated=True, zero_centred=True),
    "Qwen3.5-27B": Heads(512, 4, 6, 256, 32, gated=True, zero_centred=True),
    "odd": Heads(77, 2, 3, 12, 6),
    "one token": Heads(1, 3, 1, 16, 8, norm=False),
    "odd and gated": Heads(77, 3, 1, 24, 4, gated=True),
}


def plain(shape: Heads, mixed, cos, sin, q_weight=None, k_weight=None):
    heads = mixed.view(len(mixed), shape.groups, -1, shape.dim)
    query, key, value = heads[:, :, : shape.per_group].flatten(1, 2), heads[:, :, -2], heads[:, :, -1]

    def prepare(x, weight):
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight + shape.zero_centred)
        first, second, rest = x.split((shape.pairs, shape.pairs, shape.dim - 2 * shape.pairs), -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s, rest), -1)

    gates = heads[:, :, shape.per_group : -2].flatten(1, 2)
    return prepare(query, q_weight), prepare(key, k_weight), value, *([gates] if shape.gated else [])


def results(function, dtype, tensors, angles):
    """Return outputs and gradients, for the same inputs and upstream gradients."""
    mixed, *weights = (x.to(dtype, copy=True).requires_grad_() for x in tensors)
    outputs = function(mixed, angles.cos(), angles.sin(), *weights)
    generator = torch.Generator("cuda").manual_seed(2)
    upstream = [torch.randn(x.shape, device="cuda", generator=generator).bfloat16().to(dtype) for x in outputs]
    torch.autograd.backward(outputs, upstream)
    return [*outputs, mixed.grad, *(weight.grad for weight in weights)]


def assert_close_and_the_same_twice(ours, again, truth) -> None:
    for mine, repeated, true in zip(ours, again, truth, strict=True):
        assert (mine.double() - true).norm() <= 4e-3 * true.norm()  # bf16 rounds by 2e-3 of a value on average
        assert torch.equal(mine, repeated)


@requires_gpus(1)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_plain_torch(name):
    from trainer.parts.attention.qkv_kernel import split_norm_rotate

    shape, generator = SHAPES[name], torch.Generator("cuda").manual_seed(1)
    width = shape.groups * (shape.per_group * (1 + shape.gated) + 2) * shape.dim
    mixed = torch.randn(shape.tokens, width, device="cuda", generator=generator).bfloat16()
    weights = [(1 + 0.2 * torch.randn(shape.dim, device="cuda", generator=generator)).bfloat16() for _ in range(2)]
    tensors = [mixed, *(weights if shape.norm else [])]
    angles = 50 * torch.rand(shape.tokens, shape.pairs, device="cuda", generator=generator)

    def kernel(mixed, cos, sin, *weights):
        sizes = shape.groups, shape.per_group, shape.dim
        weights = weights or (None, None)
        return split_norm_rotate(mixed, cos, sin, *sizes, *weights, EPS, zero_centred=shape.zero_centred)

    ours, again = (results(kernel, torch.bfloat16, tensors, angles) for _ in range(2))
    assert_close_and_the_same_twice(
        ours, again, results(partial(plain, shape), torch.float64, tensors, angles.double())
    )


@requires_gpus(1)
def test_gates_equal_plain_torch():
    from trainer.parts.attention.gate_kernel import gated

    generator = torch.Generator("cuda").manual_seed(1)
    x, gate, grad = (torch.randn(777, 1, 96, device="cuda", generator=generator).bfloat16() for _ in range(3))

    def both(function, dtype):
        inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, gate.view(777, 6, 16))]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]

    truth = both(lambda x, gate: x * gate.sigmoid().view_as(x), torch.float64)
    assert_close_and_the_same_twice(*(both(gated, torch.bfloat16) for _ in range(2)), truth)
