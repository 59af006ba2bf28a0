"""The table of Qwen3-VL's weights: our parameters and their HF tensors."""

from collections.abc import Iterator

from trainer.contract.model_shape import ModelShape, VisionShape
from trainer.families.weight_rules import JointQKV, Rule, decoder_rules


def rules(shape: ModelShape) -> Iterator[Rule]:
    """The whole table, in HF's order of tensors."""
    yield from decoder_rules(shape.language, "model.language_model.")
    yield from vision_rules(shape.vision)


def vision_rules(shape: VisionShape) -> Iterator[Rule]:
    """The rules of the vision encoder and its mergers."""
    hf, joint = "model.visual.", JointQKV(heads=shape.num_heads)
    yield Rule("vision.pos_embed", (hf + "pos_embed.weight",))
    for what in ("weight", "bias"):
        yield Rule(f"vision.patch_embed.{what}", (f"{hf}patch_embed.proj.{what}",))
        for i in range(shape.num_layers):
            layer, block = f"vision.blocks.layers.{i}.", f"{hf}blocks.{i}."
            yield Rule(f"{layer}input_layernorm.{what}", (f"{block}norm1.{what}",))
            yield Rule(f"{layer}self_attention.linear_qkv.{what}", (f"{block}attn.qkv.{what}",), joint)
            yield Rule(f"{layer}self_attention.linear_proj.{what}", (f"{block}attn.proj.{what}",))
            yield Rule(f"{layer}pre_mlp_layernorm.{what}", (f"{block}norm2.{what}",))
            yield Rule(f"{layer}mlp.linear_fc1.{what}", (f"{block}mlp.linear_fc1.{what}",))
            yield Rule(f"{layer}mlp.linear_fc2.{what}", (f"{block}mlp.linear_fc2.{what}",))
        mergers = [("vision.merger.", f"{hf}merger.")]
        for i in range(len(shape.deepstack_layers)):
            mergers.append((f"vision.deepstack_mergers.{i}.", f"{hf}deepstack_merger_list.{i}."))
        for merger, source in mergers:
            for part in ("norm", "linear_fc1", "linear_fc2"):
                yield Rule(f"{merger}{part}.{what}", (f"{source}{part}.{what}",))
