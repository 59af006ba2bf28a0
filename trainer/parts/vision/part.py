"""The weights of the vision encoder and of its mergers: our parameters and their HF tensors."""

from collections.abc import Iterator

from trainer.model.rules import STACKED, JointQKV, Rule, Stacked
from trainer.model.shape import VisionShape


def vision_rules(shape: VisionShape) -> Iterator[Rule]:
    """Yield the rules of the vision encoder and its mergers, in HF's order of tensors."""
    hf, joint = "model.visual.", JointQKV(heads=shape.num_heads)
    width, inner, merged = shape.hidden_size, shape.intermediate_size, shape.hidden_size * shape.spatial_merge_size**2
    yield Rule("vision.pos_embed", (hf + "pos_embed.weight",))
    for what in ("weight", "bias"):
        yield Rule(f"vision.patch_embed.{what}", (f"{hf}patch_embed.proj.{what}",))
        for i in range(shape.num_layers):
            layer, block = f"vision.blocks.layers.{i}.", f"{hf}blocks.{i}."
            yield Rule(f"{layer}input_layernorm.{what}", (f"{block}norm1.{what}",))
            yield _linear(f"{layer}self_attention.linear_qkv", f"{block}attn.qkv", what, (3 * width, width), joint)
            yield _linear(f"{layer}self_attention.linear_proj", f"{block}attn.proj", what, (width, width))
            yield Rule(f"{layer}pre_mlp_layernorm.{what}", (f"{block}norm2.{what}",))
            yield _linear(f"{layer}mlp.linear_fc1", f"{block}mlp.linear_fc1", what, (inner, width))
            yield _linear(f"{layer}mlp.linear_fc2", f"{block}mlp.linear_fc2", what, (width, inner))
        mergers = [("vision.merger.", f"{hf}merger.")]
        for i in range(len(shape.deepstack_layers)):
            mergers.append((f"vision.deepstack_mergers.{i}.", f"{hf}deepstack_merger_list.{i}."))
        for merger, source in mergers:
            yield Rule(f"{merger}norm.{what}", (f"{source}norm.{what}",))
            yield _linear(f"{merger}linear_fc1", f"{source}linear_fc1", what, (merged, merged))
            yield _linear(f"{merger}linear_fc2", f"{source}linear_fc2", what, (shape.out_hidden_size, merged))


def _linear(ours: str, hf: str, what: str, size: tuple[int, int], packing: Stacked = STACKED) -> Rule:
    name, source = f"{ours}.{what}", (f"{hf}.{what}",)
    if what == "bias":
        return Rule(name, source, packing)
    role, axis = "merger" if "merger" in ours else "vision", int(ours.endswith(("linear_proj", "linear_fc2")))
    return Rule(name, source, packing, sizes=(size,), role=role, axis=axis)
