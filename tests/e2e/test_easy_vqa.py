"""The data set easy-VQA whole, from its package to a registered model. A tiny model takes a few steps on a CPU."""

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataset_builders.contracts.manifest import load_manifest
from dataset_builders.contracts.sample import from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.known_version import installed_version
from flows.tracking.store import connect
from tests.helpers.json_rows import turns
from tests.helpers.patience import at_most
from trainer.contract.result import read_metrics

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not installed_version("easy-vqa"), reason="needs the package easy-vqa: pip install -e '.[dev]'"),
    pytest.mark.promise(
        "The data set easy-VQA goes from its package to a registered model; no picture of its test split is trained on."
    ),
]

ATHANOR = Path(sys.executable).parent / "athanor"
QUESTIONS = {"train": 38_575, "test": 9_673}
PICTURES = {"train": 4_000, "test": 1_000}
SMALL = (
    *("model={variant: qwen3_vl_tiny, seed: 0}", "plan_bins.seq_len=2048", "plan_bins.max_patches=4096"),
    *("train.num_epochs=null", "train.num_steps=25", "train.heldout_interval=25", "train.precision=float32"),
    *("train.optim.lr=3.0e-3", "evaluate.max_samples_per_subset=10"),
)
SHADES = {
    **{"black": (0, 0, 0), "gray": (128, 128, 128), "red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 255, 0)},
    **{"yellow": (255, 255, 0), "teal": (0, 128, 128), "brown": (165, 42, 42)},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return the root of one run."""
    directory = tmp_path_factory.mktemp("athanor-root")
    env = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")}
    command = [ATHANOR, "run", "easy_vqa", "--root", str(directory), *(f"--set={setting}" for setting in SMALL)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=at_most(900))
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def artifact(root: Path, stage: str) -> Path:
    (directory,) = (root / "artifacts" / stage).iterdir()
    return directory


@pytest.fixture(scope="module")
def samples(root) -> dict[str, dict]:
    """Return split -> key -> sample."""
    found = {"train": {}, "heldout": {}}
    converted = artifact(root, "convert")
    for shard in load_manifest(converted).shards:
        for key, fields in iter_records(converted / shard.name):
            found[shard.split][key] = from_fields(key, fields)
    return found


def test_every_question_is_read_and_the_test_split_is_never_trained_on(root, samples):
    read = load_manifest(artifact(root, "embedded_easy_vqa")).stats
    assert read["rows"] == {f"easy_vqa_{split}": count for split, count in PICTURES.items()}
    assert read["questions"] == {f"easy_vqa_{split}": count for split, count in QUESTIONS.items()}
    for split, held in (("train", "train"), ("test", "heldout")):
        keys = [f"easy_vqa_{split}/{number:08d}" for number in range(PICTURES[split])]
        assert sorted(samples[held]) == keys
        answers = [role for sample in samples[held].values() for role, _ in turns(sample) if role == "assistant"]
        assert len(answers) == QUESTIONS[split]
    trained = {image for sample in samples["train"].values() for image in sample.images}
    assert trained.isdisjoint(image for sample in samples["heldout"].values() for image in sample.images)
    epoch = load_manifest(artifact(root, "plan_bins")).stats["epochs"][0]["subsets"]
    assert set(epoch) == {"easy_vqa_train"}


def test_the_answers_of_a_conversation_belong_to_its_picture(samples):
    """The package's own files say which; and an answer that names a colour is the shape's colour in the picture."""
    data, colours = Path(importlib.import_module("easy_vqa").__file__).parent / "data", 0
    for split, held in (("train", "train"), ("test", "heldout")):
        asked: dict[int, list[str]] = {}
        for question, answer, number in json.loads((data / split / "questions.json").read_text()):
            asked.setdefault(number, []).extend((question, answer))
        for number, texts in asked.items():
            sample = samples[held][f"easy_vqa_{split}/{number:08d}"]
            assert sample.images == ((data / split / "images" / f"{number}.png").read_bytes(),)
            assert [text for _, text in turns(sample)] == [f"<image>{texts[0]}", *texts[1:]]
            named = {SHADES[text] for text in texts[1::2] if text in SHADES}
            assert len(named) <= 1
            colours += len(named)
            assert named <= {shape_colour(sample.images[0])}
    assert colours > 3_000


def shape_colour(image: bytes) -> tuple[int, ...]:
    """Return the most frequent colour beside that of the ground, which is a light one."""
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).reshape(-1, 3)
    found, counts = np.unique(pixels[pixels.min(axis=1) < 200], axis=0, return_counts=True)
    return tuple(found[counts.argmax()].tolist())


def test_test_pictures_that_look_like_train_pictures_are_left_out_of_the_scores(root):
    found = load_manifest(artifact(root, "contamination")).stats
    assert found["contaminated"]["easy_vqa_test"] == {"bytes": 0, "pixels": 0, "near": 7, "samples": 7}


def test_a_short_training_lowers_the_loss_and_registers_the_model(root):
    rows = read_metrics(artifact(root, "train"))
    assert len(rows) == 25 and rows[-1].heldout_loss < 1 < 4 < rows[0].loss
    scores = load_manifest(artifact(root, "evaluate")).stats["scores"]["easy_vqa_test"]
    assert scores["score"] == scores["exact_match"] > 0.3 and scores["stop_rate"] == 1.0
    (version,) = connect(root).search_model_versions("name='athanor-easy-vqa'")
    assert connect(root).get_model_version_by_alias("athanor-easy-vqa", "champion").version == version.version
