"""`not_kept` saves less for the backward pass, and the gradients stay the same bits."""

import gc
from weakref import ref

import pytest
import torch
from torch.utils._pytree import tree_map

from trainer.layers.recompute import not_kept, recomputed

pytestmark = pytest.mark.promise(
    "`athanor plan` counts parameters, FLOPs and what adapters and delta layers keep exactly, and GPU memory "
    "within 8% of measured peaks."
)
WEIGHT = torch.nn.Parameter(torch.arange(12.0).view(4, 3) / 10)


class Quantised(torch.Tensor):
    """A tensor as Transformer Engine's quantised ones are: its numbers are in another tensor, its storage in none."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> "Quantised":
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = tree_map(lambda x: x.numbers if isinstance(x, Quantised) else x, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


class Product(torch.autograd.Function):
    """A matrix product that keeps its input and a quantised copy of its weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, Quantised(weight.detach()), weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, quantised, weight = ctx.saved_tensors
        assert weight.requires_grad and weight.data_ptr() == WEIGHT.data_ptr()
        assert type(quantised) is Quantised
        return grad @ (quantised + 0), grad.T @ x


def computed(inside, x):
    """The loss of a product of an activation, whose result is kept if `inside` does nothing; and a reference to it."""
    act = torch.tanh(x)
    with inside(act, torch.tanh, x):
        out = Product.apply(act, WEIGHT) + Product.apply(act.view(1, *act.shape)[0], WEIGHT)
    return out.square().sum(), ref(act)


class Kept:
    """In place of `not_kept`: everything is kept."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def gradients(inside):
    x = torch.linspace(-1, 1, 15).view(5, 3).requires_grad_()
    loss, act = computed(inside, x)
    gc.collect()
    WEIGHT.grad = None
    is_alive = act() is not None
    loss.backward()
    return is_alive, x.grad, WEIGHT.grad


def test_the_result_is_not_kept_and_the_gradients_are_the_same_bits():
    (kept, *expected), (not_alive, *given) = gradients(Kept), gradients(not_kept)
    assert kept and not not_alive
    assert all(map(torch.equal, expected, given))


def test_inside_a_module_that_is_computed_again_as_a_whole_it_does_nothing():
    calls = []

    def module(x):
        def counted(x):
            calls.append(1)
            return torch.tanh(x)

        act = torch.tanh(x)
        with not_kept(act, counted, x):
            return Product.apply(act, WEIGHT)

    x = torch.ones(2, 3, requires_grad=True)
    recomputed(module, x).sum().backward()
    assert x.grad is not None and not calls
