"""The stage that reads the package easy-vqa, on a stand-in for the package: three pictures, seven questions."""

import json
import sys

import pytest

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.sources.the_cauldron import CauldronOptions, iter_part, list_parts
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import load_recipe
from stages.embedded_data.easy_vqa import STAGE
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.config import EmbeddedEasyVqaConfig
from tests.helpers.json_rows import turns
from tests.helpers.raw_rows import png
from tests.helpers.trees import tree_digest

CONFIG = EmbeddedEasyVqaConfig(kind="easy_vqa")
# As in the package: question, answer, number of the picture. Questions about two pictures are mixed on purpose.
TRAIN = [["what shape?", "circle", 1], ["is it red?", "yes", 0], ["is it blue?", "no", 1], ["a circle?", "no", 0]]
TEST = [["is it red?", "no", 0], ["what colour is it?", "teal", 0], ["a circle?", "yes", 0]]
MODULE = """
import json
from pathlib import Path

DATA = Path(__file__).parent / "data"

def _questions(split):
    return [list(column) for column in zip(*json.loads((DATA / split / "questions.json").read_text()))]

def _paths(split):
    return {int(path.stem): str(path) for path in (DATA / split / "images").glob("*.png")}

def get_train_questions(): return _questions("train")
def get_test_questions(): return _questions("test")
def get_train_image_paths(): return _paths("train")
def get_test_image_paths(): return _paths("test")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install the stand-in, and return the directory of its data."""
    site = tmp_path / "site"
    for split, rows, seeds in (("train", TRAIN, (0, 1)), ("test", TEST, (2,))):
        images = site / "easy_vqa" / "data" / split / "images"
        images.mkdir(parents=True)
        (images.parent / "questions.json").write_text(json.dumps(rows))
        for number, seed in enumerate(seeds):
            (images / f"{number}.png").write_bytes(png(seed, 64, 64))
    (site / "easy_vqa" / "__init__.py").write_text(MODULE)
    (site / "easy_vqa-1.0.dist-info").mkdir()
    (site / "easy_vqa-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: easy-vqa\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "easy_vqa", raising=False)
    yield site / "easy_vqa" / "data"
    sys.modules.pop("easy_vqa", None)


def test_a_picture_and_all_its_questions_are_one_conversation(package, tmp_path):
    artifact = run_stage(STAGE, CONFIG, {}, tmp_path).artifact
    assert artifact.manifest.stats == {
        "rows": {"easy_vqa_train": 2, "easy_vqa_test": 1},
        "questions": {"easy_vqa_train": 4, "easy_vqa_test": 3},
    }
    options = CauldronOptions(turns="chat")
    parts = list_parts(artifact.dir, (), options)
    samples = {sample.key: sample for part in parts for sample in iter_part(part, options)}
    assert all(isinstance(sample, Sample) for sample in samples.values())
    for split, rows, count in (("train", TRAIN, 2), ("test", TEST, 1)):
        for number in range(count):
            sample = samples.pop(f"easy_vqa_{split}/{number:08d}")
            assert sample.images == ((package / split / "images" / f"{number}.png").read_bytes(),)
            asked = [text for question, answer, of in rows if of == number for text in (question, answer)]
            assert [text for _, text in turns(sample)] == [f"<image>{asked[0]}", *asked[1:]]
    assert samples == {}
    files = [f"easy_vqa_{split}/{split}-00000-of-00001.parquet" for split in ("test", "train")]
    assert [entry.name for entry in artifact.manifest.files] == files


def test_rebuilt_it_has_the_same_bytes_and_another_version_is_another_artifact(package, tmp_path):
    one, two = (run_stage(STAGE, CONFIG, {}, tmp_path / name).artifact.dir for name in "ab")
    assert tree_digest(one) == tree_digest(two)
    metadata = package.parents[1] / "easy_vqa-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "1.1"))
    with pytest.raises(InputError, match=r"the package easy-vqa 1\.0, and 1\.1 is installed: "):
        run_stage(STAGE, CONFIG, {}, tmp_path / "c")
    newer = CONFIG.model_copy(update={"version": "1.1"})
    assert run_stage(STAGE, newer, {}, tmp_path / "a").artifact.dir.name != one.name


@pytest.mark.parametrize("lost", ["train/images/1.png", "test/questions.json"])
def test_an_incomplete_package_is_one_line(lost, package, tmp_path):
    if lost.endswith("png"):
        (package / lost).unlink()
    else:
        (package / lost).write_text(json.dumps([*TEST, ["is it red?", "yes", 7]]))
    with pytest.raises(InputError, match=r"easy-vqa in .* is incomplete: its t\w+ split has 1 pictures, .* about 2;"):
        run_stage(STAGE, CONFIG, {}, tmp_path)


def test_a_run_without_the_package_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("dataset_builders.sources.embedded.installed_version", lambda package: "")
    with pytest.raises(InputError) as refused:
        Plan.open(load_recipe("easy_vqa"), tmp_path)
    assert str(refused.value) == (
        "data.kind=easy_vqa reads the package easy-vqa 1.0, and it is not installed: pip install -e '.[easy-vqa]'"
    )
    assert list(tmp_path.iterdir()) == []
