"""Qwen3-VL without torch: the keys of its config.json, its sizes, its table of weights, and the family in one object.

Defaults of keys are transformers' (5.23). The other families of vision-language models extend these keys and use
`with_vision`, the table of weights and the parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from dataset_builders.errors import InputError
from trainer.families.config_keys import (
    BackboneKeys,
    CommonKeys,
    Count,
    DecoderKeys,
    RotaryKeys,
    attention_of,
    decoder_shape,
    mlp_of,
    read_keys,
    rotary_of,
)
from trainer.families.qwen3_vl.variants import VARIANTS, embedded_configs
from trainer.model.family import Family, ImageProcessor, VideoProcessor
from trainer.model.layer import FeedForward, Layer
from trainer.model.rules import Rule
from trainer.model.shape import DecoderShape, ImageTokens, ModelShape, VisionShape
from trainer.parts.vision.part import vision_rules


class TextRotaryKeys(RotaryKeys):
    """The keys of rope_parameters in text_config."""

    mrope_section: list[NonNegativeInt] = Field(default=[24, 20, 20], min_length=3, max_length=3)
    mrope_interleaved: Literal[True] = True


class MropeKeys(BackboneKeys):
    """The keys of every text_config, whatever its layers are."""

    tie_word_embeddings: bool = False  # transformers reads only the key of the whole model, never this one
    rope_parameters: TextRotaryKeys | None = None
    rope_scaling: TextRotaryKeys | None = None


class TextKeys(MropeKeys, DecoderKeys):
    """The keys of text_config."""

    model_type: Literal["qwen3_vl_text"] = "qwen3_vl_text"


class VisionRotaryKeys(RotaryKeys):
    """The keys of rope_parameters in vision_config."""

    rope_type: Literal["axial", "default"] = "axial"


class VisionKeys(CommonKeys):
    """The keys of vision_config."""

    model_type: Literal["qwen3_vl_vision", "qwen3_vl"] = "qwen3_vl_vision"
    depth: Count = 27
    hidden_size: PositiveInt = 1152
    intermediate_size: PositiveInt = 4304
    num_heads: PositiveInt = 16
    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "silu"] = "gelu_pytorch_tanh"
    in_channels: Literal[3] = 3
    patch_size: PositiveInt = 16
    spatial_merge_size: PositiveInt = 2
    temporal_patch_size: PositiveInt = 2
    out_hidden_size: PositiveInt = 3584
    num_position_embeddings: PositiveInt = 2304
    deepstack_visual_indexes: list[NonNegativeInt] = Field(default=[8, 16, 24])
    rope_theta: PositiveFloat = None
    rope_parameters: VisionRotaryKeys | None = None
    rope_scaling: VisionRotaryKeys | None = None


class Qwen3VLKeys(CommonKeys):
    """The keys of config.json."""

    model_type: Literal["qwen3_vl"]
    text_config: TextKeys
    vision_config: VisionKeys
    # Without defaults: transformers' would be the ids of other tokens in this tokenizer.
    image_token_id: NonNegativeInt
    video_token_id: NonNegativeInt
    vision_start_token_id: NonNegativeInt
    vision_end_token_id: NonNegativeInt
    tie_word_embeddings: bool = False


def read_shape(config: Mapping[str, Any], path: Path | str = "config.json") -> ModelShape:
    """Return the sizes in a parsed config.json."""
    keys = read_keys(Qwen3VLKeys, config, path)
    return shape_with(keys, (mlp_of(keys.text_config),) * keys.text_config.num_hidden_layers, path)


def shape_with(keys: Qwen3VLKeys, feed_forwards: Sequence[FeedForward], path: Path | str) -> ModelShape:
    """Return the shape of a model whose layers have these feed-forward parts."""
    text, where = keys.text_config, f"{path}: text_config."
    attention = attention_of(text, where)
    section, theta = mrope_of(text, text.head_dim, path)
    language = decoder_shape(
        text,
        where,
        layers=tuple(Layer(text.hidden_size, attention, feed_forward) for feed_forward in feed_forwards),
        rope_theta=theta,
        rotary_dim=text.head_dim,
        mrope_section=section,
        tie_word_embeddings=keys.tie_word_embeddings,
    )
    return with_vision(language, keys, path)


def mrope_of(keys: MropeKeys, rotary_dim: int, path: Path | str) -> tuple[tuple[int, ...], float]:
    """Return the number of rotary pairs of each axis, and the base."""
    # The default base differs from the other families', in transformers too.
    rotary, theta = rotary_of(keys, TextRotaryKeys(), default_theta=500_000.0)
    return checked_section(rotary.mrope_section, rotary_dim, path), theta


def checked_section(section: list[int], rotary_dim: int, path: Path | str) -> tuple[int, ...]:
    """Return the number of rotary pairs of each axis."""
    if 2 * sum(section) != rotary_dim:
        raise InputError(
            f"{path}: text_config.rope_parameters.mrope_section is {section}; only the sum {rotary_dim // 2} of a "
            "head's rotary pairs is understood"
        )
    return tuple(section)


def with_vision(language: DecoderShape, keys: Qwen3VLKeys, path: Path | str) -> ModelShape:
    """Return the shape of the whole model: the language model and its vision encoder."""
    vision = _vision_shape(keys.vision_config, f"{path}: vision_config.")
    if vision.out_hidden_size != language.hidden_size:
        raise InputError(
            f"{path}: vision_config.out_hidden_size is {vision.out_hidden_size}, text_config.hidden_size "
            f"{language.hidden_size}; image tokens are as wide as the language model: take both from the same model"
        )
    if len(vision.deepstack_layers) >= language.num_layers:
        # The last layer ends with only the loss tokens: no feature of image tokens can be added after it.
        raise InputError(
            f"{path}: {len(vision.deepstack_layers)} deepstack levels (vision_config.deepstack_visual_indexes) need "
            f"more layers than text_config.num_hidden_layers={language.num_layers}; take a complete qwen3_vl model"
        )
    # The fields are called as the keys of config.json.
    images = ImageTokens(**{name: getattr(keys, name) for name in ImageTokens.__dataclass_fields__})
    for name in ("image_token_id", "video_token_id"):
        if getattr(keys, name) >= language.vocab_size:
            raise InputError(
                f"{path}: {name} is {getattr(keys, name)}, and text_config.vocab_size {language.vocab_size}; "
                "take both from the same model"
            )
    return ModelShape(language=language, vision=vision, images=images)


def _vision_shape(keys: VisionKeys, where: str) -> VisionShape:
    _, theta = rotary_of(keys, VisionRotaryKeys(), default_theta=10_000.0)
    shape = VisionShape(
        num_layers=keys.depth,
        hidden_size=keys.hidden_size,
        intermediate_size=keys.intermediate_size,
        num_heads=keys.num_heads,
        out_hidden_size=keys.out_hidden_size,
        patch_size=keys.patch_size,
        temporal_patch_size=keys.temporal_patch_size,
        spatial_merge_size=keys.spatial_merge_size,
        num_positions=keys.num_position_embeddings,
        deepstack_layers=tuple(keys.deepstack_visual_indexes),
        rope_theta=theta,
        activation=keys.hidden_act,
    )
    if shape.hidden_size % (4 * shape.num_heads):
        raise InputError(
            f"{where}num_heads is {shape.num_heads}, and hidden_size {shape.hidden_size} is not a multiple of 4 x "
            f"num_heads; a head has rotary pairs for rows and for columns: take a complete model"
        )
    levels = shape.deepstack_layers
    if len(set(levels)) < len(levels) or max(levels, default=0) >= shape.num_layers:
        raise InputError(
            f"{where}deepstack_visual_indexes is {list(levels)}; only different layers below depth={shape.num_layers} "
            "are understood"
        )
    if shape.position_side**2 != shape.num_positions:
        raise InputError(f"{where}num_position_embeddings is {shape.num_positions}; only a square is understood")
    return shape


def rules(shape: ModelShape) -> Iterator[Rule]:
    """Yield the table of weights, in HF's order of tensors."""
    yield from shape.language.rules("model.language_model.")
    yield from vision_rules(shape.vision)


def part_of(name: str) -> str:
    """Return the part that a parameter of the bare model belongs to: "vision", "merger" or "language"."""
    if name.startswith(("vision.merger.", "vision.deepstack_mergers.")):
        return "merger"
    part = name.partition(".")[0]
    if part not in ("vision", "language"):
        raise ValueError(f"parameter {name} is neither of vision nor of language")
    return part


FAMILY = Family(
    model_type="qwen3_vl",
    read_shape=read_shape,
    rules=rules,
    parts=("vision", "merger", "language"),
    part_of=part_of,
    model="trainer.families.qwen3_vl.model:Qwen3VLModel",
    encoder="trainer.families.qwen3_vl.model:build_encoder",
    reference="transformers:Qwen3VLForConditionalGeneration",
    embedded=embedded_configs,
    variants=VARIANTS,
    image_processor=ImageProcessor(
        types=("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
        reference="transformers.models.qwen2_vl.image_processing_qwen2_vl:Qwen2VLImageProcessor",
    ),
    video_processor=VideoProcessor(
        types=("Qwen3VLVideoProcessor",),
        prompt="transformers.models.qwen3_vl.processing_qwen3_vl:Qwen3VLProcessor",
        reference="transformers.models.qwen3_vl.video_processing_qwen3_vl:Qwen3VLVideoProcessor",
    ),
)
