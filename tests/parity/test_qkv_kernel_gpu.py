"""The kernel from the projection to queries, keys and values against plain torch in float64, forward and backward."""

import pytest
import torch

from tests.helpers.hardware import requires_gpus

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

EPS = 1e-6
# tokens, groups, queries a group, head dim, normalised: Qwen3-VL-2B and 4B, their vision, that of 8B, and odd ones
SHAPES = [
    (8192, 8, 2, 128, True),
    (4096, 8, 4, 128, True),
    (25180, 16, 1, 64, False),
    (5000, 16, 1, 72, False),
    (77, 2, 3, 12, True),
    (1, 3, 1, 16, False),
]


def plain(mixed, cos, sin, groups, head_dim, q_weight, k_weight):
    heads = mixed.view(len(mixed), groups, -1, head_dim)
    query, key, value = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1]

    def prepare(x, weight):
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
        first, second = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    return prepare(query, q_weight), prepare(key, k_weight), value


def results(function, dtype, tensors, angles, groups, head_dim):
    """Outputs and gradients, the same inputs and upstream gradients for every function."""
    leaves = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in tensors]
    mixed, q_weight, k_weight = leaves
    outputs = function(mixed, angles.cos(), angles.sin(), groups, head_dim, q_weight, k_weight)
    generator = torch.Generator("cuda").manual_seed(2)
    upstream = [torch.randn(x.shape, device="cuda", generator=generator).bfloat16().to(dtype) for x in outputs]
    torch.autograd.backward(outputs, upstream)
    return [*outputs, *(x.grad for x in leaves if x is not None)]


@requires_gpus(1)
@pytest.mark.parametrize(("tokens", "groups", "queries", "head_dim", "norm"), SHAPES)
def test_equals_plain_torch(tokens, groups, queries, head_dim, norm):
    from trainer.parts.attention.qkv_kernel import split_norm_rotate

    generator = torch.Generator("cuda").manual_seed(1)
    mixed = torch.randn(tokens, groups * (queries + 2) * head_dim, device="cuda", generator=generator).bfloat16()
    weights = [(1 + 0.2 * torch.randn(head_dim, device="cuda", generator=generator)).bfloat16() for _ in range(2)]
    tensors = [mixed, *(weights if norm else (None, None))]
    angles = 50 * torch.rand(tokens, head_dim // 2, device="cuda", generator=generator)

    def kernel(*args):
        return split_norm_rotate(*args, EPS)

    ours = results(kernel, torch.bfloat16, tensors, angles, groups, head_dim)
    again = results(kernel, torch.bfloat16, tensors, angles, groups, head_dim)
    truth = results(plain, torch.float64, tensors, angles.double(), groups, head_dim)
    for mine, repeated, true in zip(ours, again, truth, strict=True):
        assert (mine.double() - true).norm() <= 4e-3 * true.norm()  # bf16 rounds by 2e-3 of a value on average
        assert torch.equal(mine, repeated)
