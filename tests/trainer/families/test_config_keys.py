"""config.json is understood or refused: mutated configs mean to us what they mean to transformers, or one line says no.

What is accepted is compared with transformers' own config object and with its model: the parameters of each part, the
rotary base, the activation, and for some the logits of the whole model.
"""

import copy
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import transformers

from dataset_builders.errors import InputError
from tests.helpers.bins import MIXED, TEXT_ONLY, make_samples
from tests.helpers.reference import reference_losses
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import full
from tests.helpers.tiny_experts_model import experts_config
from tests.helpers.tiny_hybrid_model import hybrid_config
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import randomize, text_config
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.families.qwen3 import family as qwen3
from trainer.families.qwen3_5_moe import family as qwen3_5_moe
from trainer.families.qwen3_5_vl import family as qwen3_5_vl
from trainer.families.qwen3_vl import family as qwen3_vl
from trainer.families.qwen3_vl_moe import family as qwen3_vl_moe
from trainer.model.registry import FAMILIES, get_family, read_model
from trainer.model.shape import ModelShape
from trainer.parts.attention.part import Attention

pytestmark = pytest.mark.promise(
    "A config.json is computed as transformers computes it, or refused in one line: 500 mutated ones of each family."
)

ODD = (None, True, False, 0, 1, 2, 3, 5, 7, -1, 16, 2.0, 0.5, "2", "none", [], [2], {}, {"a": 1})
PLAUSIBLE: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu", "swish"),
    "attention_bias": (False, True),
    "attention_dropout": (0, 0.0, 0.1),
    "num_attention_heads": (2, 4, 6, 8),
    "num_key_value_heads": (1, 2, 3, 4, None),
    "num_hidden_layers": (1, 2, 3, 5),
    "num_heads": (1, 2, 3, 4, 8),
    "head_dim": (8, 16, 17, 32),
    "hidden_size": (32, 48, 64, 100),
    "intermediate_size": (40, 64, 96),
    "vocab_size": (500, 512, 640),
    "out_hidden_size": (32, 64),
    "depth": (1, 2, 3, 4),
    "deepstack_visual_indexes": ([], [0], [1, 0], [0, 9], [1, 1], [0, 1, 2], [-1]),
    "num_position_embeddings": (16, 64, 100, 120, 256),
    "in_channels": (1, 3, 4),
    "patch_size": (8, 16, [16, 16]),
    "spatial_merge_size": (1, 2, 3),
    "temporal_patch_size": (1, 2, [2]),
    "rms_norm_eps": (1e-5, 1e-6, 0.1),
    "rope_theta": (100.0, 10_000, 5e5, 5e6, None, "1e6"),
    "rope_parameters": (
        None,
        {},
        {"rope_theta": 300.0},
        {"rope_type": "default", "rope_theta": 2e4, "mrope_section": [4, 2, 2]},
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_theta": 1e4, "mrope_section": [2, 4, 2], "mrope_interleaved": False},
        {"mrope_section": [4, 4]},
        {"full_attention": {"rope_theta": 1e4}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
    ),
    "rope_scaling": (
        None,
        {"rope_theta": 700.0, "mrope_section": [4, 2, 2], "rope_type": "default"},
        {"type": "mrope", "mrope_section": [4, 2, 2]},
        {"type": "default", "mrope_section": [8, 0, 0]},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (True, False),
    "sliding_window": (None, 8),
    "layer_types": (
        None,
        ["full_attention"] * 4,
        ["full_attention"],
        ["sliding_attention"] * 4,
        ["linear_attention"] * 4,
        ["linear_attention", "full_attention"] * 2,
    ),
    "full_attention_interval": (1, 2, 3, 8),
    "partial_rotary_factor": (0.25, 0.5, 1.0, 0.3, 1.5),
    "linear_num_key_heads": (1, 2, 4, 5),
    "linear_num_value_heads": (2, 4, 6),
    "linear_key_head_dim": (8, 16, 24),
    "linear_value_head_dim": (8, 16),
    "linear_conv_kernel_dim": (2, 4),
    "attn_output_gate": (True, False),
    "pad_token_id": (None, 0, 511, 600),
    "image_token_id": (5, 511, 512),
    "video_token_id": (6, 510, 512),
    "quantization_config": ({"quant_method": "awq", "bits": 4},),
    "per_layer_config": ({"0": {"head_dim": 8}},),
    "num_experts": (2, 4, 16, None),
    "num_local_experts": (4, 8, None),
    "num_experts_per_tok": (1, 2, 3, 8, 9),
    "moe_intermediate_size": (40, 48, 64),
    "shared_expert_intermediate_size": (40, 64),
    "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 2, 3),
    "mlp_only_layers": ([], [0], [0, 1, 2], [9], [-1], None),
    "router_aux_loss_coef": (0.0, 0.1),
    "output_router_logits": (True, False),
    "dtype": ("bfloat16", "float32"),
    "model_type": ("qwen3_vl_text", "qwen3_vl_vision", "qwen3_vl", "llama"),
}


EXPERTS = {"qwen3_vl_moe": "listed", "qwen3_5_moe": "shared"}


def base_config(model_type: str) -> dict[str, Any]:
    if model_type == "qwen3":
        return text_config()
    if model_type in EXPERTS:
        return copy.deepcopy(experts_config(EXPERTS[model_type]))
    if model_type == "qwen3_5":
        return hybrid_config()
    assert model_type == "qwen3_vl", f"which config has {model_type}?"
    return json.loads((tiny_hf_dir() / "config.json").read_text())


def mutated(model_type: str, rng: random.Random) -> dict[str, Any]:
    """One to three keys of one of its objects missing, changed or new."""
    config = base_config(model_type)
    for _ in range(rng.choice((1, 1, 2, 3))):
        section = rng.choice([config, *(value for value in config.values() if isinstance(value, dict))])
        known = sorted(set(section) - {"model_type"})
        if rng.random() < 0.25 and known:
            del section[rng.choice(known)]
            continue
        likely = [key for key in PLAUSIBLE if key in section] or known or [*PLAUSIBLE]
        anything = [*PLAUSIBLE, *known, "unheard_of"]
        key = rng.choice(likely if rng.random() < 0.7 else anything)
        if section is config and key == "model_type":
            continue
        values = PLAUSIBLE.get(key, ODD) if rng.random() < 0.85 else ODD
        section[key] = copy.deepcopy(rng.choice(values))
    return config


def accepted(config: dict[str, Any]) -> ModelShape | None:
    """Return the shape that we read, or None where it is refused in one line that names the file."""
    try:
        return get_family(config["model_type"]).read_shape(copy.deepcopy(config))
    except InputError as error:
        assert str(error).startswith("config.json") and "\n" not in str(error)
        return None


def assert_same(shape: ModelShape, config: dict[str, Any]) -> None:
    """transformers builds this model of the config, and no other."""
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    text, language = theirs.get_text_config(), shape.language
    assert text.rope_parameters["rope_theta"] == language.rope_theta
    assert text.rope_parameters["rope_type"] == "default"
    assert text.rms_norm_eps == language.norm_eps
    assert {layer.feed_forward.activation for layer in language.layers} == {text.hidden_act}
    heads = {(m.num_heads, m.num_kv_heads) for m in language.mixers if isinstance(m, Attention)}
    assert heads <= {(text.num_attention_heads, text.num_key_value_heads)}
    assert theirs.tie_word_embeddings == language.tie_word_embeddings
    with torch.device("meta"):
        model = resolve_name(get_family(config["model_type"]).reference)(theirs)
    names = {name for name, _ in model.named_parameters()}
    rules = get_family(config["model_type"]).weight_rules(shape)
    assert names == {name for rule in rules for name in rule.hf}
    assert sum(param.numel() for param in model.parameters()) == sum(shape.parameters.values())
    if shape.vision is None:
        return
    rotary = model.model.language_model.rotary_emb
    assert tuple(rotary.mrope_section) == language.mrope_section
    assert 2 * len(rotary.inv_freq) == language.rotary_dim
    assert theirs.vision_config.rope_parameters["rope_theta"] == shape.vision.rope_theta
    assert theirs.vision_config.hidden_act == shape.vision.activation
    assert model.model.visual.num_grid_per_side == shape.vision.position_side
    ids = (shape.images.image_token_id, shape.images.video_token_id)
    assert (theirs.image_token_id, theirs.video_token_id) == ids


@pytest.mark.parametrize(
    ("model_type", "count"),
    [*((name, 40) for name in FAMILIES), *(full(name, 500, id=f"{name}-more") for name in FAMILIES)],
)
def test_a_mutated_config_is_the_model_that_transformers_makes_or_is_refused(model_type, count):
    rng = random.Random(20)
    outcomes = {True: 0, False: 0}
    for _ in range(count):
        config = mutated(model_type, rng)
        shape = accepted(config)
        outcomes[shape is not None] += 1
        if shape is not None:
            try:
                assert_same(shape, config)
            except Exception as error:
                raise AssertionError(f"accepted: {json.dumps(config)}") from error
    assert min(outcomes.values()) > count // 5, outcomes


CLASSES = {
    "qwen3": (qwen3.Qwen3Keys,),
    "qwen3_vl": (qwen3_vl.Qwen3VLKeys, qwen3_vl.TextKeys, qwen3_vl.VisionKeys),
    "qwen3_5": (qwen3_5_vl.Qwen35VLKeys, qwen3_5_vl.TextKeys, qwen3_5_vl.VisionKeys),
    "qwen3_vl_moe": (qwen3_vl_moe.Qwen3VLMoeKeys, qwen3_vl_moe.TextKeys, qwen3_vl_moe.VisionKeys),
    "qwen3_5_moe": (qwen3_5_moe.Qwen35MoeKeys, qwen3_5_moe.TextKeys, qwen3_5_moe.VisionKeys),
}
TYPES = (None, True, False, 0, 1, 1.0, 4.0, "a", [], {})


def of_other_types(model_type: str) -> Iterator[tuple[str, object, dict[str, Any]]]:
    """Yield (key, value, config) with a value of each type for each key that we know."""
    for part, keys in zip((None, "text_config", "vision_config"), CLASSES[model_type]):
        names = {field.alias or name for name, field in keys.model_fields.items()}
        for key, value in itertools.product(sorted(names - {"model_type", "text_config", "vision_config"}), TYPES):
            config = base_config(model_type)
            (config if part is None else config[part])[key] = copy.deepcopy(value)
            yield f"{part or ''}.{key}", value, config


@pytest.mark.full
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_type_of_a_value_is_accepted_that_transformers_refuses(model_type):
    wrong = []
    for key, value, config in of_other_types(model_type):
        if accepted(config) is not None:
            try:
                transformers.AutoConfig.for_model(**copy.deepcopy(config))
            except Exception as error:
                wrong.append(f"{key}={value!r}: {error}")
    assert not wrong, "\n".join(wrong)


def _in_reach(shape: ModelShape) -> bool:
    """Small enough to be run, and with room for the ids of the samples."""
    has_pixels = shape.vision is None or (shape.vision.patch_size, shape.vision.temporal_patch_size) == (16, 2)
    even = shape.vision is None or shape.vision.spatial_merge_size == 2
    return has_pixels and even and sum(shape.parameters.values()) < 10**6


@pytest.mark.parametrize(
    ("model_type", "count"),
    [*((name, 1) for name in FAMILIES), *(full(name, 12, id=f"{name}-more") for name in FAMILIES)],
)
def test_the_losses_of_mutated_models_are_transformers(model_type, count, tmp_path):
    rng, checked = random.Random(21), 0
    with single_rank() as mesh:
        while checked < count:
            config = mutated(model_type, rng)
            shape = accepted(config)
            if shape is None or not _in_reach(shape) or config == base_config(model_type):
                continue
            directory = tmp_path / str(checked)
            worst = difference(directory, config, mesh)
            assert worst < 1e-4, json.dumps(config)
            checked += 1


def difference(directory: Path, config: dict[str, Any], mesh) -> float:
    """The largest between our losses and transformers', of samples of every kind that the family reads."""
    family = get_family(config["model_type"])
    theirs = resolve_name(family.reference)(transformers.AutoConfig.for_model(**copy.deepcopy(config))).float().eval()
    theirs.set_attn_implementation("sdpa")
    randomize(theirs)
    theirs.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    shape = read_model(directory)[1]
    samples = make_samples([TEXT_ONLY] * 3 if shape.vision is None else MIXED, geometry_of(shape), range(20, 300))
    ours = build_tiny(directory, mesh)
    with torch.no_grad():
        wanted = torch.cat([reference_losses(theirs, sample) for sample in samples])
        losses = ours(make_micro_batch(samples, geometry_of(shape), 128))
    return float((losses - wanted).abs().max())


# By the family whose config is changed.
REFUSED = {
    "qwen3_vl": [
        ({"text_config": {"attention_bias": True}}, "text_config.attention_bias is true; only this is understood: F"),
        ({"text_config": {"hidden_act": "relu"}}, 'text_config.hidden_act is "relu"; only this is understood'),
        ({"vision_config": {"deepstack_visual_indexes": [0, 9]}}, "deepstack_visual_indexes is [0, 9]; only"),
        ({"vision_config": {"deepstack_visual_indexes": [1, 1]}}, "deepstack_visual_indexes is [1, 1]; only"),
        ({"vision_config": {"deepstack_visual_indexes": [0, -(2**31)]}}, "[0, -2147483648]; only integers below 2,147"),
        ({"vision_config": {"in_channels": 4}}, "vision_config.in_channels is 4; only this is understood: 3"),
        ({"vision_config": {"num_heads": 3}}, "vision_config.num_heads is 3, and hidden_size 32 is not a multiple of"),
        ({"vision_config": {"out_hidden_size": 48}}, "vision_config.out_hidden_size is 48, text_config.hidden_size 64"),
        ({"vision_config": {"depth": 10**8}}, "vision_config.depth is 100000000; only this is understood: less than"),
        ({"text_config": {"rope_parameters": {"mrope_section": [4, 4]}}}, "mrope_section is [4, 4]; List should have"),
        ({"text_config": {"num_attention_heads": 6, "num_key_value_heads": 4}}, "num_key_value_heads is 4, which does"),
        ({"text_config": {"num_hidden_layers": 2}}, "2 deepstack levels (vision_config.deepstack_visual_indexes) need"),
        ({"text_config": {"num_hidden_layers": 2**70}}, "num_hidden_layers is 1180591620717411303424; only integers"),
        ({"text_config": {"num_hidden_layers": 10**8}}, "num_hidden_layers is 100000000; only this is understood: le"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is a key that is not understood; quantized weig"),
        ({"text_config": {"num_experts": 8}}, "text_config.num_experts is a key that is not understood; remove it if"),
    ],
    "qwen3_5": [
        ({"text_config": {"linear_num_value_heads": 5}}, "linear_num_key_heads is 2, which does not divide"),
        ({"text_config": {"linear_key_head_dim": 8}}, "linear_key_head_dim is 8, linear_value_head_dim 16; only equal"),
        ({"text_config": {"layer_types": ["full_attention"]}}, "layer_types has 1 layers, num_hidden_layers is 4"),
        ({"text_config": {"partial_rotary_factor": 0.5, "rope_parameters": None}}, "[11, 11, 10]; only the sum 8"),
        ({"text_config": {"attn_output_gate": False}}, "attn_output_gate is false; only this is understood: True"),
        ({"text_config": {"linear_conv_kernel_dim": 2}}, "linear_conv_kernel_dim is 2; only this is understood: 4"),
    ],
    # Values of types that transformers refuses.
    "qwen3_vl_moe": [
        ({"text_config": {"output_router_logits": None}}, "output_router_logits is null; only this is understood: a v"),
        ({"text_config": {"router_aux_loss_coef": None}}, "router_aux_loss_coef is null; only this is understood: a v"),
        (
            {"text_config": {"router_aux_loss_coef": 1}},
            "router_aux_loss_coef is 1; transformers takes only a number wi",
        ),
        ({"text_config": {"attention_bias": 0}}, "text_config.attention_bias is 0; only this is understood: False"),
        ({"vision_config": {"in_channels": 3.0}}, "vision_config.in_channels is 3.0; only this is understood: 3"),
        ({"return_dict": False}, "return_dict is false; only this is understood: True"),
        ({"return_dict": None}, "return_dict is null; only this is understood: True"),
        ({"num_labels": None}, "num_labels is null; only this is understood: a valid integer"),
    ],
}


@pytest.mark.parametrize(
    ("model_type", "changes", "words"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_what_was_once_accepted_is_refused_by_name(model_type, changes, words):
    config = base_config(model_type)
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    with pytest.raises(InputError) as caught:
        get_family(model_type).read_shape(config, "m/config.json")
    assert str(caught.value).startswith("m/config.json: ") and "\n" not in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_rotary_base_and_tied_weights_are_transformers_own():
    config = base_config("qwen3_vl")
    del config["text_config"]["rope_parameters"]["rope_theta"], config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    shape = qwen3_vl.read_shape(config)
    assert shape.language.rope_theta == 500_000 and shape.language.tie_word_embeddings is False
    assert_same(shape, config)


def test_a_missing_part_is_named():
    with pytest.raises(InputError, match=r"config\.json has no vision_config; copy"):
        qwen3_vl.read_shape({"model_type": "qwen3_vl", "text_config": {"hidden_size": 64}})
