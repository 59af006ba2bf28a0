"""The data set easy-VQA whole, from its package to a registered model. A tiny model takes a few steps on a CPU."""

import importlib
import json
from pathlib import Path

import pytest

from dataset_builders.contracts.sample import from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.known_version import installed_version
from flows.tracking.store import connect
from tests.e2e.command import athanor, only
from tests.helpers.json_rows import turns
from trainer.contract.result import read_metrics

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not installed_version("easy-vqa"), reason="needs the package easy-vqa: pip install -e '.[dev]'"),
    pytest.mark.promise(
        "The data set easy-VQA goes from its package to a registered model; no picture of its test split is trained on."
    ),
]

QUESTIONS = {"train": 38_575, "test": 9_673}
PICTURES = {"train": 4_000, "test": 1_000}
SMALL = (
    *("model={variant: qwen3_vl_tiny, seed: 0}", "plan_bins.seq_len=2048", "plan_bins.max_patches=4096"),
    *("train.num_epochs=null", "train.num_steps=25", "train.heldout_interval=25", "train.precision=float32"),
    *("train.optim.lr=3.0e-3", "evaluate.max_samples_per_subset=10"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return the root of one run."""
    directory = tmp_path_factory.mktemp("athanor-root")
    athanor("run", "easy_vqa", "--root", str(directory), *(f"--set={setting}" for setting in SMALL), seconds=900)
    return directory


@pytest.fixture(scope="module")
def samples(root) -> dict[str, dict]:
    """Return split -> key -> sample."""
    found = {"train": {}, "heldout": {}}
    converted = only(root, "convert")
    for shard in converted.manifest.shards:
        for key, fields in iter_records(converted.dir / shard.name):
            found[shard.split][key] = from_fields(key, fields)
    return found


def test_every_question_is_read_and_the_test_split_is_never_trained_on(root, samples):
    read = only(root, "embedded_easy_vqa").manifest.stats
    assert read["rows"] == {f"easy_vqa_{split}": count for split, count in PICTURES.items()}
    assert read["questions"] == {f"easy_vqa_{split}": count for split, count in QUESTIONS.items()}
    for split, held in (("train", "train"), ("test", "heldout")):
        keys = [f"easy_vqa_{split}/{number:08d}" for number in range(PICTURES[split])]
        assert sorted(samples[held]) == keys
        answers = [role for sample in samples[held].values() for role, _ in turns(sample) if role == "assistant"]
        assert len(answers) == QUESTIONS[split]
    trained = {image for sample in samples["train"].values() for image in sample.images}
    assert trained.isdisjoint(image for sample in samples["heldout"].values() for image in sample.images)
    epoch = only(root, "plan_bins").manifest.stats["epochs"][0]["subsets"]
    assert set(epoch) == {"easy_vqa_train"}


def test_the_answers_of_a_conversation_belong_to_its_picture(samples):
    """The package's own files say which."""
    data = Path(importlib.import_module("easy_vqa").__file__).parent / "data"
    for split, held in (("train", "train"), ("test", "heldout")):
        asked: dict[int, list[str]] = {}
        for question, answer, number in json.loads((data / split / "questions.json").read_text()):
            asked.setdefault(number, []).extend((question, answer))
        for number, texts in asked.items():
            sample = samples[held][f"easy_vqa_{split}/{number:08d}"]
            assert sample.images == ((data / split / "images" / f"{number}.png").read_bytes(),)
            assert [text for _, text in turns(sample)] == [f"<image>{texts[0]}", *texts[1:]]


def test_test_pictures_that_look_like_train_pictures_are_left_out_of_the_scores(root):
    found = only(root, "contamination").manifest.stats
    assert found["contaminated"]["easy_vqa_test"] == {"bytes": 0, "pixels": 0, "near": 7, "samples": 7}


def test_a_short_training_lowers_the_loss_and_registers_the_model(root):
    rows = read_metrics(only(root, "train").dir)
    assert len(rows) == 25 and rows[-1].heldout_loss < 1 < 4 < rows[0].loss
    scores = only(root, "evaluate").manifest.stats["scores"]["easy_vqa_test"]
    assert scores["score"] == scores["exact_match"] > 0.3 and scores["stop_rate"] == 1.0
    (version,) = connect(root).search_model_versions("name='athanor-easy-vqa'")
    assert connect(root).get_model_version_by_alias("athanor-easy-vqa", "champion").version == version.version
