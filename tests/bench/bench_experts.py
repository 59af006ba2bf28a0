"""The experts of one layer on one GPU: each way to compute their products, by shape and load, beside the matrix rate.

    python -m tests.bench.bench_experts

Tokens in, weighted sums of experts out, in bf16, without the router. TFLOP/s count the products of the rows alone: a
forward pass has 6 R D I operations for R rows, hidden size D and width I, and a backward pass twice as many, or as many
if only adapters (rank 16) are trained, whose own products are not counted. "loop" is
one product per expert; it and Transformer Engine's grouped linear layer take the numbers of rows from the host. An
uneven load is drawn from logits with a deviation of one per expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.bench.bench_delta_rule import both, median_us
from tests.bench.command import make_parser, table_head, table_row
from tests.bench.host import Host
from tests.helpers.single_rank import single_rank
from trainer.contract.adapter import AdapterConfig
from trainer.layers.kernel_support import allow_kernels
from trainer.parallel.mesh import Mesh
from trainer.parts.experts import dispatch
from trainer.parts.experts.dispatch import Order
from trainer.parts.experts.module import ExpertsSubmodules, RoutedExperts
from trainer.parts.experts.part import Experts

TOKENS = 16_384
SHAPES = {
    "128 x 768, top 8": Experts(hidden_size=2048, num_experts=128, top_k=8, intermediate_size=768, activation="silu"),
    "256 x 512, top 8": Experts(hidden_size=2048, num_experts=256, top_k=8, intermediate_size=512, activation="silu"),
}
LOADS = ("even", "uneven")


@dataclass(frozen=True)
class Block:
    """The inputs of a block: tokens (s, D), weights (s, k), experts (s, k), and the gradient of its output."""

    hidden: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor
    grad: torch.Tensor


def drawn(part: Experts, load: str) -> Block:
    scores = torch.randn(TOKENS, part.num_experts, device="cuda")
    if load == "uneven":
        scores += torch.randn(part.num_experts, device="cuda")
    weights, chosen = scores.softmax(-1).topk(part.top_k)
    if load == "even":
        chosen = (torch.arange(chosen.numel(), device="cuda") % part.num_experts).view_as(chosen)
    hidden, grad = (torch.randn(TOKENS, part.hidden_size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
    return Block(hidden.requires_grad_(), weights.requires_grad_(), chosen, grad)


def of_transformer_engine(part: Experts, block: Block) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """Return (the block with Transformer Engine's grouped linear layer, its parameters)."""
    from transformer_engine.pytorch import GroupedLinear

    settings = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    up = GroupedLinear(part.num_experts, part.hidden_size, 2 * part.intermediate_size, **settings)
    down = GroupedLinear(part.num_experts, part.intermediate_size, part.hidden_size, **settings)
    sizes = torch.bincount(block.chosen.flatten(), minlength=part.num_experts).tolist()

    def compute() -> torch.Tensor:
        order = Order(block.chosen, part.num_experts)
        gate, value = up(order.dispatch(block.hidden), sizes).chunk(2, -1)
        outputs = order.collect(down(F.silu(gate) * value, sizes))
        return (outputs * block.weights[..., None]).sum(1)

    return compute, [*up.parameters(), *down.parameters()]


def times(compute: Callable[[], torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor) -> tuple[float, float]:
    """Return the microseconds of (a forward pass, a forward and a backward pass)."""
    with torch.no_grad():
        forward = median_us(compute)
    return forward, both(compute, inputs, grad)


def beside_float8(config: TransformerConfig, part: Experts, block: Block, mesh: Mesh) -> dict[str, tuple[float, float]]:
    """Return the times of the block with adapters beside a float8 base, with our kernels and without."""
    module = RoutedExperts(config, ExpertsSubmodules(None), part=part, pg_collection=mesh.groups).cuda()
    for name in ("gate_up", "down"):
        torch.nn.init.normal_(module.get_parameter(name), std=0.02)
        adapter = module.adapt(name, AdapterConfig(kind="lora", rank=16, alpha=32)).cuda()
        for weight in adapter.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        module.pack(name, torch.device("cuda"))
    inputs = [block.hidden, block.weights, *module.adapter.parameters()]
    found = {}
    for name, allowed in (("adapters beside float8", True), ("adapters, grouped_mm alone", False)):
        allow_kernels(allowed)
        found[name] = times(
            lambda: module._mix(block.hidden, block.weights, Order(block.chosen, part.num_experts)), inputs, block.grad
        )
    allow_kernels(True)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trace", action="store_true", help="print the kernels of the first shape's block")
    args = parser.parse_args()
    host = Host.here()
    print(f"{host.device}, {host.versions}. {host.product}: {host.rate / 1e12:.0f} TFLOP/s. {TOKENS:,} tokens.\n")
    print(table_head(["experts", "load", "products"], ["forward", "both", "both, ms", "share of the matrix rate"]))
    with single_rank() as mesh:
        for name, part in SHAPES.items():
            config = TransformerConfig(
                num_layers=1, hidden_size=part.hidden_size, num_attention_heads=16, params_dtype=torch.bfloat16
            )
            module = RoutedExperts(config, ExpertsSubmodules(None), part=part, pg_collection=mesh.groups).cuda()
            for weight in module.parameters():
                torch.nn.init.normal_(weight, std=0.02)
            work = 6 * TOKENS * part.top_k * part.hidden_size * part.intermediate_size / 1e6
            for load in LOADS:
                block = drawn(part, load)

                def mixed(block: Block = block, module: RoutedExperts = module) -> torch.Tensor:
                    order = Order(block.chosen, module.part.num_experts)
                    return module._mix(block.hidden, block.weights, order)

                inputs, own = [block.hidden, block.weights], [module.gate_up, module.down]
                rows = {"athanor": times(mixed, inputs + own, block.grad)}
                allow_kernels(False)
                rows["grouped_mm alone"] = times(mixed, inputs + own, block.grad)
                with mock.patch.object(dispatch, "is_grouped", lambda rows: False):
                    rows["loop"] = times(mixed, inputs + own, block.grad)
                allow_kernels(True)
                compute, weights = of_transformer_engine(part, block)
                rows["Transformer Engine"] = times(compute, inputs + weights, block.grad)
                rows |= beside_float8(module.config, part, block, mesh)
                for products, (forward, whole) in rows.items():
                    rates = work / forward, (2 if products.startswith("adapters") else 3) * work / whole
                    numbers = [f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{whole / 1e3:.2f}"]
                    share = f"{rates[1] * 1e12 / host.rate:.1%}"
                    print(table_row([name, load, products, *numbers, share]), flush=True)
                if args.trace:
                    args.trace = False
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                        mixed().backward(block.grad)
                        torch.cuda.synchronize()
                    print(
                        profile.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=90)
                    )


if __name__ == "__main__":
    main()
