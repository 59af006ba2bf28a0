"""The FLOPs of a delta layer: torch's own counter on the rule, and the sizes of its matrices."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from trainer.data.packed_chunks import CHUNK, PackedChunks
from trainer.model.registry import read_model
from trainer.parts.delta.rule import plain

pytestmark = pytest.mark.promise(
    "`athanor plan` counts parameters, FLOPs and what adapters and delta layers keep exactly, and GPU memory "
    "within 8% of measured peaks."
)


def counted_rule(tokens: int, key_heads: int, value_heads: int, dim: int) -> int:
    """Return torch's count for the plain rule: every product, but not the solution of the triangular systems."""
    q, k = (torch.randn(tokens, key_heads, dim) for _ in range(2))
    v = torch.randn(tokens, value_heads, dim)
    g, beta = -torch.rand(tokens, value_heads), torch.rand(tokens, value_heads)
    with FlopCounterMode(display=False) as counter:
        plain.gated_delta_rule(q, k, v, g, beta, PackedChunks.of((0, tokens)))
    return counter.get_total_flops()


def test_a_delta_layer_counts_its_products_and_nothing_that_grows_with_a_sample():
    shape = read_model(hybrid_hf_dir("second"))[1].language
    part = shape.layers[0].mixer
    heads, dim = part.value_heads, part.head_dim
    before, after, squared = shape.layers[0].flops
    with single_rank() as mesh:
        layer = build_tiny(hybrid_hf_dir("second"), mesh).language.decoder.layers[0]
    delta = layer.self_attention
    tokens = 4 * CHUNK
    rule = counted_rule(tokens, part.key_heads, heads, dim) // tokens + heads * 2 * CHUNK * dim
    assert before == 2 * delta.in_proj.weight.numel() + 2 * delta.conv_weight.numel() + rule
    assert after == 2 * sum(linear.weight.numel() for linear in (delta.linear_proj, *layer.mlp.children()))
    assert squared == 0
    assert counted_rule(2 * tokens, part.key_heads, heads, dim) == 2 * counted_rule(tokens, part.key_heads, heads, dim)


def test_a_layer_of_gated_attention_counts_its_gates():
    shape = read_model(hybrid_hf_dir("second"))[1].language
    with single_rank() as mesh:
        layer = build_tiny(hybrid_hf_dir("second"), mesh).language.decoder.layers[1]
    before, after, squared = shape.layers[1].flops
    attention = layer.self_attention
    assert before == 2 * attention.linear_qkv.weight.numel()
    assert after == 2 * sum(linear.weight.numel() for linear in (attention.linear_proj, *layer.mlp.children()))
    part = shape.layers[1].mixer
    assert squared == 2 * part.num_heads * part.head_dim
    assert sum(param.numel() for param in layer.parameters()) == shape.layers[1].parameters
