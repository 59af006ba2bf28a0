"""tokenize with boxes: the stored ids are those of the texts as written by hand."""

import numpy as np
import pytest

from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import read_pixel_store
from dataset_builders.records.pixel_codecs import decode_sample
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import BoxFormat
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize.stage import STAGE, TokenizeConfig
from tests.helpers.boxes import ONE, WRITTEN, boxed_sample
from tests.helpers.index import read_index
from tests.helpers.samples import make_sample, make_samples_artifact, turns
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir

pytestmark = pytest.mark.promise(
    "Boxes are written in the model's convention and the recipe's form where a prompt is made, in training, in every "
    "question and in an export; no text reaches a model with boxes that are not written."
)


def tokenized(tmp_path, hf_dir=None, samples=None, **changes) -> Artifact:
    config = TokenizeConfig(**{"max_seq_len": 2048, "max_pixels": None, "max_skip_fraction": 1.0} | changes)
    made = make_samples_artifact(tmp_path / "samples", {"train/shard-00000.tar": samples or [boxed_sample()]})
    inputs = {"samples": made, "processor": processor_input(ModelDirectory(hf_dir or tiny_hf_dir()))}
    return run_stage(STAGE, config, inputs, tmp_path / "root").artifact


@pytest.mark.parametrize(("convention", "form"), WRITTEN)
def test_the_stored_ids_are_those_of_the_text_by_hand(convention, form, tmp_path):
    made = tokenized(tmp_path, boxes=BoxFormat(convention=convention, form=form))
    (row,) = read_index(made.dir).to_pylist()
    fields = read_record(made.dir / row["shard"], row["offset"], row["size"])
    stored = decode_sample(row["key"], fields, read_pixel_store(made.dir, made.manifest.stats))
    text = f"Here: {WRITTEN[convention, form]}"
    by_hand = turns("<image>Find all.", text, f"What is at {ONE[convention]}?", "a dog")
    ids, mask = ChatEncoder(ModelDirectory(tiny_hf_dir())).encode(by_hand, np.array([[1, 12, 18]], np.int32))
    assert stored.input_ids.tolist() == ids.tolist() and stored.loss_mask.tolist() == mask.tolist()
    assert made.manifest.stats["checked"]["samples"] == 1  # transformers' tokenizer saw the same text
    assert made.manifest.stats["boxes"] == {"convention": convention, "form": form, "order": "given"}


def test_the_form_is_part_of_the_identity_and_its_default_changes_no_older_one(tmp_path):
    plain = TokenizeConfig(max_seq_len=8, max_pixels=None, max_skip_fraction=1.0)
    assert "boxes" not in plain.model_dump()
    made = {order: tokenized(tmp_path / order, boxes=BoxFormat(order=order)) for order in ("given", "sorted")}
    assert made["given"].manifest.fingerprint != made["sorted"].manifest.fingerprint
    shards = {order: artifact.manifest.shards[0].sha256 for order, artifact in made.items()}
    assert shards["given"] != shards["sorted"]


def test_samples_without_boxes_have_no_form(tmp_path):
    stats = tokenized(tmp_path, samples=[make_sample(0)]).manifest.stats
    assert stats["boxes"] is None and "boxed" not in stats


def test_a_model_of_texts_gets_no_boxes_as_it_gets_no_images(tmp_path):
    samples = [boxed_sample(), make_sample(3)]
    made = tokenized(tmp_path, text_hf_dir(), samples, boxes=BoxFormat(convention="resized_pixels"))
    assert made.manifest.skips == {"image_count_mismatch": 1} and made.manifest.stats["total"]["num_samples"] == 1
