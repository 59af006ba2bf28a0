"""Adapters of experts as PEFT's directory and merged into each form in which a directory stores experts, in float32."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from dataset_builders.errors import InputError
from stages.shared.inputs.adapter_directory import AdapterDirectory, adapter_input
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.adapters import adapted_model, in_peft
from tests.helpers.reference import load_reference
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import full
from tests.trainer.checkpoint.test_adapter_files import assert_logits_equal
from trainer.checkpoint.adapter_files import with_adapters
from trainer.checkpoint.hf_weights import HFTensors, is_of_experts
from trainer.checkpoint.save_and_load import state_of
from trainer.contract.adapter import AdapterConfig
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_start
from trainer.layers.lora import trained_parameters
from trainer.loop.export import write_weights
from trainer.loop.set_up import apply_data_parallel
from trainer.model.adapters import adapted_layers, check_adapter
from trainer.model.registry import read_model
from trainer.model.rules import stored_rules

pytestmark = pytest.mark.promise(
    "PEFT gives our logits from our adapters to 1e-5, those of experts too; merging is `merge_and_unload` to the "
    "bit, training continues from its directory and ours, and an adapter beside its base answers as the merged "
    "model."
)

BOTH, DOWN = "experts", r".*\.mlp\.experts\.down_proj"
CASES = [("experts-listed", BOTH, 8), ("experts-shared", BOTH, 5), ("experts-shared", DOWN, 3)]


def settings(*targets: str, **changes: object) -> AdapterConfig:
    return AdapterConfig(**{"rank": 8, "alpha": 12, "targets": ("attention", "mlp", *targets), **changes})


@pytest.fixture(scope="module")
def mesh():
    with single_rank() as mesh:
        yield mesh


@pytest.fixture(
    scope="module", params=[*CASES[:2], full(CASES[2])], ids=["transposed", "as ours, rank 5", "down alone, rank 3"]
)
def written(request, mesh, tmp_path_factory):
    """A model with adapters on its experts, and its adapter/ and hf/ on disk."""
    shape, target, rank = request.param
    config = settings(target, rank=rank)
    run, model = adapted_model(tmp_path_factory.mktemp("adapters"), mesh, shape, config)
    write_weights([model], mesh, run)
    family = read_model(run.hf_dir)[0]
    rules = family.weight_rules(model.shape)
    check_adapter(run.train, family, model.shape)
    return SimpleNamespace(run=run, ours=model, config=config, shape=shape, rules=rules)


def test_peft_loads_the_directory_and_gives_our_logits(written):
    theirs = in_peft(load_reference(written.run.hf_dir), written.run.output_dir / ADAPTER_EXPORT)
    assert_logits_equal(written.ours, theirs)
    saved = load_file(written.run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)
    assert saved.keys() == get_peft_model_state_dict(theirs).keys()
    assert any("experts" in name for name in saved)


def test_the_merged_model_gives_our_logits(written, tmp_path):
    shutil.copytree(written.run.hf_dir, tmp_path / "whole")
    shutil.copy(written.run.output_dir / HF_EXPORT / "model.safetensors", tmp_path / "whole")
    assert_logits_equal(written.ours, load_reference(tmp_path / "whole"))


def test_experts_that_are_stored_one_by_one_get_the_same_numbers(written, tmp_path):
    """The directories of Qwen3.5 have gate_proj, up_proj and down_proj of each expert."""
    base, whole = load_file(written.run.hf_dir / "model.safetensors"), {}
    packed = {rule.hf[0]: rule for rule in written.rules if rule.one_by_one is not None}
    merged = load_file(written.run.output_dir / HF_EXPORT / "model.safetensors")
    for tensors, out in ((base, {}), (merged, whole)):
        for name, tensor in tensors.items():
            if name in packed:
                rule = packed[name].one_by_one
                ours = packed[name].packing.fuse([tensor], 1)
                tensors_of_experts = rule.packing.split(ours, len(rule.hf), 1)
                out |= {n: part.clone() for n, part in zip(rule.hf, tensors_of_experts, strict=True)}
            else:
                out[name] = tensor
        if tensors is base:
            save_file(out, tmp_path / "model.safetensors")
    source, layers = HFTensors(tmp_path), adapted_layers(written.rules, written.config)
    saved = load_file(written.run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)
    trained = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
    ours = dict(with_adapters(source, stored_rules(written.rules, source.names()), layers, trained, written.config))
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, whole[name])] == []


def test_directories_of_peft_and_of_ours_are_gone_on_from(written, mesh, tmp_path):
    start = written.run.output_dir / ADAPTER_EXPORT
    config = json.loads((start / ADAPTER_CONFIG).read_text())
    names = {key: config[key] for key in ("target_modules", "target_parameters")}
    theirs = get_peft_model(
        load_reference(written.run.hf_dir), LoraConfig(r=written.config.rank, lora_alpha=12, **names)
    ).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for param in (param for param in theirs.parameters() if param.requires_grad):
            param += 0.05 * torch.randn(param.shape, generator=generator)
    theirs.save_pretrained(tmp_path / "theirs")
    check_start(tmp_path / "theirs", written.config)
    assert adapter_input(AdapterDirectory(tmp_path / "theirs")).digest != adapter_input(AdapterDirectory(start)).digest
    _, ours = adapted_model(tmp_path, mesh, written.shape, written.config, tmp_path / "theirs")
    assert_logits_equal(ours, theirs)
    run, ours = adapted_model(tmp_path / "again", mesh, written.shape, written.config, start)
    write_weights([ours], mesh, run)
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        assert (run.output_dir / ADAPTER_EXPORT / name).read_bytes() == (start / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "dora"}, r"train.adapter.kind=dora is not possible for .*experts.gate_up_proj.*set lora"),
        ({"dropout": 0.1}, "train.adapter.dropout=0.1 is not possible"),
    ],
)
def test_what_peft_does_not_compute_is_refused(written, changes, words):
    family = read_model(written.run.hf_dir)[0]
    train = written.run.train.model_copy(update={"adapter": settings(BOTH, **changes)})
    with pytest.raises(InputError, match=words):
        check_adapter(train, family, written.ours.shape)


@pytest.mark.parametrize("targets", [("experts",), (DOWN,), ("experts", "mlp")])
def test_nothing_but_experts_is_trained_and_saved(mesh, targets, tmp_path):
    config = settings(rank=4).model_copy(update={"targets": targets})
    run, model = adapted_model(tmp_path, mesh, "experts-shared", config)
    chunks, optimizer = apply_data_parallel([model], run, mesh, read_model(run.hf_dir)[0])
    state = state_of(chunks, optimizer, 3, loading=False)["optimizer"]
    parts = [state] if "optimizer" in state else [*state.values()]
    assert len(parts) == len({is_of_experts(param) for param in trained_parameters(model)})
    kept = [tensors for part in parts for tensors in part["param_state"].values()]
    assert len(kept) == len([*trained_parameters(model)])
    assert {group["step"] for part in parts for group in part["optimizer"]["param_groups"]} == {3}


def test_an_unmerged_adapter_of_experts_does_not_answer(written):
    with pytest.raises(InputError, match=r"target_parameters names .*experts.*merge_and_unload"):
        AdapterDirectory(written.run.output_dir / ADAPTER_EXPORT).check_base(ModelDirectory(written.run.hf_dir))
