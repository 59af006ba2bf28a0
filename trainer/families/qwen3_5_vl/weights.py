"""The table of Qwen3.5's weights: our parameters and their HF tensors."""

from collections.abc import Iterator

from trainer.families.qwen3_5_vl.shape import HybridDecoderShape
from trainer.families.qwen3_vl.weights import vision_rules
from trainer.model.rules import Rule, StackedRuns, attention_rules, decoder_rules
from trainer.model.shape import ModelShape


def rules(shape: ModelShape) -> Iterator[Rule]:
    """The whole table, in HF's order of tensors."""
    yield from decoder_rules(shape.language, "model.language_model.", mixer_rules)
    yield from vision_rules(shape.vision)


def mixer_rules(shape: HybridDecoderShape, number: int, ours: str, hf: str) -> Iterator[Rule]:
    """The rules of a layer's first half."""
    if not shape.is_delta(number):
        yield from attention_rules(shape, number, ours, hf)
        return
    ours, hf = f"{ours}self_attention.", f"{hf}linear_attn."
    channels, heads = shape.delta_channels, shape.delta_value_heads
    joined = StackedRuns(rows=(channels, channels[-1:], (heads,), (heads,)))
    names = tuple(f"{hf}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    rows, width = (sum(channels), channels[-1], heads, heads), shape.hidden_size
    yield Rule(ours + "in_proj.weight", names, joined, sizes=tuple((out, width) for out in rows))
    yield Rule(ours + "conv_weight", (hf + "conv1d.weight",), StackedRuns(rows=(channels,)))
    yield Rule(ours + "decay.a_log", (hf + "A_log",))
    yield Rule(ours + "decay.dt_bias", (hf + "dt_bias",))
    yield Rule(ours + "norm_weight", (hf + "norm.weight",))
    yield Rule(ours + "linear_proj.weight", (hf + "out_proj.weight",), sizes=((width, channels[-1]),))
