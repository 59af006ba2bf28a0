"""The MLP with its GELU in the matrix products against megatron-core's own way through the same weights, and both
against float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.hardware import requires_engine, requires_gpus
from tests.helpers.single_rank import single_rank

# Qwen3-VL's vision encoders: of 2B and 4B, of 8B
SHAPES = [(1024, 4096), (1152, 4304)]


def build(hidden: int, inner: int, tp_group):
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from trainer.layers.modules.engine import NormColumnLinear, RowLinear

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=inner,
        num_attention_heads=16,
        normalization="LayerNorm",
        layernorm_epsilon=1e-6,
        activation_func=partial(F.gelu, approximate="tanh"),
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    modules = MLPSubmodules(linear_fc1=NormColumnLinear, linear_fc2=RowLinear)
    mlp = MLP(config, modules, tp_group=tp_group).cuda()
    generator = torch.Generator("cuda").manual_seed(3)
    with torch.no_grad():
        for name, param in mlp.named_parameters():
            noise = torch.randn(param.shape, device="cuda", generator=generator)
            param.copy_(1 + 0.2 * noise if name.endswith("layer_norm_weight") else 0.04 * noise)
    return mlp


def exact(mlp, hidden: torch.Tensor) -> torch.Tensor:
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    weights = (fc1.layer_norm_weight, fc1.layer_norm_bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias)
    norm, shift, first, first_bias, second, second_bias = (w.double() for w in weights)
    hidden = F.layer_norm(hidden.double(), norm.shape, norm, shift, 1e-6)
    return F.linear(F.gelu(F.linear(hidden, first, first_bias), approximate="tanh"), second, second_bias)


def outputs_and_gradients(function, mlp, hidden: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden = hidden.detach().requires_grad_()
    out = function(hidden)
    names, params = zip(*mlp.named_parameters())
    grads = torch.autograd.grad(out, [hidden, *params], upstream.to(out.dtype))
    return dict(zip(["out", "hidden", *names], [out, *grads]))


def check(mlp, hidden: int) -> None:
    from trainer.layers.modules.engine import JointMLP, can_join

    assert can_join(mlp)
    joint = JointMLP(mlp)
    generator = torch.Generator("cuda").manual_seed(4)
    x, upstream = (torch.randn(5001, 1, hidden, device="cuda", generator=generator).bfloat16() for _ in range(2))
    wanted = outputs_and_gradients(lambda h: exact(mlp, h), mlp, x, upstream)
    ours = outputs_and_gradients(lambda h: joint(h)[0], mlp, x, upstream)
    theirs = outputs_and_gradients(lambda h: mlp(h)[0], mlp, x, upstream)
    for name, truth in wanted.items():
        mine, other = (float((got[name].double() - truth).norm() / truth.norm()) for got in (ours, theirs))
        assert mine <= max(1.1 * other, 1e-6), (name, mine, other)


@requires_gpus(1)
@requires_engine
@pytest.mark.parametrize(("hidden", "inner"), SHAPES)
def test_gives_what_the_products_one_by_one_give(hidden, inner):
    with single_rank() as mesh:
        check(build(hidden, inner, mesh.groups.tp), hidden)


@requires_gpus(1)
@requires_engine
def test_gradients_of_the_weights_are_added_to_their_float32_buffers():
    """It adds gradients over micro batches, as the other modules do."""
    from trainer.layers.modules.engine import JointMLP

    hidden, inner = SHAPES[0]
    with single_rank() as mesh:
        mlp = build(hidden, inner, mesh.groups.tp)
        joint, generator = JointMLP(mlp), torch.Generator("cuda").manual_seed(5)
        x, upstream = (torch.randn(300, 1, hidden, device="cuda", generator=generator).bfloat16() for _ in range(2))
        wanted = outputs_and_gradients(lambda h: exact(mlp, h), mlp, x, upstream)
        for linear in (mlp.linear_fc1, mlp.linear_fc2):
            linear.fuse_wgrad_accumulation = True
            linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
            linear.weight.grad_added_to_main_grad = False
        for _ in range(2):
            joint(x)[0].backward(upstream)
        for name in ("linear_fc1.weight", "linear_fc2.weight"):
            param, truth = mlp.get_parameter(name), 2 * wanted[name]
            assert param.grad_added_to_main_grad
            assert float((param.main_grad - truth).norm() / truth.norm()) < 0.01, name
