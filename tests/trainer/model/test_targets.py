"""Targets of adapters: what they name, how many parameters that is, and the one line where they name nothing."""

import json
import math

import pytest
from safetensors import safe_open

from dataset_builders.errors import InputError
from flows.pipeline.plan import check_model
from flows.pipeline.recipe import load_recipe
from tests.helpers.run_dir import changed, check_job, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir
from tests.trainer.train_config import train_config
from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import PartConfig, TrainConfig
from trainer.layers.lora import add_adapters
from trainer.model.adapters import adapted_layers, adapter_sizes, check_adapter, list_matches
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Targets of adapters, by role or expression, are counted and checked before any stage."
)

MODELS = {
    "first": tiny_hf_dir,
    "second": lambda: tiny_hf_dir("second"),
    "hybrid": hybrid_hf_dir,
    "hybrid-second": lambda: hybrid_hf_dir("second"),
    "text": text_hf_dir,
}
ALL = ("attention", "mlp", "delta", "merger", "vision")


def training(*targets: str, kind: str = "lora", whole: tuple[str, ...] = (), **parts: PartConfig) -> TrainConfig:
    adapter = AdapterConfig(kind=kind, rank=3, alpha=6, targets=targets, modules_to_save=whole)
    return train_config(adapter=adapter, **parts)


@pytest.mark.parametrize("model", MODELS)
def test_the_sizes_of_linear_layers_are_those_of_the_files(model):
    hf_dir = MODELS[model]()
    family, shape = read_model(hf_dir)
    rules = [rule for rule in family.weight_rules(shape) if rule.sizes]
    sizes = {name: size for rule in rules for name, size in zip(rule.hf, rule.sizes, strict=True)}
    with safe_open(hf_dir / "model.safetensors", "pt") as file:
        assert sizes == {name: tuple(file.get_slice(name).get_shape()) for name in sizes}
        matrices = {name for name in sorted(file.keys()) if len(file.get_slice(name).get_shape()) == 2}
    others = {name for name in matrices - sizes.keys() if not name.startswith("mtp.")}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in others} <= {"embed_tokens", "pos_embed", "lm_head"}


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("model", MODELS)
def test_the_counted_parameters_are_those_of_the_model(model, kind):
    hf_dir, train = MODELS[model](), training(*ALL, kind=kind)
    family, shape = read_model(hf_dir)
    with single_rank() as mesh:
        built = build_tiny(hf_dir, mesh)
        add_adapters(built, adapted_layers(family.weight_rules(shape), train.adapter), train.adapter, seed=1)
        trained = {name: param.numel() for name, param in built.named_parameters() if param.requires_grad}
    sizes = adapter_sizes(train, family, shape)
    assert sizes.parameters == sum(trained.values())
    assert sum(found.parameters for found in list_matches(train, family, shape)) == sum(trained.values())
    assert sizes.vision.keys() == set(family.parts) - {"language"}
    for part, place in sizes.vision.items():
        assert place.parameters.on(1) == sum(count for name, count in trained.items() if family.part_of(name) == part)


def test_each_target_names_its_modules():
    family, shape = read_model(hybrid_hf_dir())
    train = training("attention", "delta", r".*\.layers\.3\..*_proj", "vision")
    found = {matches.target: matches for matches in list_matches(train, family, shape)}
    end = [name.rpartition("layers.")[2] for name in found["attention"].modules]
    assert end == [f"3.self_attn.{name}_proj" for name in "qkvo"]
    assert found["delta"].modules[:2] == tuple(
        f"model.language_model.layers.0.linear_attn.in_proj_{name}" for name in ("qkv", "z")
    )
    assert len(found["delta"].modules) == 3 * 5
    assert len(found[r".*\.layers\.3\..*_proj"].modules) == 4 + 3
    assert len(found["vision"].modules) == 2 * 4
    assert found["attention"].parameters == 3 * ((256 + 64) + (64 + 64) + (64 + 64) + (64 + 128))
    both = adapter_sizes(train, family, shape)  # what two targets name is there once
    assert both.parameters == sum(m.parameters for m in found.values()) - found["attention"].parameters


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("q_proj",), r"'q_proj' names no linear layer of this model; nearest: .*\.q_proj, "),
        (
            ("attention", r".*\.gate_prj"),
            r"'.*\\.gate_prj' names no linear layer of this model; nearest: .*\.gate_proj",
        ),
        (("atention",), "nearest: attention; roles: attention, mlp, vision, merger; other targets are regular"),
        ((r"model\.visual\.block\.\d+\.attn\.qkv",), "nearest: model.visual.blocks.0.attn.qkv"),
        (("delta",), "this model has no layers of role delta; its roles: attention, mlp, vision, merger"),
        (("lm_head",), "'lm_head' names no linear layer"),
    ],
)
def test_a_target_that_names_nothing_is_refused_with_the_nearest_names(targets, words, tmp_path):
    with pytest.raises(InputError) as caught:
        check_adapter(training(*targets), *read_model(tiny_hf_dir()))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    given = f"train.adapter={json.dumps({'rank': 3, 'alpha': 6, 'targets': targets})}"
    for model in ("model.seed=3", f"model={tiny_hf_dir()}"):
        with pytest.raises(InputError) as before_any_work:
            check_model(load_recipe("embedded", [given, model, "plan_bins.max_patches=4096"]).config)
        assert words in str(before_any_work.value)
    run = write_job(tmp_path, num_steps=4, global_batch_size=4)
    with pytest.raises(InputError) as in_the_trainer:
        check_job(changed(run, train=run.train.model_copy(update={"adapter": training(*targets).adapter})), 1)
    assert words in str(in_the_trainer.value)


@pytest.mark.parametrize(
    ("shape", "whole", "words"),
    [
        ("second", "lm_heads", "'lm_heads' names no module with weights"),
        ("first", "lm_head", "'lm_head' names no module with weights; the output projection is tied"),
        ("first", r"model\.language_model\.embed_tokens", "embed_tokens.weight; the output projection is tied"),
        ("second", r".*layers\.0\.mlp\.down_proj", r"down_proj\.weight would be adapted and trained whole"),
        ("second", r".*layers\.0\.mlp\.gate_proj", r"gate_proj\.weight and not .*up_proj\.weight"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_refused(shape, whole, words):
    with pytest.raises(InputError, match=words) as caught:
        check_adapter(training("attention", "mlp", whole=(whole,)), *read_model(tiny_hf_dir(shape)))
    assert "\n" not in str(caught.value)


def test_a_role_that_the_model_lacks_may_stand_beside_others():
    family, shape = read_model(tiny_hf_dir())
    check_adapter(training("attention", "delta"), family, shape)
    assert [len(found.modules) for found in list_matches(training("attention", "delta"), family, shape)] == [16, 0]


def test_what_is_frozen_gets_no_adapter_and_a_target_of_it_alone_is_refused():
    family, shape = read_model(tiny_hf_dir())
    still = {"vision": PartConfig(frozen=True)}
    with pytest.raises(InputError, match="'vision' names layers of vision alone, and train"):
        check_adapter(training("mlp", "vision", **still), family, shape)
    expression = r".*\.(o_proj|qkv)"
    check_adapter(training(expression, **still), family, shape)
    (found,) = list_matches(training(expression, **still), family, shape)
    assert len(found.modules) == 4 and adapter_sizes(training(expression, **still), family, shape).parameters == (
        found.parameters
    )
    assert not math.isclose(found.parameters, adapter_sizes(training(expression), family, shape).parameters)
