"""The promise of `make run`: the default recipe from scratch, again, and with one setting changed. Nothing is faked.

CI runs `make run` as a user does and sets ATHANOR_DEFAULT_ROOT to the root that it made. Without it, these tests make
a run of their own."""

import os
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from dataset_builders.contracts.sample import IMAGE_SLOT
from dataset_builders.pictures.pixels import encode_image, pixel_values
from flows.tracking.store import connect
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.images import load_image_config
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.scoring.metrics.texts import normalize
from tests.e2e.command import athanor, only

pytestmark = pytest.mark.full
THREADS = {"OMP_NUM_THREADS": str(os.cpu_count())}
STAGES = (
    *("embedded_data", "embedded_model", "convert", "contamination", "tokenize", "plan_bins"),
    *("train", "export", "answer", "verify", "evaluate", "answer_base", "evaluate_base", "compare", "release"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return the root of one run of the default recipe."""
    if made := os.environ.get("ATHANOR_DEFAULT_ROOT"):
        return Path(made)
    directory = tmp_path_factory.mktemp("athanor-root")
    assert "15 of 15 stages made" in athanor("run", "--root", str(directory), **THREADS)
    return directory


def artifact(root: Path, stage: str) -> Artifact:
    """Return the artifact of a stage. `evaluate` has two, and this returns the one of the trained model."""
    if stage != "evaluate":
        return only(root, stage)
    return Artifact.load(root / "artifacts" / stage / artifact(root, "compare").manifest.parents["tuned"].fingerprint)


def stats(root: Path, stage: str) -> dict:
    return artifact(root, stage).manifest.stats


def test_fifteen_stages_are_made_and_the_model_is_registered(root):
    made = [path.parent.parent.name for path in root.glob("artifacts/*/*/manifest.json")]
    assert sorted(made) == sorted(stage.removesuffix("_base") for stage in STAGES)
    client = connect(root)
    (version,) = client.search_model_versions("name='athanor-embedded'")
    assert client.get_model_version_by_alias("athanor-embedded", "champion").version == version.version
    run = client.get_run(version.run_id)
    assert run.info.status == "FINISHED" and run.data.metrics["exact_match"] >= 0.9


@pytest.mark.promise(
    "The default recipe reads at least 95% of held-out digits on a CPU and ends at least 99% of its answers, "
    "also with Qwen3.5 and with experts."
)
def test_held_out_digits_are_read(root):
    """Training made the difference: random weights read no digit, and the page shows both answers."""
    result = stats(root, "evaluate")
    scores, counts = result["scores"]["digits_single"], result["counts"]["digits_single"]
    assert counts["pictures"] >= 250
    assert scores["exact_match"] >= 0.95
    assert scores["stop_rate"] >= 0.99
    found = stats(root, "compare")["subsets"]["digits_single"]
    assert found["base"]["value"] <= 0.2 and found["tuned"]["value"] >= 0.95
    assert found["difference"]["excludes_zero"] and found["difference"]["low"] > 0.7
    assert stats(root, "compare")["gains"]["score"][0] > 0.5
    compared = artifact(root, "compare").dir
    page, rows = (compared / "report.html").read_text(), pq.read_table(compared / "comparison.parquet").to_pylist()
    assert rows[0]["gain"] == 1.0 and f"after (1): {rows[0]['tuned']}" in page and "Better than before" in page


def test_a_second_run_makes_nothing_again(root):
    assert "0 of 15 stages made, 15 reused" in athanor("run", "--root", str(root), **THREADS)


def test_another_learning_rate_reruns_training_and_what_follows(root):
    plan = athanor("plan", "--root", str(root), "--set", "train.optim.lr=0.001")
    verdicts = dict(re.findall(r"^  (\w+) +(make|reuse)\b", plan, re.M))
    made = ("train", "export", "answer", "verify", "evaluate", "evaluate_base", "compare", "release")
    assert verdicts == {s: "make" if s in made else "reuse" for s in STAGES}
    assert re.search(r"train +make +optim\.lr: 0\.003 -> 0\.001", plan)


@pytest.mark.promise(
    "An export gives the same answers in transformers, PEFT and MLflow without athanor; a wrong scale, another "
    "base or other pixels are caught."
)
def test_transformers_scores_the_exported_directory_the_same(root):
    """Images and prompts are made by hand, one at a time. Model and tokenizer are only transformers'."""
    hf_dir = artifact(root, "export").dir / "hf"
    model = AutoModelForImageTextToText.from_pretrained(hf_dir, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(hf_dir, local_files_only=True)
    rows = pq.read_table(artifact(root, "evaluate").dir / "predictions.parquet").to_pylist()
    rows = [row for row in rows if row["subset"] == "digits_single"][:60]
    answers = [answer_by_hand(model, tokenizer, hf_dir, row) for row in rows]
    assert answers == [row["answer"] for row in rows]
    right = [normalize(answer) == normalize(row["reference"]) for answer, row in zip(answers, rows)]
    assert sum(right) == sum(row["score"] for row in rows)


def answer_by_hand(model, tokenizer, hf_dir: Path, row: dict) -> str:
    config = load_image_config(ModelDirectory(hf_dir))
    patches, grid = encode_image(row["image"], config)
    pixels = pixel_values(patches, config.patch_format)
    content = [{"type": "image"}, {"type": "text", "text": row["question"].replace(IMAGE_SLOT, "")}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    image_tokens = int(np.prod(grid)) // config.patch_format.merge_size**2
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * image_tokens), return_tensors="pt")["input_ids"]
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        pixel_values=torch.from_numpy(pixels),
        image_grid_thw=torch.from_numpy(np.asarray(grid, np.int64)[None]),
        max_new_tokens=16,
        do_sample=False,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
