"""tokenize: what it writes can be trained on, what it leaves out is named, and its bytes depend on nothing else."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import verify_shards
from dataset_builders.contracts.sample import IMAGE_SLOT, Sample
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import PatchFormat, TokenizedSample, from_fields, read_index
from stages import tokenize_samples, tokenize_shard
from stages.artifact import Artifact, run_stage
from stages.encode_chat import ChatEncoder
from stages.encode_image import encode_image, load_image_config
from stages.hf_directory import processor_input
from stages.tokenize_report import segments
from stages.tokenize_samples import STAGE, TokenizeConfig
from stages.workers import StageResources
from tests.helpers.samples import make_image, make_sample, make_samples_artifact, turns
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.trees import tree_digest

CONFIG = TokenizeConfig(max_seq_len=512, max_pixels=None, max_skip_fraction=1.0)


def _shards() -> dict[str, Sequence[Sample]]:
    shards = {f"train/shard-{i:05d}.tar": [make_sample(8 * i + j) for j in range(8)] for i in range(2)}
    return shards | {"heldout/shard-00000.tar": [make_sample(100 + j) for j in range(4)]}


def _tokenize(
    samples: Artifact, root: Path, config: TokenizeConfig = CONFIG, shape: str = "first", num_workers: int = 1
) -> Artifact:
    inputs = {"samples": samples, "processor": processor_input(tiny_hf_dir(shape))}
    return run_stage(STAGE, config, inputs, root, StageResources(num_workers=num_workers)).artifact


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Artifact:
    return make_samples_artifact(tmp_path_factory.mktemp("samples"), _shards())


@pytest.fixture(scope="module")
def tokenized(samples, tmp_path_factory) -> Artifact:
    return _tokenize(samples, tmp_path_factory.mktemp("root"))


def _read(tokenized: Artifact, row: dict[str, object]) -> TokenizedSample:
    fields = read_record(tokenized.dir / row["shard"], row["offset"], row["size"])
    return from_fields(row["key"], fields, PatchFormat.model_validate(tokenized.manifest.stats["patch_format"]))


def _quarantine(artifact_dir: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (artifact_dir / "quarantine.jsonl").read_text().splitlines()]


def test_every_sample_is_there_once_in_its_own_split_and_shard(tokenized):
    index = read_index(tokenized.dir)
    expected = [(s.key, name, name.partition("/")[0]) for name, samples in _shards().items() for s in samples]
    assert list(zip(*(index[c].to_pylist() for c in ("key", "shard", "split")))) == expected
    assert [shard.name for shard in tokenized.manifest.shards] == list(_shards())
    assert not verify_shards(tokenized.dir, tokenized.manifest)
    assert {p.name for p in tokenized.dir.iterdir()} == {
        *("train", "heldout", "index.parquet", "quarantine.jsonl", "manifest.json", "report.json", "report.html")
    }
    assert sorted(p.name for p in (tokenized.dir / "train").iterdir()) == ["shard-00000.tar", "shard-00001.tar"]


def test_what_is_stored_is_what_the_encoders_give(tokenized):
    chat, images = ChatEncoder(tiny_hf_dir()), load_image_config(tiny_hf_dir())
    originals = {sample.key: sample for samples in _shards().values() for sample in samples}
    for row in read_index(tokenized.dir).to_pylist():
        sample, stored = originals[row["key"]], _read(tokenized, row)
        stored.check()
        encoded = [encode_image(image, images) for image in sample.images]
        ids, mask = chat.encode(sample.messages, stored.image_grid_thw)
        assert np.array_equal(stored.input_ids, ids) and np.array_equal(stored.loss_mask, mask)
        assert stored.image_grid_thw.tolist() == [grid.tolist() for _, grid in encoded]
        assert np.array_equal(stored.patches, np.concatenate([np.zeros((0, 768), np.uint8), *(p for p, _ in encoded)]))
        assert (row["num_tokens"], row["num_loss_tokens"]) == (len(ids), int(mask.sum()))
        assert (row["num_patches"], row["num_images"]) == (len(stored.patches), len(sample.images))
        assert row["subset"] == sample.subset
        tokenize_shard.verify(sample, stored, chat)


def test_stats_add_up(tokenized):
    stats, index = tokenized.manifest.stats, read_index(tokenized.dir)
    assert stats["total"]["num_tokens"] == sum(index["num_tokens"].to_pylist())
    for groups in (stats["splits"], stats["subsets"]):
        for name in stats["total"]:
            assert sum(group[name] for group in groups.values()) == stats["total"][name]
    config = json.loads((tiny_hf_dir() / "config.json").read_text())
    assert stats["image_token_id"] == config["image_token_id"]
    assert stats["vocab_size"] == config["text_config"]["vocab_size"]
    assert stats["patch_format"]["image_mean"] == [0.5, 0.5, 0.5]


def test_another_model_gives_other_ids_and_the_same_lengths(samples, tokenized, tmp_path):
    other = _tokenize(samples, tmp_path, shape="second")
    assert other.manifest.fingerprint != tokenized.manifest.fingerprint
    assert other.manifest.stats["image_token_id"] != tokenized.manifest.stats["image_token_id"]
    assert read_index(other.dir)["num_patches"].equals(read_index(tokenized.dir)["num_patches"])


def test_max_pixels_is_obeyed(samples, tokenized, tmp_path):
    small = _tokenize(samples, tmp_path, CONFIG.model_copy(update={"max_pixels": 64 * 64}))
    assert small.manifest.stats["max_pixels"] == 64 * 64
    for row in read_index(small.dir).to_pylist():
        assert row["num_patches"] <= 16 * row["num_images"]
    assert small.manifest.stats["total"]["num_patches"] < tokenized.manifest.stats["total"]["num_patches"]


def test_two_workers_write_the_same_bytes(samples, tokenized, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_samples, "_PROCESS_WORTH", 1e-9)
    assert tree_digest(_tokenize(samples, tmp_path, num_workers=2).dir) == tree_digest(tokenized.dir)


def test_few_samples_are_not_worth_a_process(samples):
    assert tokenize_samples._worthwhile_workers(samples.manifest) == 1


def test_progress_reaches_the_end(samples, tmp_path):
    seen: list[tuple[int, int]] = []
    inputs = {"samples": samples, "processor": processor_input(tiny_hf_dir())}
    run_stage(STAGE, CONFIG, inputs, tmp_path, StageResources(on_progress=lambda *args: seen.append(args)))
    assert seen == [(8, 20), (16, 20), (20, 20)]


_BAD = {
    "special_token_in_text": Sample(key="bad/00000000", messages=turns("<|im_end|>", "x"), images=()),
    "image_count_mismatch": Sample(key="bad/00000001", messages=turns(f"{IMAGE_SLOT}a", "x"), images=()),
    "decode_error": Sample(key="bad/00000002", messages=turns(f"{IMAGE_SLOT}a", "x"), images=(b"no image",)),
    "aspect": Sample(key="bad/00000003", messages=turns(f"{IMAGE_SLOT}a", "x"), images=(make_image(402, 2),)),
    "over_length": Sample(key="bad/00000004", messages=turns("long " * 600, "x"), images=()),
}


def test_what_cannot_be_used_is_left_out_and_named(tmp_path):
    good = make_sample(0)
    artifact = make_samples_artifact(tmp_path / "samples", {"train/shard-00000.tar": [*_BAD.values(), good]})
    tokenized = _tokenize(artifact, tmp_path / "root")
    assert read_index(tokenized.dir)["key"].to_pylist() == [good.key]
    assert tokenized.manifest.skips == dict.fromkeys(sorted(_BAD), 1) == tokenized.manifest.shards[0].skips
    lines = _quarantine(tokenized.dir)
    assert [(line["key"], line["reason"]) for line in lines] == [(s.key, reason) for reason, s in _BAD.items()]
    assert all(line["detail"] for line in lines)
    page = (tokenized.dir / "report.html").read_text()
    assert all(sample.key in page for sample in _BAD.values()) and "over_length" in page


def test_the_length_limit_is_exact(tmp_path):
    artifact = make_samples_artifact(
        tmp_path / "samples", {"train/shard-00000.tar": [make_sample(i) for i in range(8)]}
    )
    lengths = read_index(_tokenize(artifact, tmp_path / "root").dir)["num_tokens"].to_pylist()
    longest = max(lengths)
    config = CONFIG.model_copy(update={"max_seq_len": longest})
    assert read_index(_tokenize(artifact, tmp_path / "root", config).dir).num_rows == 8
    config = CONFIG.model_copy(update={"max_seq_len": longest - 1})
    cut = read_index(_tokenize(artifact, tmp_path / "root", config).dir)
    assert cut["num_tokens"].to_pylist() == [n for n in lengths if n < longest], "left out, not cut"


def test_too_many_left_out_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_samples, "_JUDGED_FROM", 5)
    samples = [*_BAD.values(), make_sample(0)]
    artifact = make_samples_artifact(tmp_path / "samples", {"train/shard-00000.tar": samples})
    with pytest.raises(InputError, match=r"5 of 6 samples were left out .*max_skip_fraction=0\.5") as caught:
        _tokenize(artifact, tmp_path / "root", CONFIG.model_copy(update={"max_skip_fraction": 0.5}))
    named = Path(re.search(r"look at (\S+),", str(caught.value)).group(1))
    assert len(named.read_text().splitlines()) == 5 and "\n" not in str(caught.value)


def test_no_sample_left_is_an_error(tmp_path):
    artifact = make_samples_artifact(tmp_path / "samples", {"train/shard-00000.tar": [_BAD["over_length"]]})
    with pytest.raises(InputError, match="1 of 1 samples were left out"):
        _tokenize(artifact, tmp_path / "root")


def test_a_fault_of_the_encoder_stops_the_stage(samples, tmp_path, monkeypatch):
    """The check of the stored bytes is not the encoder's own: it must see a mask that lost its end-of-turn token."""
    good = ChatEncoder._mask_answers

    def faulty(self, ids, answers):
        return np.where(ids == self.end_of_turn_id, 0, good(self, ids, answers)).astype(np.uint8)

    monkeypatch.setattr(ChatEncoder, "_mask_answers", faulty)
    tokenize_shard._encoder.cache_clear()
    with pytest.raises(AssertionError, match="the mask decodes to"):
        _tokenize(samples, tmp_path)


def test_segments_show_every_token_once(tokenized):
    chat = ChatEncoder(tiny_hf_dir())
    row = next(row for row in read_index(tokenized.dir).to_pylist() if row["subset"] == "compare")
    stored = _read(tokenized, row)
    runs = segments(stored, chat)
    assert [run.kind for run in runs] == ["given", "image", "given", "image", "given", "learnt", "given"]
    assert runs[5].text == "The left one is larger.<|im_end|>"
    for run, (_, rows, columns) in zip((runs[1], runs[3]), stored.image_grid_thw):
        assert run.text == f"image {columns // 2}x{rows // 2} = {rows * columns // 4} tokens"
    shown = "".join(run.text for run in runs if run.kind != "image")
    assert shown == chat.decode(stored.input_ids[stored.input_ids != chat.image_token_id])


def test_the_report_shows_learnt_tokens_and_pictures(tokenized):
    page = (tokenized.dir / "report.html").read_text()
    assert '<span class="learnt">The left one is larger.&lt;|im_end|&gt;</span>' in page
    assert re.search(r'<span class="chip">image \d+x\d+ = \d+ tokens</span>', page)
    assert page.count("data:image/png;base64,") >= 8
    report = json.loads((tokenized.dir / "report.json").read_text())
    assert report["summary"]["loss_tokens"] == tokenized.manifest.stats["total"]["num_loss_tokens"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokenizer.json", "no tokenizer"),
        ("preprocessor_config.json", "no preprocessor"),
        ("chat_template.jinja", "no chat"),
    ],
)
def test_an_incomplete_model_directory_is_one_line(samples, tmp_path, name, words):
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "model"))
    (hf_dir / name).unlink()
    with pytest.raises(InputError, match=words) as caught:
        run_stage(STAGE, CONFIG, {"samples": samples, "processor": processor_input(hf_dir)}, tmp_path / "root")
    assert "\n" not in str(caught.value)


def test_kill_at_many_moments_and_rerun_gives_the_same_bytes(tmp_path):
    """tokenize and plan_bins both, in a process of their own that forks the ones to be killed."""
    command = [sys.executable, "-m", "tests.helpers.kill_tokenize", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokenize"]["kills"] >= 8 and result["plan_bins"]["kills"] >= 4
    assert result["tokenize"]["differing"] == result["plan_bins"]["differing"] == {}
