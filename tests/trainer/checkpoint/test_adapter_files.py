"""Adapters as PEFT's directory and as a merged model, against PEFT itself, in float32 and in bfloat16."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from dataset_builders.errors import InputError
from tests.helpers.adapters import PLACES, adapted_model, adapter_of, fresh_in_peft, in_peft
from tests.helpers.bins import MIXED, make_samples
from tests.helpers.reference import load_reference, reference_logits
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import full
from trainer.checkpoint.adapter_files import with_adapters
from trainer.checkpoint.hf_weights import HFTensors
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_start
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.loop.export import write_weights
from trainer.model.adapters import adapted_layers, modules_to_save
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "PEFT gives our logits from our adapters to 1e-5, those of experts too; merging is `merge_and_unload` to the "
    "bit, training continues from its directory and ours, and an adapter beside its base answers as the merged "
    "model."
)

WHOLE = (
    "lm_head",
    r"model\.visual\.merger",
    r"model\.visual\.deepstack_merger_list\.\d",
    r"model\.language_model\.norm",
)
KINDS = {
    "lora": {},
    "dora": {"kind": "dora"},
    "rslora": {"rslora": True, "rank": 3},
    "whole": {"modules_to_save": WHOLE, "kind": "dora"},
}
CASES = [(shape, kind) for shape in PLACES for kind in KINDS if kind != "whole" or shape == "second"]
CORE = (("first", "rslora"), ("second", "whole"), ("hybrid-first", "dora"))


@pytest.fixture(scope="module")
def mesh():
    with single_rank() as mesh:
        yield mesh


@pytest.fixture(scope="module", params=[case if case in CORE else full(case) for case in CASES], ids="-".join)
def written(request, mesh, tmp_path_factory):
    """A model with adapters, and its adapter/ and hf/ on disk."""
    shape, kind = request.param
    adapter = adapter_of(shape, **KINDS[kind])
    run, model = adapted_model(tmp_path_factory.mktemp("adapters"), mesh, shape, adapter)
    write_weights([model], mesh, run)
    rules = read_model(run.hf_dir)[0].weight_rules(model.shape)
    return SimpleNamespace(run=run, ours=model, config=adapter, shape=shape, rules=rules)


def logits_of(model, samples) -> torch.Tensor:
    batch = make_micro_batch(samples, geometry_of(model.shape), 128)
    with torch.no_grad():
        hidden = model.eval().hidden_states(batch)[:, 0]
        return (hidden @ model.language.output_weight.t())[: sum(len(sample.input_ids) for sample in samples)]


def assert_logits_equal(model, reference) -> None:
    samples = make_samples(MIXED, geometry_of(model.shape), range(20, 300))
    with torch.no_grad():
        theirs = torch.cat([reference_logits(reference, sample) for sample in samples])
    torch.testing.assert_close(logits_of(model, samples), theirs, atol=1e-5, rtol=0)


def test_peft_loads_the_directory_and_gives_our_logits(written):
    base = load_reference(written.run.hf_dir)
    samples = make_samples(MIXED, geometry_of(written.ours.shape), range(20, 300))
    with torch.no_grad():
        plain = torch.cat([reference_logits(base, sample) for sample in samples])
    assert (plain - logits_of(written.ours, samples)).abs().max() > 0.05, "the adapters do nothing"
    theirs = in_peft(base, written.run.output_dir / "adapter")
    assert_logits_equal(written.ours, theirs)
    saved = load_file(written.run.output_dir / "adapter" / ADAPTER_WEIGHTS)
    assert saved.keys() == get_peft_model_state_dict(theirs).keys()


def test_the_merged_model_is_merge_and_unload_to_the_bit(written):
    """And what is neither adapted nor trained whole is as in the base, to the bit."""
    merged = load_file(written.run.output_dir / "hf" / "model.safetensors")
    theirs = in_peft(load_reference(written.run.hf_dir), written.run.output_dir / "adapter").merge_and_unload()
    state = theirs.state_dict()
    copied = read_model(written.run.hf_dir)[0].copied
    assert not [n for n, tensor in merged.items() if not n.startswith(copied) and not torch.equal(tensor, state[n])]
    base = HFTensors(written.run.hf_dir)
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, base.get(name))}
    adapter = load_file(written.run.output_dir / "adapter" / ADAPTER_WEIGHTS)
    names = {name.removeprefix("base_model.model.") for name in adapter}
    of_adapters = {name.replace(".lora_A.weight", ".weight") for name in names if ".lora_A." in name}
    assert changed == of_adapters | {name for name in names if ".lora_" not in name} and len(changed) < len(merged)


def test_the_config_says_what_peft_would_say(written, tmp_path):
    """Key by key, as it is written and as it is read: what is left out has PEFT's default. Of many modules PEFT writes
    the shortest ends of names that fit no other; ours are whole names."""
    directory = written.run.output_dir / "adapter"
    ours = json.loads((directory / ADAPTER_CONFIG).read_text())
    whole = modules_to_save(written.rules, written.config)
    peft = fresh_in_peft(load_reference(written.run.hf_dir), written.config, ours["target_modules"], whole)
    peft.save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    # The second is a directory of theirs, which another machine does not have.
    differs = {"target_modules", "base_model_name_or_path"}
    assert [key for key in ours.keys() - differs if ours[key] != theirs[key]] == []
    read, expected = (LoraConfig.from_pretrained(path).to_dict() for path in (directory, tmp_path))
    assert [key for key in read.keys() - differs if read[key] != expected[key]] == []
    assert ours["base_model_name_or_path"] is None and isinstance(ours["lora_alpha"], int)
    suffixes = tuple(theirs["target_modules"])
    assert all(name.endswith(suffixes) for name in ours["target_modules"])


def test_a_directory_that_peft_saved_is_gone_on_from(written, mesh, tmp_path):
    modules = json.loads((written.run.output_dir / "adapter" / ADAPTER_CONFIG).read_text())["target_modules"]
    whole = modules_to_save(written.rules, written.config)
    theirs = fresh_in_peft(load_reference(written.run.hf_dir), written.config, modules, whole)
    theirs.save_pretrained(tmp_path / "theirs")
    check_start(tmp_path / "theirs", written.config)
    _, ours = adapted_model(tmp_path, mesh, written.shape, written.config, tmp_path / "theirs")
    assert_logits_equal(ours, theirs)


def test_a_directory_that_we_wrote_is_gone_on_from(written, mesh, tmp_path):
    start = written.run.output_dir / "adapter"
    check_start(start, written.config)
    run, ours = adapted_model(tmp_path, mesh, written.shape, written.config, start)
    write_weights([ours], mesh, run)
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        assert (run.output_dir / "adapter" / name).read_bytes() == (start / name).read_bytes()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_in_bfloat16_the_sum_is_rounded_once(kind, mesh, tmp_path):
    """Merging equals PEFT's into a bfloat16 model, whose adapters PEFT keeps in float32."""
    adapter = adapter_of("second", kind=kind)
    run, model = adapted_model(tmp_path, mesh, "second", adapter)
    run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "bfloat16"})})
    write_weights([model], mesh, run)
    low = {name: tensor.bfloat16() for name, tensor in load_file(run.hf_dir / "model.safetensors").items()}
    save_file(low, tmp_path / "model.safetensors")
    saved = load_file(run.output_dir / "adapter" / ADAPTER_WEIGHTS)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    trained = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
    rules = read_model(run.hf_dir)[0].weight_rules(model.shape)
    ours = dict(with_adapters(HFTensors(tmp_path), rules, adapted_layers(rules, adapter), trained, adapter))
    theirs = in_peft(load_reference(run.hf_dir).bfloat16(), run.output_dir / "adapter").merge_and_unload().state_dict()
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values())
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name].bfloat16())]


@pytest.fixture
def saved(mesh, tmp_path) -> Path:
    """A directory as we write it."""
    run, model = adapted_model(tmp_path, mesh, "first", adapter_of("first"))
    write_weights([model], mesh, run)
    return run.output_dir / "adapter"


def rewritten(directory: Path, **changes: object) -> Path:
    config = json.loads((directory / ADAPTER_CONFIG).read_text())
    (directory / ADAPTER_CONFIG).write_text(json.dumps({**config, **changes}))
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 8}, r"r is 8, and train\.adapter says 4 \(rank\); set train\.adapter\.rank"),
        ({"lora_alpha": 16}, r"lora_alpha is 16, and train\.adapter says 6\.0 \(alpha\)"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"use_dora": True}, r"use_dora is True, and .* set train\.adapter\.kind=dora"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern is \{'q_proj': 8\}, which is not computed here"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"some_new_thing": 3}, "some_new_thing is 3, which is not computed here"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_training_cannot_go_on_from_is_refused_in_one_line(saved, changes, words):
    with pytest.raises(InputError, match=words) as error:
        check_start(rewritten(saved, **changes), adapter_of("first"))
    assert "\n" not in str(error.value) and ADAPTER_CONFIG in str(error.value)


def test_a_directory_without_an_adapter_and_a_training_without_one_are_refused(saved, tmp_path):
    with pytest.raises(InputError, match=r"start_adapter=.* has no adapter_config\.json"):
        check_start(tmp_path, adapter_of("first"))
    with pytest.raises(InputError, match=r"train\.adapter is null"):
        check_start(saved, None)


def test_other_modules_are_refused_by_a_tensors_name(saved, mesh, tmp_path):
    with pytest.raises(InputError, match=r"nothing trains, .*\.visual\..*lora_A.*set train\.adapter\.targets"):
        adapted_model(tmp_path, mesh, "first", adapter_of("first", targets=("attention", "mlp")), saved)
    tensors = load_file(saved / ADAPTER_WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, saved / ADAPTER_WEIGHTS)
    with pytest.raises(InputError, match="lacks base_model"):
        adapted_model(tmp_path, mesh, "first", adapter_of("first"), saved)


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValueError, match="is no regular expression"):
        adapter_of("first", modules_to_save=("(",))
