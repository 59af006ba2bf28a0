"""A base model with an adapter beside it gives the same answers as the merged model and as PEFT's model."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dataset_builders.errors import InputError, printable
from flows.cli.main import main
from stages.answer.ask import ask
from stages.answer.config import AnswerConfig
from stages.answer.heldout import ANSWERS_JSONL
from stages.answer.transformers_engine import Generator
from stages.shared.inputs.adapter_directory import AdapterDirectory, adapter_input
from stages.shared.inputs.model_directory import ModelDirectory, model_input
from tests.helpers.adapter_files import merge_adapter, write_adapter
from tests.helpers.evaluation import answered, mixed_samples, picture, samples_artifact, talkative_hf_dir
from tests.helpers.tiers import full, tiered
from tests.helpers.tiny_hybrid_model import talkative_hybrid_dir
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "PEFT gives our logits from our adapters to 1e-5, those of experts too; merging is `merge_and_unload` to the "
    "bit, training continues from its directory and ours, and an adapter beside its base answers as the merged "
    "model."
)

MODELS = {"qwen3_vl": talkative_hf_dir, "qwen3_5": talkative_hybrid_dir}
NEW_TOKENS = 12
WRONG_NUMBERS = (float("nan"), float("inf"), float("-inf"), True, "6", None, 0, 1e9)


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    """Return the logits of a text and one image's tokens."""
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 45)[None]).logits


@pytest.mark.parametrize("kind", [full("lora"), "dora"])
@pytest.mark.parametrize("family", tiered(MODELS, ("qwen3_5",)))
def test_answers_are_the_merged_models_token_by_token(family, kind, tmp_path):
    base = MODELS[family]()
    adapter = write_adapter(tmp_path / "adapter", base, kind=kind, rslora=kind == "dora")
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    whole, before = Generator(ModelDirectory(merged)), Generator(ModelDirectory(base))
    beside = Generator(ModelDirectory(base), adapter=AdapterDirectory(adapter))

    def answers(generator: Generator) -> list:
        prompts = [generator.encode_prompt(s.messages[:1], generator.encode_images(s.images)) for s in mixed_samples(8)]
        return generator.generate(prompts, NEW_TOKENS)

    assert answers(beside) == answers(whole) != answers(before)
    ours, theirs = logits(beside.decoder.model), logits(whole.decoder.model)
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=0)
    reference = peft.PeftModel.from_pretrained(before.decoder.model, adapter).eval()
    torch.testing.assert_close(ours, logits(reference), atol=1e-5 * theirs.abs().max().item(), rtol=0)


def test_the_stage_takes_an_adapter_beside_the_model_it_belongs_to(tmp_path):
    base = talkative_hf_dir()
    adapter = write_adapter(tmp_path / "adapter", base)
    samples = samples_artifact(tmp_path / "samples", mixed_samples(8))
    config, root = AnswerConfig(max_new_tokens=NEW_TOKENS), tmp_path / "root"
    before = {"hf": model_input(ModelDirectory(base)), "samples": samples}
    merged = {**before, "hf": model_input(ModelDirectory(merge_adapter(tmp_path / "merged", base, adapter)))}
    beside = {**before, "adapter": adapter_input(AdapterDirectory(adapter))}
    lines = [(answered(config, inputs, root).dir / ANSWERS_JSONL).read_text() for inputs in (beside, merged, before)]
    assert lines[0] == lines[1] != lines[2]
    other = {**beside, "hf": model_input(ModelDirectory(tiny_hf_dir("second")))}
    with pytest.raises(InputError, match="is of another model"):
        answered(config, other, root)


def test_ask_with_an_adapter(tmp_path, capsys):
    base = talkative_hf_dir()
    adapter = write_adapter(tmp_path / "adapter", base)
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    (tmp_path / "digit.png").write_bytes(picture(3, 72, 40))
    asked = [str(tmp_path / "digit.png"), "Which digit is this?"]
    assert main(["ask", str(base), *asked, "--adapter", str(adapter)]) == 0
    assert capsys.readouterr().out.strip() == printable(ask(merged, tmp_path / "digit.png", asked[1]))
    assert main(["ask", str(tiny_hf_dir("second")), *asked, "--adapter", str(adapter)]) == 2
    assert "is of another model" in capsys.readouterr().err


def test_a_module_that_was_trained_whole_stands_in_the_place_of_the_models(tmp_path):
    base = talkative_hf_dir()
    adapter = write_adapter(tmp_path / "adapter", base)
    tensors, name = load_file(adapter / "adapter_model.safetensors"), "model.visual.merger.norm.weight"
    changed = load_file(base / "model.safetensors")[name] * 2
    save_file(tensors | {f"base_model.model.{name}": changed}, adapter / "adapter_model.safetensors")
    generator = Generator(ModelDirectory(base), adapter=AdapterDirectory(adapter))
    assert torch.equal(generator.decoder.model.get_parameter(name), changed)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is computed"),
        ({"rank_pattern": {"q": 8}}, "rank_pattern is {'q': 8}, which is not computed here; merge the adapter"),
        ({"bias": "all"}, "bias is 'all', which is not computed here"),
        ({"r": 0}, "r is 0, no whole number above 0"),
        ({"r": 4.0}, "r is 4.0, no whole number above 0"),
        ({"r": True}, "r is True, no whole number above 0"),
        *(({"lora_alpha": value}, "lora_alpha is .*, no number above 0") for value in WRONG_NUMBERS),
        ({"use_dora": "false"}, "use_dora is 'false', no true or false"),
        ({"use_rslora": 1}, "use_rslora is 1, no true or false"),
        ({"target_modules": ["q_proj"]}, "target_modules leaves out model.*, which has an adapter"),
        ({"target_modules": 7}, "target_modules is 7, no list of names"),
        ({"exclude_modules": ["up_proj"]}, "target_modules leaves out .*up_proj, which has an adapter"),
        ({"layers_to_transform": [0]}, "target_modules leaves out .*, which has an adapter"),
        ({"target_modules": "all-linear"}, "has no adapter of .* others that target_modules names"),
        ({"r": 8}, "is of another model: .*lora_A.weight is .4, 64., and .* with r=8 asks for .8, 64."),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(config, words, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", tiny_hf_dir(), **config)
    with pytest.raises(InputError, match=words) as caught:
        AdapterDirectory(adapter).check_base(ModelDirectory(tiny_hf_dir()))
    assert "\n" not in str(caught.value)


def assert_refused(adapter: Path, words: str) -> None:
    """Both for a model that answers and for a training that starts from it, one line names the file."""
    for read in (lambda given: given.check_base(ModelDirectory(tiny_hf_dir())), adapter_input):
        with pytest.raises(InputError, match=words) as caught:
            read(AdapterDirectory(adapter))
        assert "\n" not in str(caught.value) and str(adapter) in str(caught.value)


PLACE = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
NAME_A, NAME_B, MAGNITUDE = (f"{PLACE}.lora_{name}" for name in ("A.weight", "B.weight", "magnitude_vector"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: held.pop(NAME_A), "lacks .*q_proj.lora_A.weight"),
        (lambda held: held.pop(NAME_B), "lacks .*q_proj.lora_B.weight"),
        (lambda held: held[NAME_A].view(-1)[7].fill_(float("nan")), "q_proj.lora_A.weight holds 1 num"),
        (lambda held: held[NAME_B].view(-1)[:3].fill_(float("inf")), "lora_B.weight holds 3 numbers"),
        (lambda held: held.update({NAME_A: torch.zeros(4, 64).int()}), "is of dtype I32; an adapter"),
        (lambda held: held.update({MAGNITUDE: torch.ones(64)}), "without use_dora holds .*q_proj"),
        (lambda held: held.update({"lm_head.weight": torch.ones(1)}), "lm_head.weight does not begin with base_model"),
    ],
)
def test_tensors_that_are_no_adapter_are_refused_in_one_line(change, words, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", tiny_hf_dir())
    adapter_input(AdapterDirectory(adapter))
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert_refused(adapter, f"adapter_model.safetensors.*{words}")


def test_an_adapter_of_another_model_is_refused_by_names_and_by_sizes(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", tiny_hf_dir(), base_model_name_or_path="Qwen/Other")
    words = r"up_proj.lora_A.weight is \[4, 64\], and .* asks for \[4, 48\]; give the model"
    with pytest.raises(InputError, match=words):
        AdapterDirectory(adapter).check_base(ModelDirectory(tiny_hf_dir("second")))
    with pytest.raises(InputError, match=r"is no weight of .*; give the model that it was trained on \(Qwen/Other\)"):
        AdapterDirectory(adapter).check_base(ModelDirectory(talkative_hybrid_dir()))
    (adapter / "adapter_model.safetensors").unlink()
    assert_refused(adapter, r"has no adapter_model\.safetensors; give a directory")


def test_an_adapters_digest_is_of_its_two_files(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", tiny_hf_dir())
    before = adapter_input(AdapterDirectory(adapter)).digest
    (adapter / "README.md").write_text("a card")
    assert adapter_input(AdapterDirectory(adapter)).digest == before
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 7}))
    assert adapter_input(AdapterDirectory(adapter)).digest != before
