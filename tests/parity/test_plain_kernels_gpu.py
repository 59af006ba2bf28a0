"""The kernels of the plain modules against float64, and their products' gradients, on a GPU."""

import pytest
import torch

from tests.helpers.hardware import requires_gpus
from trainer.layers.module_set import TorchSwiglu
from trainer.layers.vocabulary import add_product

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

BOUND = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def distances(fast, exact, inputs: list[torch.Tensor]) -> list[float]:
    """Return the relative errors of the output and of each gradient against float64."""
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    ours, theirs = fast(*inputs), exact(*doubles)
    grad = torch.randn_like(ours)
    found = [ours, *torch.autograd.grad(ours, inputs, grad)]
    wanted = [theirs, *torch.autograd.grad(theirs, doubles, grad.double())]
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def exact_norm(x: torch.Tensor, weight: torch.Tensor, centre: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (weight + centre)


@requires_gpus(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(1000, 1, 2048), (7, 1, 5120), (333, 16, 256), (5, 96), (4097, 40)])
def test_rms_norm(shape, centred, dtype):
    from trainer.layers.kernels import rms_norm

    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    inputs = [torch.randn(*shape, **like), (0.1 * torch.randn(shape[-1], device="cuda")).to(dtype).requires_grad_()]

    def fast(x, weight):
        return rms_norm(x, weight, 1e-6, zero_centred=centred)

    assert max(distances(fast, lambda x, w: exact_norm(x, w, float(centred)), inputs)) < BOUND[dtype]


@requires_gpus(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(1000, 1, 2560), (7, 1, 5120), (5, 96)])
def test_sum_and_norm(shape, centred, dtype):
    """Both have the bits of a sum and a norm one by one; the gradient of the sum is that of both uses."""
    from trainer.layers.kernels import rms_norm, sum_and_norm

    torch.manual_seed(0)
    x, delta, d_total, d_normed = (torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(4))
    weight = (0.1 * torch.randn(shape[-1], device="cuda")).to(dtype).requires_grad_()
    inputs = [x.requires_grad_(), delta.requires_grad_(), weight]
    total, normed = sum_and_norm(*inputs, 1e-6, zero_centred=centred)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6, zero_centred=centred))
    alone, again = sum_and_norm(total.detach(), None, weight, 1e-6, zero_centred=centred)
    assert torch.equal(alone, total)
    assert torch.equal(again, normed)

    found = torch.autograd.grad([total, normed], inputs, [d_total, d_normed])
    assert torch.equal(found[0], found[1])
    exact = [total.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    outputs = [exact[0] * 1, exact_norm(*exact, float(centred))]
    wanted = torch.autograd.grad(outputs, exact, [d_total.double(), d_normed.double()])
    for ours, truth in zip(found[1:], wanted, strict=True):
        assert float((ours.double() - truth).norm() / truth.norm()) < BOUND[dtype]


@requires_gpus(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1000, 1, 2 * 6144), (3, 2 * 40), (129, 1, 2 * 1025)])
def test_swiglu(shape, dtype):
    from trainer.layers.kernels import swiglu

    torch.manual_seed(0)
    inputs = [torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)]
    assert max(distances(swiglu, TorchSwiglu(config=None), inputs)) < BOUND[dtype]


@requires_gpus(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_in_float32(dtype):
    torch.manual_seed(0)
    grad, x = (torch.randn(4096, n, device="cuda", dtype=dtype) for n in (384, 640))
    buffer = torch.randn(384, 640, device="cuda")
    wanted = buffer.double() + grad.double().t() @ x.double()
    add_product(buffer, grad, x)
    assert float((buffer.double() - wanted).norm() / wanted.norm()) < 1e-5
