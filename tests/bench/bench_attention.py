"""The trainer's attention cores on one GPU: packed segments in bf16, heads of 64 and 72 (vision, no mask), of 128 and
256 (text, causal).

    python -m tests.bench.bench_attention

A core that is not installed has no row. TFLOP/s of the scores that the mask leaves: forward, and forward with backward,
which is 3.5 times the work of the forward pass. Vision: 50,000 patches in images of 500 to 5,000; text: the bins of
bench_delta_rule.
"""

import importlib.util
import itertools
import random
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.bench.bench_delta_rule import bins, both, median_us
from tests.bench.command import table_head, table_row
from tests.bench.host import describe
from trainer.layers.attention_cores import FlashAttention
from trainer.layers.segments import PackedSegments

PATCHES = 50_000
WHOLE = 3.5


@dataclass(frozen=True)
class Shape:
    """Heads of a layer: queries, keys and values, numbers of a head, and whether a mask is causal."""

    heads: int
    groups: int
    dim: int
    causal: bool


SHAPES = [Shape(16, 16, 64, False), Shape(16, 16, 72, False), Shape(16, 8, 128, True), Shape(8, 2, 256, True)]


def images() -> list[int]:
    draw, sizes = random.Random(0), []
    while sum(sizes) < PATCHES:
        sizes.append(min(4 * draw.randint(125, 1250), PATCHES - sum(sizes)))
    return sizes


def cores() -> dict[str, type]:
    found: dict[str, type] = {"torch's flash attention": FlashAttention}
    if importlib.util.find_spec("transformer_engine") is not None:
        from trainer.layers.modules.engine import PackedAttention

        found["cuDNN, called by Transformer Engine"] = PackedAttention
    if importlib.util.find_spec("flash_attn") is not None:
        from trainer.layers.modules.flash_4 import FlashAttention4

        found["FlashAttention 4"] = FlashAttention4
    return found


def measure(kind: type, shape: Shape, lengths: list[int]) -> tuple[float, float]:
    """Return TFLOP/s, forward and whole."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.heads * shape.dim,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.dim,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    mask = AttnMaskType.causal if shape.causal else AttnMaskType.no_mask
    ranks = ProcessGroupCollection(tp=None, cp=None)
    core = kind(config=config, layer_number=1, attn_mask_type=mask, attention_type="self", pg_collection=ranks)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    segments = PackedSegments.of(bounds, max(lengths))
    counts = (shape.heads, shape.groups, shape.groups)
    inputs = [torch.randn(sum(lengths), n, shape.dim, device="cuda", dtype=torch.bfloat16) for n in counts]

    def attend() -> torch.Tensor:
        return core(*inputs, None, attn_mask_type=mask, packed_seq_params=segments)

    pairs = sum(n * n for n in lengths) / (2 if shape.causal else 1)
    work = 4 * shape.heads * shape.dim * pairs / 1e12
    for tensor in inputs:
        tensor.requires_grad_()
    whole = both(attend, inputs, torch.randn_like(attend()))
    with torch.no_grad():
        forward = median_us(attend)
    return work / forward * 1e6, WHOLE * work / whole * 1e6


def main() -> None:
    print(*describe(), sep=", ")
    print()
    print(table_head(["segments", "heads of", "core"], ["forward", "forward and backward"]))
    for shape in SHAPES:
        for (name, lengths), (core, kind) in itertools.product(
            (bins() if shape.causal else {"images": images()}).items(), cores().items()
        ):
            if core.startswith("cuDNN") and shape.dim > 128:
                continue  # its gradients are wrong (docs/decisions/model.md)
            rates = [f"{rate:,.0f}" for rate in measure(kind, shape, lengths)]
            print(table_row([name, shape.dim, core, *rates]), flush=True)


if __name__ == "__main__":
    main()
