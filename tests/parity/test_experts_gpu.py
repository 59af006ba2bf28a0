"""The products of experts on a GPU in bf16, at even and uneven loads, with every gradient.

The yardstick is the error of the same module on a CPU in bf16, which computes expert by expert. Both are compared with
float32.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.helpers.hardware import requires_gpus
from tests.helpers.single_rank import single_rank
from trainer.contract.adapter import AdapterConfig
from trainer.parts.experts.dispatch import Order
from trainer.parts.experts.module import ExpertsSubmodules, RoutedExperts
from trainer.parts.experts.part import Experts

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

TOKENS = 1000
ADAPTERS = ("a of gate and up", "b of gate and up", "a of down", "b of down")
KINDS = {"whole": ("gate and up", "down"), "adapters": ADAPTERS, "adapters beside float8": ADAPTERS}
PARTS = [
    Experts(hidden_size=512, num_experts=16, top_k=4, intermediate_size=256, activation="silu"),
    Experts(hidden_size=256, num_experts=40, top_k=3, intermediate_size=192, activation="silu"),
]


def chosen_experts(part: Experts, loads: str) -> torch.Tensor:
    """Return (TOKENS, k): equal loads; expert 0 with all tokens, expert 1 with none, and expert 2 with one; or equal
    loads of which half, and of some tokens all, are other ranks'."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(TOKENS, part.num_experts, generator=generator)
    if loads == "uneven":
        scores[:, 0], scores[:, 1:3] = 2, -1
        scores[7, 2] = 2
    chosen = scores.topk(part.top_k).indices
    if loads == "divided":
        chosen[torch.rand(chosen.shape, generator=generator) < 0.5] = part.num_experts
    return chosen


def trained(module: RoutedExperts, kind: str, drawn: Callable[..., torch.Tensor]) -> list[torch.nn.Parameter]:
    """Set which parameters are trained, and return them."""
    if kind == "whole":
        return [module.gate_up, module.down]
    for name in ("gate_up", "down"):
        adapter = module.adapt(name, AdapterConfig(kind="lora", rank=8, alpha=16)).to(module.router.device)
        with torch.no_grad():
            adapter.a.copy_(drawn(*adapter.a.shape, scale=adapter.a.size(2) ** -0.5))
            adapter.b.copy_(drawn(*adapter.b.shape, scale=0.2))
        module.get_parameter(name).requires_grad = False
        if kind == "adapters beside float8":
            module.pack(name, module.router.device)
    return list(module.adapter.parameters())


def outcome(part: Experts, loads: str, kind: str, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return the output, and the gradients of tokens, routing weights and trained matrices, float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = (scale * torch.randn(*shape, generator=generator)).bfloat16()
        return values.to(device, dtype).requires_grad_()

    with single_rank() as mesh:
        config = TransformerConfig(
            num_layers=1, hidden_size=part.hidden_size, num_attention_heads=4, params_dtype=dtype
        )
        config.recompute_granularity = "selective" if loads == "uneven" else None  # gates are computed again
        module = RoutedExperts(config, ExpertsSubmodules(None), part=part, pg_collection=mesh.groups).to(device)
        with torch.no_grad():
            module.gate_up.copy_(drawn(*module.gate_up.shape, scale=part.hidden_size**-0.5))
            module.down.copy_(drawn(*module.down.shape, scale=part.intermediate_size**-0.5))
        params = trained(module, kind, drawn)
        hidden, weights = drawn(TOKENS, part.hidden_size), drawn(TOKENS, part.top_k, scale=0.3)
        if loads == "divided":
            module.groups = SimpleNamespace(ep=SimpleNamespace(size=lambda: 2))
        out = module._mix(hidden, weights, Order(chosen_experts(part, loads).to(device), part.num_experts))
        out.backward(drawn(*out.shape).detach())
        found = (out, hidden.grad, weights.grad, *(param.grad for param in params))
        return [tensor.detach().double().cpu() for tensor in found]


@requires_gpus(1)
@pytest.mark.parametrize("loads", ["even", "uneven", "divided"])
@pytest.mark.parametrize("part", PARTS, ids=["16x256", "40x192"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_in_bf16(part, loads, kind):
    truth = outcome(part, loads, kind, torch.float32, "cpu")
    yardstick = outcome(part, loads, kind, torch.bfloat16, "cpu")
    ours = outcome(part, loads, kind, torch.bfloat16, "cuda")
    for name, mine, theirs, exact in zip(("out", "x", "router", *KINDS[kind]), ours, yardstick, truth, strict=True):
        error, allowed = ((found - exact).norm() / exact.norm() for found in (mine, theirs))
        print(f"\n{name}: {error:.2e}, expert by expert on a CPU {allowed:.2e}")
        assert error <= 1.3 * allowed, name
    if loads == "uneven":
        assert not any(grad[1].any() for grad in ours[3:]), "an expert without tokens has a gradient"


@requires_gpus(1)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_cuda_graph_and_again_the_same_bits(kind):
    part, like = PARTS[0], {"device": "cuda", "dtype": torch.bfloat16}
    with single_rank() as mesh:
        config = TransformerConfig(
            num_layers=1, hidden_size=part.hidden_size, num_attention_heads=4, params_dtype=torch.bfloat16
        )
        module = RoutedExperts(config, ExpertsSubmodules(None), part=part, pg_collection=mesh.groups).cuda()
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.05)
        hidden, weights = torch.randn(TOKENS, part.hidden_size, **like), torch.rand(TOKENS, part.top_k, **like)
        params = trained(module, kind, lambda *shape, scale: torch.randn(*shape, **like) * scale)
        inputs = [hidden.requires_grad_(), weights.requires_grad_(), *params]
        chosen, grad = chosen_experts(part, "uneven").cuda(), torch.randn(TOKENS, part.hidden_size, **like)

        def passes() -> list[torch.Tensor]:
            out = module._mix(hidden, weights, Order(chosen, part.num_experts))
            return [out, *torch.autograd.grad(out, inputs, grad)]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first, second = passes(), passes()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = passes()
        graph.replay()
        torch.cuda.synchronize()
    for one, again, in_graph in zip(first, second, replayed, strict=True):
        assert torch.equal(one, again) and torch.equal(one, in_graph)
