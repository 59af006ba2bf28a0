"""The gradients of the vision encoder's spans against autograd, in float64, with torch in place of the kernels."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from trainer.layers.segments import Rotation
from trainer.parts.vision import spans

D, INNER, HEADS, ROWS, EPS = 8, 12, 2, 5, 1e-6


class Heads(NamedTuple):
    groups: int
    per_group: int
    head_dim: int
    width: int


def gelu(x):
    return F.gelu(x, approximate="tanh")


def gradient(function, inputs, upstream):
    """Return autograd's gradients of a stand-in."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*inputs), inputs, upstream)


def split(mixed, cos, sin):
    query, key, value = mixed.view(len(mixed), HEADS, 3, -1).unbind(2)
    turn = Rotation(cos, sin).rotate
    return turn(query.float()).double(), turn(key.float()).double(), value


def normed(x, delta, delta_bias, weight, bias, eps):
    x = x if delta is None else x + delta + delta_bias
    return x, F.layer_norm(x, (D,), weight, bias, eps), torch.zeros(())


def norm_gradients(d_out, d_normed, out, statistics, weight, bias):
    d_x, d_weight, d_bias = gradient(lambda *a: F.layer_norm(a[0], (D,), *a[1:], EPS), (out, weight, weight), d_normed)
    return d_x + d_out, F.layer_norm(out, (D,), weight, bias, EPS), (d_weight, d_bias, (d_x + d_out).sum(0))


def of_weight(grad, x, bias=None, out=None):
    return grad.t() @ x, None if bias is None else grad.sum(0)


STAND_INS = {
    "Heads": Heads,
    "product": lambda x, weight, bias=None: F.linear(x, weight, bias),
    "product_gradient": lambda grad, weight: grad @ weight,
    "gelu_product": lambda x, weight, bias: (gelu(F.linear(x, weight, bias)), F.linear(x, weight, bias)),
    "gelu_product_gradient": lambda grad, weight, before: gradient(gelu, (before,), grad @ weight)[0],
    "weight_gradient": of_weight,
    "add_norm": normed,
    "add_norm_gradients": norm_gradients,
    "split_forward": lambda mixed, cos, sin, heads: split(mixed, cos, sin),
    "split_gradients": lambda grads, cos, sin, heads: both(
        gradient(lambda mixed: split(mixed, cos, sin), (torch.zeros(ROWS, 3 * D).double(),), grads)[0]
    ),
}


def both(grad):
    return grad, grad.sum(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).mul_(0.3).requires_grad_()


def linear(rows: int, columns: int) -> SimpleNamespace:
    return SimpleNamespace(weight=draw(rows, columns), bias=draw(rows), fuse_wgrad_accumulation=False)


def norm() -> SimpleNamespace:
    return SimpleNamespace(weight=draw(D), bias=draw(D))


def layer() -> SimpleNamespace:
    attention = SimpleNamespace(
        linear_qkv=linear(3 * D, D),
        linear_proj=linear(D, D),
        core_attention=None,
        num_query_groups_per_partition=HEADS,
        num_attention_heads_per_partition=HEADS,
        hidden_size_per_attention_head=D // HEADS,
    )
    mlp = SimpleNamespace(linear_fc1=linear(INNER, D), linear_fc2=linear(D, INNER))
    config = SimpleNamespace(layernorm_epsilon=EPS)
    norms = {"input_layernorm": norm(), "pre_mlp_layernorm": norm()}
    return SimpleNamespace(self_attention=attention, mlp=mlp, config=config, attend=attend, **norms)


def attend(query, key, value, segments):
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(0, 1).reshape(ROWS, 1, D)


def applied(x, linear, norm=None):
    if norm is not None:
        x = F.layer_norm(x, (D,), norm.weight, norm.bias, EPS)
    return F.linear(x, linear.weight, linear.bias)


def by_autograd(layers, hidden, rotation):
    for layer in layers:
        qkv = split(applied(hidden[:, 0], layer.self_attention.linear_qkv, layer.input_layernorm), *rotation)
        hidden = hidden + applied(attend(*qkv, None), layer.self_attention.linear_proj)
        hidden = hidden + applied(
            gelu(applied(hidden, layer.mlp.linear_fc1, layer.pre_mlp_layernorm)), layer.mlp.linear_fc2
        )
        yield hidden


def test_all_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch):
    """Also where each layer's output is used, as deepstack does, and where a weight is frozen."""
    for name, stand_in in STAND_INS.items():
        monkeypatch.setattr(spans, name, stand_in, raising=False)
    torch.manual_seed(1)
    layers = [layer(), layer()]
    layers[1].mlp.linear_fc2.weight.requires_grad_(False)
    modules = [x for one in layers for part in (one, one.self_attention, one.mlp) for x in vars(part).values()]
    params = [p for x in modules if hasattr(x, "weight") for p in (x.weight, x.bias)]
    params = [param for param in params if param.requires_grad]
    hidden = torch.randn(ROWS, 1, D, dtype=torch.float64).requires_grad_()
    rotation = Rotation.of(torch.randn(ROWS, D // HEADS // 2, dtype=torch.float64))
    upstream = [torch.randn(ROWS, 1, D, dtype=torch.float64) for _ in layers]
    wanted, joined = (
        list(by_autograd(layers, hidden, rotation)),
        list(spans.joined_layers(layers, hidden, rotation, None)),
    )
    torch.testing.assert_close(joined, wanted)
    truth, ours = (torch.autograd.grad(outputs, [hidden, *params], upstream) for outputs in (wanted, joined))
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)  # the rotation computes in float32
