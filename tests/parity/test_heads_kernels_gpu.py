"""The kernels from a projection to heads, with and without gates, against plain torch in float64, forward and
backward."""

import pytest
import torch

from tests.helpers.hardware import requires_gpus

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

EPS = 1e-6
# tokens, groups, queries a group, head dim, normalised: Qwen3-VL-2B and 4B, their vision, that of 8B, and odd ones
PLAIN = [
    (8192, 8, 2, 128, True),
    (4096, 8, 4, 128, True),
    (25180, 16, 1, 64, False),
    (5000, 16, 1, 72, False),
    (77, 2, 3, 12, True),
    (1, 3, 1, 16, False),
]
# tokens, groups, queries a group, head dim, rotated pairs, zero-centred: Qwen3.5-2B, 4B and 27B, and odd ones
GATED = [
    (4096, 2, 4, 256, 32, True),
    (8192, 4, 4, 256, 32, True),
    (512, 4, 6, 256, 32, True),
    (77, 3, 1, 24, 4, False),
    (1, 1, 2, 16, 8, True),
]


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def draw_norms(dim: int) -> list[torch.Tensor]:
    return [(1 + 0.2 * draw(dim, seed=seed).float()).bfloat16() for seed in (2, 3)]


def draw_angles(tokens: int, pairs: int) -> torch.Tensor:
    return 50 * torch.rand(tokens, pairs, device="cuda", generator=torch.Generator("cuda").manual_seed(4))


def prepared(x, weight, angles, zero_centred=False):
    """Normalise heads, and rotate their first numbers, in float64."""
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight + zero_centred)
    pairs = angles.size(1)
    first, second, rest = x.split((pairs, pairs, x.size(-1) - 2 * pairs), -1)
    c, s = angles.double().cos()[:, None], angles.double().sin()[:, None]
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1)


def results(function, dtype, tensors):
    """Outputs and gradients, with the same inputs and upstream gradients for every function."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    outputs = function(*leaves)
    torch.autograd.backward(outputs, [draw(*x.shape, seed=5 + place).to(dtype) for place, x in enumerate(outputs)])
    return [*outputs, *(x.grad for x in leaves)]


def assert_equals(kernel, exact, tensors) -> None:
    """Assert that the kernel gives float64's numbers rounded to bfloat16, and the same bits twice."""
    ours, again = (results(kernel, torch.bfloat16, tensors) for _ in range(2))
    for mine, repeated, true in zip(ours, again, results(exact, torch.float64, tensors), strict=True):
        assert (mine.double() - true).norm() <= 4e-3 * true.norm()  # bf16 rounds by 2e-3 of a value on average
        assert torch.equal(mine, repeated)


@requires_gpus(1)
@pytest.mark.parametrize(("tokens", "groups", "queries", "dim", "norm"), PLAIN)
def test_heads_equal_plain_torch(tokens, groups, queries, dim, norm):
    from trainer.parts.attention.qkv_kernel import split_norm_rotate

    angles = draw_angles(tokens, dim // 2)

    def kernel(mixed, q_weight=None, k_weight=None):
        return split_norm_rotate(mixed, angles.cos(), angles.sin(), groups, dim, q_weight, k_weight, EPS)

    def exact(mixed, q_weight=None, k_weight=None):
        slots = mixed.view(tokens, groups, -1, dim)
        query, key = prepared(slots[:, :, :-2].flatten(1, 2), q_weight, angles), slots[:, :, -2]
        return query, prepared(key, k_weight, angles), slots[:, :, -1]

    assert_equals(kernel, exact, [draw(tokens, groups * (queries + 2) * dim), *(draw_norms(dim) if norm else ())])


@requires_gpus(1)
@pytest.mark.parametrize(("tokens", "groups", "queries", "dim", "pairs", "zero_centred"), GATED)
def test_gated_heads_equal_plain_torch(tokens, groups, queries, dim, pairs, zero_centred):
    from trainer.parts.attention.gated_kernel import split_gated_heads

    angles, heads = draw_angles(tokens, pairs), (groups, queries, dim)

    def kernel(mixed, *norms):
        return split_gated_heads(mixed, angles.cos(), angles.sin(), heads, norms, EPS, zero_centred=zero_centred)

    def exact(mixed, q_weight, k_weight):
        slots = mixed.view(tokens, groups, 2 * queries + 2, dim)
        query = prepared(slots[:, :, :queries].flatten(1, 2), q_weight, angles, zero_centred)
        key = prepared(slots[:, :, -2], k_weight, angles, zero_centred)
        return query, key, slots[:, :, -1], slots[:, :, queries:-2].flatten(1, 2)

    assert_equals(kernel, exact, [draw(tokens, groups * (2 * queries + 2) * dim), *draw_norms(dim)])


@requires_gpus(1)
def test_gates_equal_plain_torch():
    from trainer.parts.attention.gated_kernel import gated

    def kernel(x, gate):
        return [gated(x, gate.view(777, 6, 16))]

    def exact(x, gate):
        return [x * gate.sigmoid()]

    assert_equals(kernel, exact, [draw(777, 1, 96), draw(777, 1, 96, seed=2)])
