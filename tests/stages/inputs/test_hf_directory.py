"""An HF directory: what is wrong with it is said in one line, and its digests follow its content."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from dataset_builders.errors import InputError
from stages.inputs.hf_directory import check_hf_dir, count_parameters, model_input, processor_input, resolve_hf_dir
from tests.helpers.tiny_model import SHAPES, tiny_hf_dir


@pytest.fixture
def hf_dir(tmp_path) -> Path:
    return Path(shutil.copytree(tiny_hf_dir(), tmp_path / "model"))


def _edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        check_hf_dir(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_a_whole_directory_passes(hf_dir):
    check_hf_dir(hf_dir)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("preprocessor_config.json", "no preprocessor_config.json"),
        ("chat_template.jinja", "no chat template"),
        ("model.safetensors", "no weights"),
    ],
)
def test_a_missing_file_is_named(hf_dir, name, words):
    (hf_dir / name).unlink()
    assert words in _refusal(hf_dir)


def test_a_missing_directory_is_named(tmp_path):
    assert "does not exist" in _refusal(tmp_path / "nowhere")


def test_another_architecture_is_refused_with_the_list(hf_dir):
    _edit(hf_dir / "config.json", model_type="llava")
    assert "'llava'; supported: qwen3, qwen3_vl" in _refusal(hf_dir)


def test_a_broken_json_is_named(hf_dir):
    (hf_dir / "config.json").write_text("{")
    assert "config.json cannot be read as JSON" in _refusal(hf_dir)


@pytest.mark.parametrize("kept", [0, 5, 2000, -1])
def test_weights_cut_short_are_refused(hf_dir, kept):
    data = (hf_dir / "model.safetensors").read_bytes()
    (hf_dir / "model.safetensors").write_bytes(data[:kept])
    assert "copy it again" in _refusal(hf_dir)


def _shard(hf_dir: Path) -> dict[str, torch.Tensor]:
    """Two weight files with an index, as large models have them."""
    tensors = load_file(hf_dir / "model.safetensors")
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, hf_dir / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (hf_dir / "model.safetensors").unlink()
    return tensors


def test_sharded_weights_pass_and_what_is_missing_is_named(hf_dir):
    whole = count_parameters(hf_dir)
    _shard(hf_dir)
    check_hf_dir(hf_dir)
    assert count_parameters(hf_dir) == whole
    second = hf_dir / "model-00002-of-00002.safetensors"
    tensors = load_file(second)
    name, _ = tensors.popitem()
    save_file(tensors, second)
    assert f"lacks {name} (1 tensors" in _refusal(hf_dir)
    second.unlink()
    assert "names model-00002-of-00002.safetensors, which is missing" in _refusal(hf_dir)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_counted_by_part(shape):
    model = AutoModelForImageTextToText.from_pretrained(tiny_hf_dir(shape), local_files_only=True)
    visual = model.model.visual
    merger = sum(p.numel() for m in (visual.merger, visual.deepstack_merger_list) for p in m.parameters())
    vision = sum(p.numel() for p in visual.parameters()) - merger
    language = sum(p.numel() for p in model.parameters()) - vision - merger
    assert count_parameters(tiny_hf_dir(shape)) == {"vision": vision, "merger": merger, "language": language}


def test_digests_follow_content_not_place(hf_dir):
    original = tiny_hf_dir()
    assert processor_input(hf_dir).parent() == processor_input(original).parent()
    assert model_input(hf_dir).parent() == model_input(original).parent()
    assert len(processor_input(hf_dir).digest) == len(model_input(hf_dir).digest) == 16
    assert (processor_input(hf_dir).name, model_input(hf_dir).name) == ("processor", "hf_dir")


def test_weights_matter_to_the_model_and_not_to_the_processor(hf_dir):
    processor, model = processor_input(hf_dir).digest, model_input(hf_dir).digest
    data = bytearray((hf_dir / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (hf_dir / "model.safetensors").write_bytes(data)
    assert processor_input(hf_dir).digest == processor and model_input(hf_dir).digest != model


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "preprocessor_config.json"])
def test_processor_files_matter_to_both(hf_dir, name):
    processor, model = processor_input(hf_dir).digest, model_input(hf_dir).digest
    (hf_dir / name).write_text((hf_dir / name).read_text() + "\n")
    assert processor_input(hf_dir).digest != processor and model_input(hf_dir).digest != model


def test_token_ids_of_the_config_matter_to_the_processor(hf_dir):
    before = processor_input(hf_dir).digest
    _edit(hf_dir / "config.json", torch_dtype="bfloat16")
    assert processor_input(hf_dir).digest == before
    _edit(hf_dir / "config.json", image_token_id=3)
    assert processor_input(hf_dir).digest != before


def test_a_local_directory_is_itself(hf_dir, monkeypatch):
    monkeypatch.chdir(hf_dir.parent)
    assert resolve_hf_dir("model") == hf_dir


def test_neither_directory_nor_hub_name():
    with pytest.raises(InputError, match="not a directory here, nor a hub name"):
        resolve_hf_dir("./no/such/directory")


def test_a_hub_name_without_network(monkeypatch):
    def offline(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(InputError, match=r"'some/model'.*hub cannot be reached.*give that directory"):
        resolve_hf_dir("some/model")
