"""The differences between an export and the model before training that answers do not show."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.shared.inputs.model_directory import ModelDirectory
from stages.verify.directory import differences
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "An export gives the same answers in transformers, PEFT and MLflow without athanor; a wrong scale, another "
    "base or other pixels are caught."
)

WEIGHTS = "model.safetensors"


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(directory / WEIGHTS)), directory / WEIGHTS, metadata={"format": "pt"})


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def untie(directory: Path) -> None:
    embedding = "model.language_model.embed_tokens.weight"
    change_tensors(directory, lambda tensors: tensors | {"lm_head.weight": tensors[embedding].clone()})


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "lost mtp": (
        lambda d: change_tensors(d, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("mtp.")}),
        "2 tensors are missing, the first is mtp.fc.weight",
    ),
    "other mtp": (
        lambda d: change_tensors(d, lambda tensors: tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"] + 1}),
        "1 copied tensors have other bytes than the source's, the first is mtp.fc.weight",
    ),
    "dtype": (
        lambda d: change_tensors(d, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()}),
        "tensors have another dtype: model.language_model.embed_tokens.weight is BF16, in the source F32",
    ),
    "untied": (untie, "lm_head.weight is stored, although tie_word_embeddings makes it the embedding"),
    "tied flag": (
        lambda d: edit(d / "config.json", tie_word_embeddings=False),
        "config.json: tie_word_embeddings is false, in the source true",
    ),
    "no template": (lambda d: (d / "chat_template.jinja").unlink(), "chat_template.jinja is missing"),
    "other template": (
        lambda d: (d / "chat_template.jinja").write_text("{{ messages }}"),
        "chat_template.jinja is not the source's",
    ),
    "normalisation": (
        lambda d: edit(d / "preprocessor_config.json", image_mean=[0.4, 0.4, 0.4]),
        "preprocessor_config.json: image_mean is [0.4, 0.4, 0.4], in the source [0.5, 0.5, 0.5]",
    ),
    "patch size": (
        lambda d: edit(d / "preprocessor_config.json", patch_size=14),
        "preprocessor_config.json: patch_size is 14, in the source 16",
    ),
    "end of turn": (
        lambda d: edit(d / "generation_config.json", eos_token_id=0),
        "generation_config.json: eos_token_id is 0, in the source [",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_named(change, tmp_path):
    export = shutil.copytree(hybrid_hf_dir(), tmp_path / "export")
    make, line = CHANGES[change]
    make(export)
    (found,) = differences(export, ModelDirectory(hybrid_hf_dir()), ["mtp."])
    assert line in found


def test_what_a_training_changes_is_no_difference(tmp_path):
    """The pixel limits, the dtype that the config names, the system prompt, the form of boxes, a tied matrix that the
    source stores."""
    source = shutil.copytree(tiny_hf_dir(), tmp_path / "source")
    untie(source)
    edit(source / "config.json", dtype="bfloat16", auto_map={"AutoModel": "code.Model"})
    export = shutil.copytree(tiny_hf_dir(), tmp_path / "export")
    edit(export / "preprocessor_config.json", size={"shortest_edge": 1024, "longest_edge": 2048})
    for directory, form in ((source, "lines"), (export, "fenced")):
        (directory / "system_prompt.txt").write_text(f"Be {form}.")
        (directory / "box_format.json").write_text(f'{{"form": "{form}"}}')
    assert differences(export, ModelDirectory(source)) == []


def test_a_trained_tensor_is_no_difference(tmp_path):
    export = shutil.copytree(hybrid_hf_dir(), tmp_path / "export")
    change_tensors(export, lambda tensors: {n: t if n.startswith("mtp.") else t * 2 for n, t in tensors.items()})
    assert differences(export, ModelDirectory(hybrid_hf_dir()), ["mtp."]) == []
