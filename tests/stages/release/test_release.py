"""The release stage: the export's files, its card, and the input of the card."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from stages.release import directory
from stages.release.flavor import FLAVOR_FILES
from stages.release.hub import push_to_hub
from stages.release.stage import STAGE, ReleaseConfig
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.verify import check_inputs
from stages.shared.chat_format.config import BoxFormat
from stages.shared.chat_format.prompt import BOX_FORMAT
from tests.helpers.boxes import asked_sample
from tests.helpers.evaluation import conversation, hf_artifact, picture, samples_artifact
from tests.helpers.tiny_model import tiny_hf_dir
from tests.stages.artifacts import stage_artifact

pytestmark = pytest.mark.promise(
    "The hub's own client downloads data and takes a release, tested against a local server; the hub reads its "
    "model card."
)

CONFIG = ReleaseConfig(
    name="athanor-digits", base_model=None, datasets=["drawn"], recipe={"name": "digits", "train": {"num_steps": 3}}
)
INTERVAL = {"low": 0.25, "high": 0.75, "level": 0.95}
EVALUATED = {
    "scores": {"digits": {"cer": 0.5, "score": 0.5, "stop_rate": 1.0}, "overall": {"cer": 0.5, "score": 0.5}},
    "headlines": {
        "digits": {"metric": "cer", "value": 0.5, **INTERVAL},
        "overall": {"metric": "score", "value": 0.5, **INTERVAL},
    },
    "counts": {name: {"samples": 6, "answers": 7, "contaminated": 2} for name in ("digits", "overall")},
}
ORIGINS = {"digits": {"builder": "the_cauldron", "name": "digits"}}
COMPARED = {"subsets": {"digits": {"base": {"value": 0.875}, "base_score": 0.125}, "overall": {}}}
FOUND = {"contaminated": {"overall": {"samples": 2, "bytes": 0, "pixels": 1, "near": 1}}}


def with_stats(artifact: Artifact, **stats: object) -> Artifact:
    """Return the artifact with more figures."""
    stats = {**artifact.manifest.stats, **stats}
    return Artifact(artifact.dir, artifact.manifest.model_copy(update={"stats": stats}))


@pytest.fixture
def inputs(tmp_path) -> dict[str, Artifact]:
    def made(stage: str, **stats: object) -> Artifact:
        return stage_artifact(tmp_path / stage, stage, stats=stats)

    exported = hf_artifact(tmp_path / "export", tiny_hf_dir())
    return {
        "export": with_stats(exported, dtype="float32", parameters={"vision": 3}, active_parameters=3),
        "train": made("train", steps=3, loss=0.5),
        "samples": made("convert", samples={"digits": {"train": 20, "heldout": 8}}, origins=ORIGINS),
        "evaluate": made("evaluate", **EVALUATED),
        "compare": made("compare", **COMPARED),
        "contamination": made("contamination", **FOUND),
    }


def released(inputs, root: Path) -> Path:
    """Return the directory that is given away."""
    return run_stage(STAGE, CONFIG, inputs, root).artifact.dir / "hf"


def card_of(inputs, root: Path) -> str:
    return (released(inputs, root) / "README.md").read_text()


def test_it_is_the_export_with_a_card(inputs, tmp_path):
    hf_dir = released(inputs, tmp_path / "root")
    files = {file.name for file in (inputs["export"].dir / "hf").iterdir()}
    assert {file.name for file in hf_dir.iterdir()} == files | {"README.md"}
    assert all(os.path.samefile(inputs["export"].dir / "hf" / name, hf_dir / name) for name in files)
    card = ModelCard.load(hf_dir / "README.md")
    assert [(r.dataset_config, r.metric_type, r.metric_value) for r in card.data.eval_results] == [
        *(("digits", "cer", 0.5), ("digits", "stop_rate", 1.0)),
        *(("overall", "score", 0.5), ("overall", "cer", 0.5)),
    ]
    assert "| digits | cer | 0.5 | 0.25 to 0.75 | 0.875 | 7 |" in card.text
    assert "| overall | score | 0.5 | 0.25 to 0.75 | 0.125 | 7 |" in card.text
    assert "2 samples with a picture that occurs in train or looks alike are left out" in card.text
    assert "| overall | 2 | 0 | 1 | 1 |" in card.text and "num_steps: 3" in card.text


@pytest.mark.promise(
    "A damaged record, shard, index, plan, manifest or exported weight is not used, and one line names it."
)
def test_a_bit_of_the_one_file_with_two_names_is_noticed_under_both(inputs, tmp_path):
    """The fix takes two steps: first the export is made again, then its release."""
    made = run_stage(STAGE, CONFIG, inputs, tmp_path / "root").artifact
    names = {entry.name for entry in inputs["export"].manifest.files}
    assert {entry.name for entry in made.manifest.files} == {*names, "hf/README.md", *FLAVOR_FILES} and len(names) > 5
    check_inputs({"hf": made})
    weights = made.dir / "hf" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for artifact in (made, inputs["export"]):
        with pytest.raises(InputError, match=f"model.safetensors is damaged: .*; delete {artifact.dir} and run"):
            check_inputs({"hf": artifact})
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        push_to_hub(made.dir / "hf", "somebody/model")
    with pytest.raises(InputError, match=f"model.safetensors is damaged: .*; delete {made.dir} and run"):
        released(inputs, tmp_path / "root")
    shutil.rmtree(made.dir)
    with pytest.raises(InputError, match=f"delete {inputs['export'].dir} and run"):
        released(inputs, tmp_path / "root")


def test_files_are_copied_where_they_cannot_have_two_names(inputs, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(directory.os, "link", refuse)
    hf_dir = released(inputs, tmp_path / "root")
    for file in (inputs["export"].dir / "hf").iterdir():
        assert (hf_dir / file.name).read_bytes() == file.read_bytes()


@pytest.mark.promise(
    "Boxes are written in the model's convention and the recipe's form where a prompt is made, in training, in every "
    "question and in an export; no text reaches a model with boxes that are not written."
)
def test_the_form_of_boxes_is_on_the_card_and_no_mark_of_boxes_is_in_the_example(inputs, tmp_path):
    shown = conversation("plain/00000000", [("<image>Which digit?", "7")], [picture(1)])
    samples = samples_artifact(tmp_path / "heldout", [asked_sample(), shown])
    samples = with_stats(samples, **inputs["samples"].manifest.stats)
    write_json(inputs["export"].dir / "hf" / BOX_FORMAT, BoxFormat(form="lines").model_dump())
    hf_dir = released(inputs | {"samples": samples}, tmp_path / "root")
    assert "Boxes are read and written as `label: [x1, y1, x2, y2]`, one a line" in (hf_dir / "README.md").read_text()
    assert "<image>Which digit?" in (hf_dir.parent / "input_example.json").read_text()


def test_without_comparison_and_search_the_card_says_so(inputs, tmp_path):
    del inputs["compare"], inputs["contamination"]
    card = card_of(inputs, tmp_path / "root")
    assert "| digits | cer | 0.5 | 0.25 to 0.75 |   | 7 |" in card and "Not looked for." in card


def test_tensors_that_were_only_carried_are_said_to_be_the_base_models(inputs, tmp_path):
    assert "speculative" not in card_of(inputs, tmp_path / "plain")
    carried = with_stats(inputs["export"], carried={"mtp.": 15})
    card = card_of({**inputs, "export": carried}, tmp_path / "carried")
    assert "The 15 tensors `mtp.*` are those of the base model, unchanged" in card
    card = card_of({**inputs, "export": with_stats(inputs["export"], mtp=15)}, tmp_path / "trained")
    assert "The 15 tensors of multi-token prediction" in card and "unchanged" not in card


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="says what fails without torchvision")
def test_what_the_card_says_of_torchvision_is_so(inputs, tmp_path):
    hf_dir = released(inputs, tmp_path / "root")
    card = (hf_dir / "README.md").read_text()
    assert "`AutoProcessor` needs torchvision (`pip install torchvision`" in card
    assert "`AutoTokenizer` and `AutoImageProcessor` load without it" in card
    with pytest.raises(ImportError, match="requires the Torchvision library"):
        AutoProcessor.from_pretrained(hf_dir, local_files_only=True)
    for auto in (AutoModelForImageTextToText, AutoTokenizer, AutoImageProcessor):
        auto.from_pretrained(hf_dir, local_files_only=True)
