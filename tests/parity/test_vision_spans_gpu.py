"""The encoder's layers as spans against the same layers one by one, and both against float32."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.hardware import requires_engine, requires_gpus
from tests.helpers.single_rank import single_rank
from trainer.layers.module_set import TorchModules, layer_around, shared_config
from trainer.layers.recompute import recomputed
from trainer.layers.segments import PackedSegments, Rotation

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

# Qwen3-VL's vision encoders: of 2B, of 8B, whose heads of 72 are padded
SHAPES = [(1024, 4096), (1152, 4304)]
LENGTHS = [1, 63, 64, 65, 745, 900, 5000]


def build(hidden: int, inner: int, mesh, dtype: torch.dtype) -> list[torch.nn.Module]:
    """Return two layers with random weights: the job's modules in bfloat16, torch's in float32."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from trainer.layers.modules.choice import choose_modules
    from trainer.parts.attention.module import attention_spec
    from trainer.parts.mlp.module import mlp_spec

    config = TransformerConfig(
        num_layers=2,
        hidden_size=hidden,
        ffn_hidden_size=inner,
        num_attention_heads=16,
        kv_channels=hidden // 16,
        normalization="LayerNorm",
        layernorm_epsilon=1e-6,
        activation_func=partial(F.gelu, approximate="tanh"),
        add_bias_linear=True,
        **shared_config(dtype),
    )
    modules = choose_modules("engine", mesh.device) if dtype is torch.bfloat16 else TorchModules()
    attention = attention_spec(modules, head_dim=hidden // 16, causal=False, qk_norm=False)
    spec = layer_around(attention, mlp_spec(modules), modules)
    groups = ProcessGroupCollection(tp=mesh.groups.tp, cp=mesh.alone, pp=mesh.alone)
    layers = [build_module(spec, config=config, layer_number=i + 1, pg_collection=groups).cuda() for i in range(2)]
    for number, layer in enumerate(layers):
        with torch.no_grad():
            for place, (name, param) in enumerate(sorted(layer.named_parameters())):
                generator = torch.Generator("cuda").manual_seed(100 * number + place)
                noise = torch.randn(param.shape, device="cuda", generator=generator)
                param.copy_((1 + 0.2 * noise if "norm" in name and "weight" in name else 0.04 * noise).bfloat16())
    return layers


def one_by_one(layers, *args, call=lambda layer, *args: layer(*args)) -> list[torch.Tensor]:
    hidden, *rest = args
    outputs = []
    for layer in layers:
        outputs.append(hidden := call(layer, hidden, *rest))
    return outputs


def recomputed_layer(layer, *args) -> torch.Tensor:
    from trainer.parts.vision.spans import joined_layer

    return recomputed(partial(joined_layer, layer), *args)


def outputs_and_gradients(run, layers, data) -> dict[str, torch.Tensor]:
    """Return both layers' outputs and all gradients, where both outputs are used."""
    hidden, upstream, rotation, segments = data
    dtype = next(layers[0].parameters()).dtype
    hidden = hidden.to(dtype).requires_grad_()
    outputs = list(run(layers, hidden, rotation, segments))
    params = {f"{i}.{name}": param for i, layer in enumerate(layers) for name, param in layer.named_parameters()}
    grads = torch.autograd.grad(outputs, [hidden, *params.values()], [x.to(dtype) for x in upstream])
    return dict(zip(["first", "second", "hidden", *params], [*outputs, *grads]))


def draw(hidden: int) -> tuple:
    generator = torch.Generator("cuda").manual_seed(4)
    count = sum(LENGTHS)
    x, *upstream = (torch.randn(count, 1, hidden, device="cuda", generator=generator).bfloat16() for _ in range(3))
    angles = torch.rand(count, hidden // 32, device="cuda", generator=generator) * 6
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    return x, upstream, Rotation.of(angles), PackedSegments.of(bounds, max(LENGTHS))


def distance(one: torch.Tensor, truth: torch.Tensor) -> float:
    return float((one.double() - truth.double()).norm() / truth.double().norm())


@requires_gpus(1)
@requires_engine
@pytest.mark.parametrize(("hidden", "inner"), SHAPES)
def test_spans_are_as_near_to_float32_as_the_layers_one_by_one(hidden, inner):
    from trainer.parts.vision.spans import can_join, joined_layer, joined_layers

    with single_rank() as mesh:
        layers, data = build(hidden, inner, mesh, torch.bfloat16), draw(hidden)
        assert can_join(layers)
        truth = outputs_and_gradients(one_by_one, build(hidden, inner, mesh, torch.float32), data)
        plain = outputs_and_gradients(one_by_one, layers, data)
        for run in (joined_layers, partial(one_by_one, call=joined_layer), partial(one_by_one, call=recomputed_layer)):
            ours = outputs_and_gradients(run, layers, data)
            for name, exact in truth.items():
                mine, other = distance(ours[name], exact), distance(plain[name], exact)
                assert mine <= max(1.1 * other, 1e-5), (name, mine, other)


@requires_gpus(1)
@requires_engine
def test_gradients_of_the_weights_are_added_to_their_float32_buffers():
    """It adds gradients over micro batches, as the other modules do."""
    from trainer.parts.vision.spans import joined_layers

    hidden, inner = SHAPES[0]
    with single_rank() as mesh:
        layers, data = build(hidden, inner, mesh, torch.bfloat16), draw(hidden)
        wanted = outputs_and_gradients(joined_layers, layers, data)
        summed = {}
        for number, layer in enumerate(layers):
            for name, module in layer.named_modules():
                if hasattr(module, "fuse_wgrad_accumulation") and hasattr(module, "weight"):
                    module.fuse_wgrad_accumulation, weight = True, module.weight
                    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
                    weight.grad_added_to_main_grad = False
                    summed[f"{number}.{name}.weight"] = weight
        assert len(summed) == 8
        for _ in range(2):
            outputs_and_gradients(joined_layers, layers, data)
        for name, weight in summed.items():
            assert weight.grad_added_to_main_grad
            assert distance(weight.main_grad, 2 * wanted[name].float()) < 0.01, name
