"""Settings and layouts that a Qwen3.5 model cannot run are refused in one line before any work."""

import dataclasses

import pytest
import torch

from dataset_builders.errors import InputError
from flows.pipeline.plan import check_model
from flows.pipeline.recipe import load_recipe
from tests.helpers.run_dir import changed, check_job, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import DELTA, hybrid_config, hybrid_hf_dir
from trainer.contract.parallel import ParallelConfig
from trainer.families.qwen3_5_vl.family import read_shape
from trainer.layers.decoder import decoder_config
from trainer.parts.delta.part import DeltaNet

pytestmark = pytest.mark.promise(
    "A layout or setting that a model cannot train with is refused in one line before anything starts."
)

REFUSED = [
    ("float8", {}, 1, "train.precision is float8, in which the delta layers of a qwen3_5 model"),
    (
        "float32",
        {"cp": 4},
        4,
        "cp=4 x tp=1 does not divide the model's linear_num_key_heads=2, which its ranks share; ",
    ),
    ("float32", {"tp": 2, "cp": 2}, 4, "cp=2 x tp=2 does not divide .* try execution.parallel.cp=1"),
    ("float32", {"tp": 4}, 4, "tp=4 does not divide the model's num_kv_heads=2"),
]


@pytest.mark.parametrize(("precision", "parallel", "processes", "words"), REFUSED)
def test_what_is_not_there_is_refused(precision, parallel, processes, words, tmp_path):
    run = write_job(tmp_path, num_steps=4, global_batch_size=4, shape="hybrid-first")
    train = run.train.model_copy(update={"precision": precision})
    with pytest.raises(InputError, match=words) as caught:
        check_job(changed(run, train=train, parallel=ParallelConfig(**parallel)), processes)
    assert "\n" not in str(caught.value)


LAYERS = {"delta": {"layer_types": [DELTA] * 4}, "delta, fewer than an interval": {"num_hidden_layers": 3}}
LAYERS |= {name + ", mtp": layers | {"mtp_num_hidden_layers": 1} for name, layers in LAYERS.items()}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_needs_no_layer_of_attention(name, tp):
    config = hybrid_config()
    config["text_config"] |= LAYERS[name]
    shape = read_shape(config)
    has_mtp = shape.mtp is not None
    language = dataclasses.replace(shape.language, mtp=shape.mtp)
    assert {mixer.role for mixer in language.mixers} == {"delta"}
    assert has_mtp is ("num_heads" in language.divided_widths())
    settings = decoder_config(language, ParallelConfig(tp=tp, sequence_parallel=tp > 1), torch.float32)
    assert settings.num_attention_heads == (4 if has_mtp else tp) and settings.attention_output_gate is has_mtp


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.precision=float8"], "train.precision is float8"),
    ],
)
def test_a_recipe_is_refused_before_its_first_stage(settings, words):
    with pytest.raises(InputError, match=words):
        check_model(load_recipe("embedded", [f"model={hybrid_hf_dir()}", *settings]).config)


@pytest.mark.parametrize(
    ("precision", "parallel", "processes"),
    [("bfloat16", {}, 1), ("bfloat16", {"sharding": "fsdp"}, 2), ("float32", {"cp": 2}, 2), ("float32", {"tp": 2}, 2)],
)
def test_what_is_there_passes(precision, parallel, processes, tmp_path):
    run = write_job(tmp_path, num_steps=4, global_batch_size=4, shape="hybrid-first")
    train = run.train.model_copy(update={"precision": precision})
    check_job(changed(run, train=train, parallel=ParallelConfig(**parallel)), processes)


def test_its_layers_are_captured():
    with single_rank() as mesh:
        assert build_tiny(hybrid_hf_dir(), mesh).has_graphs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 5}, "linear_num_key_heads is 2, which does not divide"),
        ({"linear_key_head_dim": 8}, "linear_key_head_dim is 8, linear_value_head_dim 16; only equal ones"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers is 4"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": None}, r"mrope_section is \[11, 11, 10\]; only the sum 8"),
        ({"attn_output_gate": False}, "attn_output_gate is false; only this is understood: True"),
        ({"linear_conv_kernel_dim": 2}, "linear_conv_kernel_dim is 2; only this is understood: 4"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes, words):
    config = hybrid_config()
    config["text_config"] |= changes
    with pytest.raises(InputError, match=words):
        read_shape(config)


@pytest.mark.parametrize(
    ("text", "language", "whole"),
    [  # 2B, 9B and 27B without vision, in billions: arithmetic on published sizes
        ({"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24}, 8, 1.882),
        ({}, 16, 8.954),
        ({"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64}, 24, 26.896),
    ],
)
def test_the_published_sizes(text, language, whole):
    heads = {8: (2, 16), 16: (4, 32), 24: (4, 48)}[language]
    text = {
        **text,
        "num_attention_heads": language,
        "num_key_value_heads": heads[0],
        "linear_num_value_heads": heads[1],
    }
    config = {**hybrid_config(), "text_config": text, "tie_word_embeddings": language == 8}
    config["vision_config"] = {"out_hidden_size": text.get("hidden_size", 4096)}
    shape = read_shape(config)
    assert round(shape.language.parameters / 1e9, 3) == whole
    assert shape.language.rotary_dim == 64 and shape.language.mrope_section == (11, 11, 10)
    assert [isinstance(layer.mixer, DeltaNet) for layer in shape.language.layers[:4]] == [True, True, True, False]
