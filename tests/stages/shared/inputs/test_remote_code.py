"""A model directory that contains code: refused with the fix, never run, accepted only by its hash."""

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dataset_builders.errors import InputError
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import load_recipe
from stages.answer.transformers_engine import Generator
from stages.export.stage import copy_processor_files
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.inputs.remote_code import check_remote_code, drop_auto_maps
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "Secrets appear in no file, log, database or command line of a run, servers ask for a login, and no "
    "foreign pickle or code runs."
)

AUTO_MAPS = {
    "config.json": {"AutoConfig": "code.Config", "AutoModelForImageTextToText": "code.Model"},
    "tokenizer_config.json": {"AutoTokenizer": ["code.Tokenizer", None]},
    "preprocessor_config.json": {"AutoImageProcessor": "code.Processor"},
    "processor_config.json": {"AutoProcessor": "somebody/repo--code.Processor"},
    "generation_config.json": {"AutoGenerator": "code.Generator"},
}


@pytest.fixture
def hf_dir(tmp_path) -> Path:
    return Path(shutil.copytree(tiny_hf_dir(), tmp_path / "model"))


def add(file: Path, **values: object) -> None:
    content = json.loads(file.read_bytes()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **values}))


def bring_code(hf_dir: Path) -> Path:
    """Write code that makes a file when imported, named wherever transformers looks; return that file's path."""
    touched = hf_dir.parent / "touched"
    (hf_dir / "code.py").write_text(
        f"from pathlib import Path\nPath({str(touched)!r}).touch()\n"
        "class Config: pass\nclass Model: pass\nclass Tokenizer: pass\nclass Processor: pass\n"
    )
    for name, auto_map in AUTO_MAPS.items():
        add(hf_dir / name, auto_map=auto_map)
    return touched


def refusal(path: Path, allowed: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        ModelDirectory(path).check_weights(allowed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def code_sha256(hf_dir: Path) -> str:
    """Return the hash named in the refusal of a directory."""
    return re.search("say execution.model_code_sha256=([0-9a-f]{64})", refusal(hf_dir)).group(1)


def test_a_directory_without_code_passes(hf_dir):
    check_remote_code(hf_dir)
    check_remote_code(hf_dir, "0" * 64)


@pytest.mark.parametrize("name", [*AUTO_MAPS, "config2.json", "config.4.0.0.json", "my_config_old.json"])
def test_an_auto_map_is_refused_with_its_file(hf_dir, name):
    add(hf_dir / name, auto_map=AUTO_MAPS.get(name, AUTO_MAPS["config.json"]))
    line = refusal(hf_dir)
    assert line.startswith(f"{hf_dir / name} names code to be run (auto_map); athanor needs none: copy the directory")
    ModelDirectory(hf_dir).check_weights(code_sha256(hf_dir))


def test_an_inner_auto_map_is_found(hf_dir):
    config = json.loads((hf_dir / "config.json").read_bytes())
    add(hf_dir / "config.json", text_config={**config["text_config"], "auto_map": {"AutoModel": "code.Model"}})
    assert "config.json names code" in refusal(hf_dir)


def test_an_auto_map_that_is_there_twice_is_refused(hf_dir):
    """Python's json takes the last auto_map; another reader may take the first."""
    text = (hf_dir / "tokenizer_config.json").read_text().rstrip().removesuffix("}")
    code = '"auto_map": {"AutoTokenizer": "code.Tokenizer"}'
    (hf_dir / "tokenizer_config.json").write_text(f'{text}, {code}, "auto_map": {{}}}}')
    assert "tokenizer_config.json names code to be run" in refusal(hf_dir)
    drop_auto_maps(hf_dir)
    ModelDirectory(hf_dir).check_weights()


@pytest.mark.parametrize("name", ["code.py", "custom_generate/generate.py", "deep/er/fast.so", "code.PY"])
def test_a_file_of_code_is_refused(hf_dir, name):
    (hf_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (hf_dir / name).write_bytes(b"")
    assert refusal(hf_dir).startswith(f"{hf_dir / name} is code; athanor needs none")


def test_the_hash_allows_this_code_and_no_other(hf_dir):
    bring_code(hf_dir)
    allowed = code_sha256(hf_dir)
    ModelDirectory(hf_dir).check_weights(allowed)
    (hf_dir / "code.py").write_text("# changed")
    line = refusal(hf_dir, allowed)
    assert f"and not the code of execution.model_code_sha256={allowed}" in line and code_sha256(hf_dir) in line
    shutil.rmtree(hf_dir)
    shutil.copytree(tiny_hf_dir(), hf_dir)
    bring_code(hf_dir)
    (hf_dir / "more.py").write_text("")
    refusal(hf_dir, allowed)


@pytest.mark.parametrize("load", [ChatEncoder, Generator])
def test_allowed_code_is_not_run_either(hf_dir, load, monkeypatch):
    """The test calls every function that reads a directory with transformers."""
    touched = bring_code(hf_dir)
    monkeypatch.setattr("builtins.input", lambda _text: "y")  # transformers would ask if it had no class of its own
    model = ModelDirectory(hf_dir)
    model.check_weights(code_sha256(hf_dir))
    load(model)
    assert not touched.exists()


def test_that_code_would_run_where_transformers_is_told_to(hf_dir):
    touched = bring_code(hf_dir)
    with pytest.raises(Exception, match=r"Tokenizer|Config|no attribute"):
        AutoTokenizer.from_pretrained(hf_dir, trust_remote_code=True, local_files_only=True)
    assert touched.exists()


def test_the_recipe_says_which(hf_dir, tmp_path):
    bring_code(hf_dir)
    with pytest.raises(InputError, match="names code to be run"):
        Plan.open(load_recipe(overrides=[f"model={hf_dir}"]), tmp_path)
    sets = [f"model={hf_dir}", f"execution.model_code_sha256={code_sha256(hf_dir)}"]
    assert Plan.open(load_recipe(overrides=sets), tmp_path).given["model"].dir == hf_dir


def test_an_export_names_no_code(hf_dir, tmp_path):
    bring_code(hf_dir)
    out = tmp_path / "export"
    out.mkdir()
    shutil.copyfile(hf_dir / "model.safetensors", out / "model.safetensors")
    copy_processor_files(hf_dir, out, {})
    ModelDirectory(out).check_weights()
    before = {file: file.read_bytes() for file in out.iterdir()}
    drop_auto_maps(out)
    assert {file: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json"])
def test_weights_that_are_pickles_are_not_taken(hf_dir, name):
    (hf_dir / "model.safetensors").rename(hf_dir / name)
    line = "has no weights (model.safetensors or model.safetensors.index.json); other formats are not read"
    assert line in refusal(hf_dir)
    with pytest.raises(InputError, match="has no weights"):
        Generator(ModelDirectory(hf_dir))
