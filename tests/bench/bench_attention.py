"""Attention in Transformer Engine on one GPU: heads of 256 (Qwen3.5) and heads of 128 (Qwen3-VL), packed, causal.

    python -m tests.bench.bench_attention

The bins of bench_delta_rule, bf16. TFLOP/s of the causal half: forward, and forward with backward, which is 3.5 times
the work of the forward pass.
"""

import itertools

import torch
from transformer_engine.pytorch import DotProductAttention

from tests.bench.bench_delta_rule import TOKENS, bins, both, median_us
from tests.bench.host import describe
from tests.bench.mix import random_model

PAIRS = [("qwen3_5_2b", "qwen3_vl_2b"), ("qwen3_5_4b", "qwen3_vl_4b")]
WHOLE = 3.5


def measure(name: str, lengths: list[int]) -> tuple[float, float]:
    """TFLOP/s of a variant's attention, forward and whole."""
    part = random_model(name).shape.language.layers[-1].mixer
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    core = DotProductAttention(
        part.num_heads,
        part.head_dim,
        num_gqa_groups=part.num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    heads = (part.num_heads, part.num_kv_heads, part.num_kv_heads)
    inputs = [torch.randn(TOKENS, n, part.head_dim, device="cuda", dtype=torch.bfloat16) for n in heads]
    longest = max(lengths)

    def attend() -> torch.Tensor:
        return core(*inputs, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest)

    work = 2 * part.num_heads * part.head_dim * sum(n * n for n in lengths) / 1e12
    with torch.no_grad():
        forward = median_us(attend)
    for tensor in inputs:
        tensor.requires_grad_()
    whole = both(attend, inputs, torch.randn_like(attend()))
    return work / forward * 1e6, WHOLE * work / whole * 1e6


def main() -> None:
    print(*describe(), sep=", ")
    print(f"bf16, {TOKENS:,} tokens. TFLOP/s of the causal half.\n")
    print("| bin | model | heads of | forward | forward and backward |\n| --- | --- | ---: | ---: | ---: |")
    for (lengths_of, lengths), name in itertools.product(bins().items(), itertools.chain.from_iterable(PAIRS)):
        rates = " | ".join(f"{rate:,.0f}" for rate in measure(name, lengths))
        print(
            f"| {lengths_of} | {name} | {random_model(name).shape.language.layers[-1].mixer.head_dim} | {rates} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
