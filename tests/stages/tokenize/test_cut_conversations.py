"""Conversations that tokenize cuts, because the chat template rewrites earlier turns: samples, lengths, figures."""

import dataclasses
import html
import json
from pathlib import Path

import numpy as np
import pytest

from dataset_builders.contracts.sample import IMAGE_SLOT, Sample
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import TokenizedSample, read_pixel_store
from dataset_builders.errors import InputError
from dataset_builders.records.pixel_codecs import decode_sample
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import Learn
from stages.shared.chat_format.reasoning import ReasoningFormat
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize import shard as tokenize_shard
from stages.tokenize.shard import ShardNotes
from stages.tokenize.stage import STAGE, TokenizeConfig
from tests.helpers.index import read_index
from tests.helpers.samples import make_image, make_samples_artifact, turns
from tests.helpers.think_templates import think_hf_dir

pytestmark = pytest.mark.promise(
    "Each trained answer follows the ids of its prompt at inference, with think blocks as in the templates of "
    "Qwen3, 3.5, 3.6 and 3.8."
)

CONFIG = TokenizeConfig(max_seq_len=512, max_pixels=None, max_skip_fraction=1.0)
TEXTS = (f"{IMAGE_SLOT}Which digit?", "three", "And now?", "four", f"{IMAGE_SLOT}What is this?", "five", "Sure?", "yes")


def sample(number: int, *reasoning: str, texts: tuple[str, ...] = TEXTS) -> Sample:
    images = sum(text.count(IMAGE_SLOT) for text in texts)
    thoughts = iter(reasoning or [""] * len(texts))
    messages = tuple(
        dataclasses.replace(m, reasoning=next(thoughts)) if m.role == "assistant" else m for m in turns(*texts)
    )
    pictures = tuple(make_image(40 + 20 * i, 64, seed=number + i) for i in range(images))
    return Sample(key=f"multi/{number:08d}", messages=messages, images=pictures)


SAMPLES = (
    sample(0),
    sample(1, "Curves.", "Lines.", "Both.", "I looked."),
    sample(2, texts=TEXTS[:2]),
    sample(3, "", "Lines.", "", ""),
)


@pytest.fixture(scope="module")
def hf_dirs(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("hf")
    return {name: think_hf_dir(name, directory) for name in ("qwen3_5", "qwen3_8")}


def tokenize(samples, hf_dir: Path, root: Path, **changes) -> Artifact:
    artifact = make_samples_artifact(root / "samples", {"train/shard-00000.tar": samples})
    inputs = {"samples": artifact, "processor": processor_input(ModelDirectory(hf_dir))}
    return run_stage(STAGE, CONFIG.model_copy(update=changes), inputs, root).artifact


def stored(tokenized: Artifact) -> dict[str, TokenizedSample]:
    store = read_pixel_store(tokenized.dir, tokenized.manifest.stats)
    records = {}
    for row in read_index(tokenized.dir).to_pylist():
        fields = read_record(tokenized.dir / row["shard"], row["offset"], row["size"], checksum=row["checksum"])
        records[row["key"]] = decode_sample(row["key"], fields, store)
    return records


def test_a_conversation_becomes_a_sample_per_text_that_is_exact(hf_dirs, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_shard, "_CHECK_EVERY", 1)  # every sample: the ids before each answer equal its prompt
    tokenized = tokenize(SAMPLES, hf_dirs["qwen3_5"], tmp_path)
    chat, records = ChatEncoder(ModelDirectory(hf_dirs["qwen3_5"])), stored(tokenized)
    of_each = {number: [f"multi/{number:08d}-t{turn}" for turn in range(4)] for number in (0, 1, 3)}
    assert list(records) == [*of_each[0], *of_each[1], "multi/00000002", *of_each[3]]
    learnt = [chat.decode(r.input_ids[r.loss_mask == 1]) for r in records.values()]
    assert learnt[:4] == ["three<|im_end|>", "four<|im_end|>", "five<|im_end|>", "yes<|im_end|>"]
    assert learnt[4] == "Curves.\n</think>\n\nthree<|im_end|>"
    assert learnt[9:11] == ["three<|im_end|>", "Lines.\n</think>\n\nfour<|im_end|>"]
    assert [len(records[key].image_grid_thw) for key in of_each[0]] == [1, 1, 2, 2], "the pictures of its turns"
    assert np.array_equal(records[of_each[0][2]].patches, records[of_each[0][3]].patches)
    stats = tokenized.manifest.stats
    assert stats["cut"] == {"conversations": 3, "samples": 12}
    assert stats["reasoning"] == {"answers": 5, "is_learnt": True}
    assert tokenized.manifest.num_samples == stats["total"]["num_samples"] == 13
    words = "3 conversations were cut into 12 samples, as few as are exact"
    page = html.unescape((tokenized.dir / "report.html").read_text())
    assert words in page and "of 5 answers, learnt" in page
    assert "multi/00000000-t0" in page


def test_history_that_is_kept_is_cut_only_where_kinds_mix(hf_dirs, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_shard, "_CHECK_EVERY", 1)
    tokenized = tokenize(SAMPLES, hf_dirs["qwen3_8"], tmp_path)
    keys = ["multi/00000000", "multi/00000001", "multi/00000002", "multi/00000003-t1", "multi/00000003-t3"]
    assert list(stored(tokenized)) == keys
    assert tokenized.manifest.stats["cut"] == {"conversations": 1, "samples": 2}


def test_reasoning_that_is_not_to_be_learnt_is_left_out_and_said(hf_dirs, tmp_path):
    tokenized = tokenize(SAMPLES, hf_dirs["qwen3_5"], tmp_path, learn=Learn(reasoning=False))
    chat = ChatEncoder(ModelDirectory(hf_dirs["qwen3_5"]))
    texts = [chat.decode(record.input_ids) for record in stored(tokenized).values()]
    assert not any(word in text for text in texts for word in ("Curves.", "Lines.", "Both.", "I looked."))
    assert tokenized.manifest.stats["reasoning"] == {"answers": 5, "is_learnt": False}
    page = html.unescape((tokenized.dir / "report.html").read_text())
    assert "of 5 answers, left out (tokenize.learn.reasoning, or the template)" in page


@pytest.mark.parametrize("over_length", ["skip", "drop_turns"])
def test_of_a_cut_conversation_the_parts_that_fit_stay(hf_dirs, tmp_path, over_length):
    whole = stored(tokenize([sample(0)], hf_dirs["qwen3_5"], tmp_path / "whole"))
    lengths = [len(record.input_ids) for record in whole.values()]
    assert lengths == sorted(set(lengths))
    tokenized = tokenize(
        [sample(0)], hf_dirs["qwen3_5"], tmp_path / "cut", max_seq_len=lengths[1], over_length=over_length
    )
    records = stored(tokenized)
    assert list(records) == ["multi/00000000-t0", "multi/00000000-t1"]
    for key, record in records.items():
        assert np.array_equal(record.input_ids, whole[key].input_ids)
    lines = [json.loads(line) for line in (tokenized.dir / "quarantine.jsonl").read_text().splitlines()]
    left_out = [("multi/00000000-t2", "over_length"), ("multi/00000000-t3", "over_length")]
    assert [(line["key"], line["reason"]) for line in lines] == left_out


def test_turns_are_dropped_to_a_text_that_is_exact(hf_dirs, tmp_path, monkeypatch):
    """The last turn that fits follows reasoning here: with it, the text would begin with another instruction."""
    monkeypatch.setattr(tokenize_shard, "_CHECK_EVERY", 1)
    long = sample(0, "Curves.", "", "Both. " * 90, texts=TEXTS[:6])
    messages = [dataclasses.replace(m, is_learnt=m.text != "four") for m in long.messages]
    long = dataclasses.replace(long, messages=tuple(messages))
    tokenized = tokenize([long], hf_dirs["qwen3_8"], tmp_path, max_seq_len=180, over_length="drop_turns")
    (record,) = stored(tokenized).values()
    chat = ChatEncoder(ModelDirectory(hf_dirs["qwen3_8"]))
    assert chat.decode(record.input_ids[record.loss_mask == 1]) == "Curves.\n</think>\n\nthree<|im_end|>"
    assert "four" not in chat.decode(record.input_ids)
    (line,) = (tokenized.dir / "shortened.jsonl").read_text().splitlines()
    assert json.loads(line) == {"key": "multi/00000000", "turns_kept": 1, "turns_before": 3}


def test_the_check_sees_a_conversation_that_was_not_cut(hf_dirs, tmp_path, monkeypatch):
    """The kept history is rendered in another way, which only the prompts of its answers show."""
    monkeypatch.setattr(ChatEncoder, "cut", lambda self, conversations: [[messages] for messages in conversations])
    with pytest.raises(AssertionError, match="before message 3 are not those of its prompt"):
        tokenize([SAMPLES[3]], hf_dirs["qwen3_8"], tmp_path)


def test_a_probe_that_sees_too_little_loses_samples_and_learns_nothing_wrong(hf_dirs, tmp_path, monkeypatch):
    monkeypatch.setattr(ReasoningFormat, "is_fixed", property(lambda self: True))
    with pytest.raises(InputError, match=r"with 2 turns found 'A seven\.' for the answer 'A seven\.'"):
        tokenize(SAMPLES, hf_dirs["qwen3_5"], tmp_path / "refused")
    monkeypatch.setattr(
        "stages.shared.chat_format.chat.mismatch", lambda chat: ""
    )  # trials that notice too little, too
    tokenized = tokenize(SAMPLES, hf_dirs["qwen3_5"], tmp_path)
    assert list(stored(tokenized)) == ["multi/00000002"]
    assert tokenized.manifest.skips == {"mask_span_mismatch": 3}


def test_notes_of_an_earlier_try_are_readable():
    """The notes are of a shard that was finished before conversations were cut."""
    notes = ShardNotes.model_validate(
        {"rows": [], "left_out": [], "shortened": [], "num_checked": 0, "pixels_against": ""}
    )
    assert (notes.num_cut, notes.num_parts, notes.num_reasoned) == (0, 0, 0)
