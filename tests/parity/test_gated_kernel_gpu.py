"""The kernels of gated heads against plain torch in float64, forward and backward."""

import pytest
import torch

from tests.helpers.hardware import requires_gpus

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

EPS = 1e-6
# tokens, groups, queries a group, head dim, rotated pairs, zero-centred: Qwen3.5-2B, 4B and 27B, and odd ones
SHAPES = [
    (4096, 2, 4, 256, 32, True),
    (8192, 4, 4, 256, 32, True),
    (512, 4, 6, 256, 32, True),
    (77, 3, 1, 24, 4, False),
    (1, 1, 2, 16, 8, True),
]


def plain(mixed, cos, sin, heads, norms, zero_centred):
    (groups, queries, dim), pairs = heads, cos.size(1)
    slots = mixed.view(len(mixed), groups, 2 * queries + 2, dim)

    def prepare(x, weight):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight + zero_centred)
        first, second, rest = x.split((pairs, pairs, dim - 2 * pairs), -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s, rest), -1)

    query, key = prepare(slots[:, :, :queries].flatten(1, 2), norms[0]), prepare(slots[:, :, -2], norms[1])
    return query, key, slots[:, :, -1], slots[:, :, queries:-2].flatten(1, 2)


def results(function, dtype, tensors):
    """Outputs and gradients, with the same inputs and upstream gradients for every function."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    outputs = function(*leaves)
    generator = torch.Generator("cuda").manual_seed(2)
    upstream = [torch.randn(x.shape, device="cuda", generator=generator).bfloat16().to(dtype) for x in outputs]
    torch.autograd.backward(outputs, upstream)
    return [*outputs, *(x.grad for x in leaves)]


def assert_close_and_the_same_twice(ours, again, truth) -> None:
    for mine, repeated, true in zip(ours, again, truth, strict=True):
        assert (mine.double() - true).norm() <= 4e-3 * true.norm()  # bf16 rounds by 2e-3 of a value on average
        assert torch.equal(mine, repeated)


@requires_gpus(1)
@pytest.mark.parametrize(("tokens", "groups", "queries", "dim", "pairs", "zero_centred"), SHAPES)
def test_heads_equal_plain_torch(tokens, groups, queries, dim, pairs, zero_centred):
    from trainer.parts.attention.gated_kernel import split_gated_heads

    generator = torch.Generator("cuda").manual_seed(1)
    width = groups * (2 * queries + 2) * dim
    mixed = torch.randn(tokens, width, device="cuda", generator=generator).bfloat16()
    norms = [(1 + 0.2 * torch.randn(dim, device="cuda", generator=generator)).bfloat16() for _ in range(2)]
    angles = 50 * torch.rand(tokens, pairs, device="cuda", generator=generator)
    heads = groups, queries, dim

    def kernel(mixed, *norms):
        return split_gated_heads(mixed, angles.cos(), angles.sin(), heads, norms, EPS, zero_centred=zero_centred)

    def exact(mixed, *norms):
        return plain(mixed, angles.double().cos(), angles.double().sin(), heads, norms, zero_centred)

    ours, again = (results(kernel, torch.bfloat16, [mixed, *norms]) for _ in range(2))
    assert_close_and_the_same_twice(ours, again, results(exact, torch.float64, [mixed, *norms]))


@requires_gpus(1)
def test_gates_equal_plain_torch():
    from trainer.parts.attention.gated_kernel import gated

    generator = torch.Generator("cuda").manual_seed(1)
    x, gate = (torch.randn(777, 1, 96, device="cuda", generator=generator).bfloat16() for _ in range(2))

    def both(function, dtype):
        return results(lambda x, gate: [function(x, gate.view(777, 6, 16))], dtype, [x, gate])

    exact = both(lambda x, gate: x * gate.sigmoid().view_as(x), torch.float64)
    assert_close_and_the_same_twice(*(both(gated, torch.bfloat16) for _ in range(2)), exact)
