"""tokenize: its output can be trained on, samples left out are named, and its bytes depend on nothing else."""

import functools
import html
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import IndexWriter, TokenizedSample, iter_index, read_pixel_store
from dataset_builders.errors import InputError
from dataset_builders.pictures.pixels import decode_sample, encode_image, encode_rgb
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import Learn
from stages.shared.chat_format.images import load_image_config
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize import shard as tokenize_shard
from stages.tokenize import stage as tokenize_samples
from stages.tokenize.processor_check import WITHOUT_TORCHVISION, ProcessorCheck, torchvision_version
from stages.tokenize.stage import STAGE, TokenizeConfig
from tests.helpers.index import read_index
from tests.helpers.raw_rows import encode, picture
from tests.helpers.samples import make_image, make_sample, make_samples_artifact, turns
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir
from tests.helpers.trees import damaged_shards, tree_digest

CONFIG = TokenizeConfig(max_seq_len=512, max_pixels=None, max_skip_fraction=1.0)


def _shards() -> dict[str, Sequence[Sample]]:
    shards = {f"train/shard-{i:05d}.tar": [make_sample(8 * i + j) for j in range(8)] for i in range(2)}
    return shards | {"heldout/shard-00000.tar": [make_sample(100 + j) for j in range(4)]}


def _tokenize(
    samples: Artifact | Sequence[Sample], root: Path, shape: str = "first", resources=None, **changes: object
) -> Artifact:
    """Return the tokenized samples: of an artifact, or of a train shard that is written here."""
    if not isinstance(samples, Artifact):
        samples = make_samples_artifact(Path(tempfile.mkdtemp(dir=root)), {"train/shard-00000.tar": samples})
    inputs = {"samples": samples, "processor": processor_input(ModelDirectory(tiny_hf_dir(shape)))}
    return run_stage(STAGE, CONFIG.model_copy(update=changes), inputs, root, resources).artifact


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Artifact:
    return make_samples_artifact(tmp_path_factory.mktemp("samples"), _shards())


@pytest.fixture(scope="module")
def tokenized(samples, tmp_path_factory) -> Artifact:
    return _tokenize(samples, tmp_path_factory.mktemp("root"))


def _keys(tokenized: Artifact) -> list[str]:
    return read_index(tokenized.dir)["key"].to_pylist()


def _read(tokenized: Artifact, row: dict[str, object]) -> TokenizedSample:
    fields = read_record(tokenized.dir / row["shard"], row["offset"], row["size"])
    return decode_sample(row["key"], fields, read_pixel_store(tokenized.dir, tokenized.manifest.stats))


def _quarantine(artifact_dir: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (artifact_dir / "quarantine.jsonl").read_text().splitlines()]


def test_every_sample_is_there_once_in_its_own_split_and_shard(tokenized):
    index = read_index(tokenized.dir)
    expected = [(s.key, name, name.partition("/")[0]) for name, samples in _shards().items() for s in samples]
    assert list(zip(*(index[c].to_pylist() for c in ("key", "shard", "split")))) == expected
    assert [shard.name for shard in tokenized.manifest.shards] == list(_shards())
    assert not damaged_shards(tokenized.dir, tokenized.manifest)
    tables, pages = {"quarantine.jsonl", "shortened.jsonl"}, {"report.json", "report.html"}
    assert {p.name for p in tokenized.dir.iterdir()} == {"train", "heldout", "index", MANIFEST, *tables, *pages}
    assert sorted(p.name for p in (tokenized.dir / "train").iterdir()) == ["shard-00000.tar", "shard-00001.tar"]


def test_what_is_stored_is_what_the_encoders_give(tokenized):
    chat, images = ChatEncoder(ModelDirectory(tiny_hf_dir())), load_image_config(ModelDirectory(tiny_hf_dir()))
    originals = {sample.key: sample for samples in _shards().values() for sample in samples}
    for row in read_index(tokenized.dir).to_pylist():
        sample, stored = originals[row["key"]], _read(tokenized, row)
        stored.check()
        encoded = [encode_image(image, images) for image in sample.images]
        ids, mask = chat.encode(sample.messages, stored.image_grid_thw)
        assert np.array_equal(stored.input_ids, ids) and np.array_equal(stored.loss_mask, mask)
        assert stored.image_grid_thw.tolist() == [grid.tolist() for _, grid in encoded]
        assert np.array_equal(stored.patches, np.concatenate([np.zeros((0, 768), np.uint8), *(p for p, _ in encoded)]))
        assert (row["num_tokens"], row["num_loss_tokens"]) == (len(ids), int(mask[1:].sum()))
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
    assert stats["pixels"]["config"]["patch_format"]["image_mean"] == [0.5, 0.5, 0.5]
    assert stats["checked"]["samples"] == 3, "the first of each shard"
    report = json.loads((tokenized.dir / "report.json").read_text())
    assert report["summary"]["loss_tokens"] == stats["total"]["num_loss_tokens"]


def test_another_model_gives_other_ids_and_the_same_lengths(samples, tokenized, tmp_path):
    other = _tokenize(samples, tmp_path, shape="second")
    assert other.manifest.stats["image_token_id"] != tokenized.manifest.stats["image_token_id"]
    assert read_index(other.dir)["num_patches"].equals(read_index(tokenized.dir)["num_patches"])


def test_max_pixels_is_obeyed(samples, tokenized, tmp_path):
    small = _tokenize(samples, tmp_path, max_pixels=64 * 64)
    assert small.manifest.stats["max_pixels"] == 64 * 64
    for row in read_index(small.dir).to_pylist():
        assert row["num_patches"] <= 16 * row["num_images"]
    assert small.manifest.stats["total"]["num_patches"] < tokenized.manifest.stats["total"]["num_patches"]


def test_a_few_samples_are_tokenized_in_this_process_and_each_shard_is_progress(samples, tmp_path):
    assert tokenize_samples._worthwhile_workers(samples.manifest) == 1
    seen: list[tuple[int, int]] = []
    _tokenize(samples, tmp_path, resources=StageResources(on_progress=lambda *args: seen.append(args)))
    assert seen == [(8, 20), (16, 20), (20, 20)]


_JPEG = encode(picture(1, 200, 100), "JPEG")
_CUT_JPEG = _JPEG[: len(_JPEG) // 2] + _JPEG[-2:]  # with its end marker: decode_check=header accepts it
_BAD = {
    "special_token_in_text": Sample(key="bad/00000000", messages=turns("<|im_end|>", "x"), images=()),
    "image_count_mismatch": Sample(key="bad/00000001", messages=turns(f"{IMAGE_SLOT}a", "x"), images=()),
    "decode_error": Sample(key="bad/00000002", messages=turns(f"{IMAGE_SLOT}a", "x"), images=(b"no image",)),
    "aspect": Sample(key="bad/00000003", messages=turns(f"{IMAGE_SLOT}a", "x"), images=(make_image(402, 2),)),
    "over_length": Sample(key="bad/00000004", messages=turns("long " * 600, "x"), images=()),
    "truncated_image": Sample(key="bad/00000005", messages=turns(f"{IMAGE_SLOT}a", "x"), images=(_CUT_JPEG,)),
}


def test_what_cannot_be_used_is_left_out_and_named(tmp_path):
    good = make_sample(0)
    tokenized = _tokenize([*_BAD.values(), good], tmp_path)
    assert _keys(tokenized) == [good.key]
    assert tokenized.manifest.skips == dict.fromkeys(sorted(_BAD), 1) == tokenized.manifest.shards[0].skips
    lines = _quarantine(tokenized.dir)
    assert [(line["key"], line["reason"]) for line in lines] == [(s.key, reason) for reason, s in _BAD.items()]
    assert all(line["detail"] for line in lines)
    page = (tokenized.dir / "report.html").read_text()
    assert all(sample.key in page for sample in _BAD.values()) and "over_length" in page


def test_the_length_limit_is_exact(tmp_path):
    samples = [make_sample(i) for i in range(8)]
    lengths = read_index(_tokenize(samples, tmp_path).dir)["num_tokens"].to_pylist()
    longest = max(lengths)
    assert len(_keys(_tokenize(samples, tmp_path, max_seq_len=longest))) == 8
    cut = read_index(_tokenize(samples, tmp_path, max_seq_len=longest - 1).dir)
    assert cut["num_tokens"].to_pylist() == [n for n in lengths if n < longest], "left out, not cut"


def _long_sample(number: int, turns_before: int) -> Sample:
    """Return a sample with this number of turns, each with an image."""
    pairs = [
        turns(f"{IMAGE_SLOT}{IMAGE_SLOT if i % 2 else ''}Picture {i}?", f"Answer {i}.") for i in range(turns_before)
    ]
    images = sum(m.text.count(IMAGE_SLOT) for pair in pairs for m in pair)
    pictures = tuple(make_image(40 + 11 * i, 64, seed=i) for i in range(images))
    return Sample(key=f"long/{number:08d}", messages=tuple(m for pair in pairs for m in pair), images=pictures)


def _prefix(sample: Sample, num_turns: int) -> Sample:
    messages = sample.messages[: 2 * num_turns]
    images = sum(m.text.count(IMAGE_SLOT) for m in messages)
    return Sample(key=f"long/{num_turns:08d}", messages=messages, images=sample.images[:images])


@pytest.mark.parametrize("learn", ["all", "last"])
def test_last_turns_are_dropped_whole_until_the_rest_fits(tmp_path, monkeypatch, learn):
    sample = _long_sample(0, 7)
    config = {"learn": Learn(answers=learn)}
    lengths = _tokenize([_prefix(sample, n) for n in range(1, 8)], tmp_path, **config)
    expected = {row["num_tokens"]: _read(lengths, row) for row in read_index(lengths.dir).to_pylist()}
    assert list(expected) == sorted(expected) and len(expected) == 7
    decoded: list[int] = []
    monkeypatch.setattr(tokenize_shard, "encode_rgb", lambda *args: (decoded.append(1), encode_rgb(*args))[1])
    for kept, length in enumerate(expected, start=1):
        for limit in {length, min([n for n in expected if n > length], default=length + 1) - 1}:
            decoded.clear()
            cut = _tokenize([sample], tmp_path, max_seq_len=limit, over_length="drop_turns", **config)
            (row,) = read_index(cut.dir).to_pylist()
            stored = _read(cut, row)
            for name in ("input_ids", "loss_mask", "image_grid_thw", "patches"):
                assert np.array_equal(getattr(stored, name), getattr(expected[length], name)), (kept, name)
            assert len(decoded) in (0, row["num_images"]), "no picture of a dropped turn is encoded"
            lines = [json.loads(line) for line in (cut.dir / "shortened.jsonl").read_text().splitlines()]
            named = [{"key": sample.key, "turns_kept": kept, "turns_before": 7}]
            assert lines == (named if kept < 7 else [])
            assert cut.manifest.stats["num_shortened"] == len(lines)


def test_a_first_turn_that_does_not_fit_is_left_out(tmp_path):
    long = Sample(key="long/00000000", messages=turns("long " * 100, "a", "b", "c", "d", "e"), images=())
    tokenized = _tokenize([long, make_sample(3)], tmp_path, max_seq_len=60, over_length="drop_turns")
    assert _keys(tokenized) == ["text/00000003"]
    (line,) = _quarantine(tokenized.dir)
    assert line["reason"] == "over_length" and "the first of 3 turns" in line["detail"]


def test_what_drops_turns_can_leave_nothing_to_learn(tmp_path):
    messages = list(_long_sample(0, 4).messages)
    messages[1] = Message(role="assistant", text=messages[1].text, is_learnt=False)
    sample = Sample(key="long/00000000", messages=tuple(messages), images=_long_sample(0, 4).images)
    first = ChatEncoder(ModelDirectory(tiny_hf_dir())).count_tokens(messages[:2])
    tokenized = _tokenize([sample, make_sample(3)], tmp_path, max_seq_len=first + 30, over_length="drop_turns")
    assert tokenized.manifest.skips == {"empty_target": 1}


@pytest.mark.parametrize("codec", ["u8_zstd", "original"])
def test_every_codec_gives_the_same_samples(samples, tokenized, tmp_path, codec):
    other = _tokenize(samples, tmp_path, codec=codec)
    assert other.manifest.stats["total"] == tokenized.manifest.stats["total"]
    rows = zip(read_index(other.dir).to_pylist(), read_index(tokenized.dir).to_pylist())
    for theirs, ours in rows:
        stored, expected = _read(other, theirs), _read(tokenized, ours)
        stored.check()
        for name in ("input_ids", "loss_mask", "image_grid_thw", "patches"):
            assert np.array_equal(getattr(stored, name), getattr(expected, name)), name
        same = ("key", "num_tokens", "num_loss_tokens", "num_patches", "num_images")
        assert [theirs[name] for name in same] == [ours[name] for name in same]


def test_the_original_codec_keeps_the_files_and_refuses_broken_ones(tmp_path):
    whole = make_image(80, 80, image_format="JPEG")
    cut = Sample(key="bad/00000000", messages=turns(f"{IMAGE_SLOT}a", "x"), images=(whole[:-200],))
    good = Sample(key="good/00000000", messages=turns(f"{IMAGE_SLOT}a", "x"), images=(whole,))
    tokenized = _tokenize([cut, good], tmp_path, codec="original")
    assert tokenized.manifest.skips == {"truncated_image": 1}
    (row,) = read_index(tokenized.dir).to_pylist()
    assert read_record(tokenized.dir / row["shard"], row["offset"], row["size"])["0.jpg"] == whole


def test_the_checksum_is_of_the_records_bytes(tokenized):
    for row in read_index(tokenized.dir).to_pylist():
        data = (tokenized.dir / row["shard"]).read_bytes()[row["offset"] : row["offset"] + row["size"]]
        assert xxhash.xxh3_64_intdigest(data) == row["checksum"]


def test_the_system_prompt_is_in_every_sample_and_in_the_stats(samples, tokenized, tmp_path):
    prompted = _tokenize(samples, tmp_path, system_prompt="Be brief.")
    assert prompted.manifest.stats["system_prompt"] == "Be brief." and tokenized.manifest.stats["system_prompt"] is None
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    for row in read_index(prompted.dir).to_pylist():
        assert chat.decode(_read(prompted, row).input_ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_batches_of_texts_end_by_bytes_too_and_change_nothing(samples, tokenized, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_shard, "_BATCH_BYTES", 1)
    assert tree_digest(_tokenize(samples, tmp_path / "one").dir) == tree_digest(tokenized.dir)
    monkeypatch.setattr(tokenize_shard, "_BATCH_SAMPLES", 3)
    monkeypatch.setattr(tokenize_shard, "_BATCH_BYTES", 1 << 30)
    assert tree_digest(_tokenize(samples, tmp_path / "three").dir) == tree_digest(tokenized.dir)


def test_the_index_is_partitioned_by_shards(samples, tokenized, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_samples, "IndexWriter", functools.partial(IndexWriter, partition_rows=9))
    parted = _tokenize(samples, tmp_path)
    assert [table.num_rows for table in iter_index(parted.dir)] == [8, 8, 4]
    assert read_index(parted.dir).equals(read_index(tokenized.dir))
    assert parted.manifest.stats == tokenized.manifest.stats


def _other_ids(self, text, patches, videos, splice=ChatEncoder.splice):
    ids, mask = splice(self, text, patches, videos)
    return np.where(ids == ids[1], ids[2], ids), mask


def _other_pixels(rgb, config):
    patches, grid = encode_rgb(rgb, config)
    return patches[::-1].copy(), grid


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((ChatEncoder, "splice", _other_ids), "the stored ids are not"),
        ((tokenize_shard, "encode_rgb", _other_pixels), "not what Pillow decodes"),
    ],
    ids=["ids", "pixels"],
)
def test_the_reference_sees_what_the_stored_bytes_do_not_show(samples, tmp_path, monkeypatch, fault, words):
    monkeypatch.setattr(*fault)
    with pytest.raises(AssertionError, match=words):
        _tokenize(samples, tmp_path)


def test_one_in_256_samples_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_shard, "_CHECK_EVERY", 3)
    compared: list[str] = []
    check = ProcessorCheck.check
    monkeypatch.setattr(
        ProcessorCheck, "check", lambda self, *args: (compared.append(args[0].key), check(self, *args))[1]
    )
    good = [make_sample(i) for i in range(8)]
    tokenized = _tokenize([*_BAD.values(), *good], tmp_path)
    assert compared == [good[i].key for i in (0, 3, 6)]
    version = torchvision_version()
    both = f"Pillow's decoding and transformers' image processor, torchvision {version}"
    against = both if version else WITHOUT_TORCHVISION
    assert tokenized.manifest.stats["checked"] == {"samples": 3, "pixels_against": against}
    page = html.unescape((tokenized.dir / "report.html").read_text())
    assert f"3 samples, with transformers' tokenizer and {against.partition(';')[0]}<" in page


def test_what_was_compared_is_said_with_and_without_torchvision(monkeypatch):
    assert "pip install -e '.[torchvision]'" in WITHOUT_TORCHVISION
    project = Path(__file__).parents[3] / "pyproject.toml"
    assert re.search(r"^torchvision = ", project.read_text(), re.MULTILINE), "the extra is there"
    hf_dir = tiny_hf_dir()
    check = ProcessorCheck(load_image_config(ModelDirectory(hf_dir)), ChatEncoder(ModelDirectory(hf_dir)))
    monkeypatch.setattr(check, "_processor", None)
    assert check.pixels_against == WITHOUT_TORCHVISION
    monkeypatch.setattr(check, "_processor", object())
    assert check.pixels_against.startswith("Pillow's decoding and transformers' image processor, torchvision")
    text_dir = text_hf_dir()
    text = ProcessorCheck(load_image_config(ModelDirectory(text_dir)), ChatEncoder(ModelDirectory(text_dir)))
    assert text.pixels_against == "nothing: the model reads no pictures"


def test_too_many_left_out_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(InputError, match=r"^6 of 7 samples .*\.max_skip_fraction=0\.5") as caught:
        _tokenize([*_BAD.values(), make_sample(0)], tmp_path, max_skip_fraction=0.5)
    named = Path(re.search(r"named in (\S+)$", str(caught.value)).group(1))
    assert len(named.read_text().splitlines()) == 6 and "\n" not in str(caught.value)


def test_no_sample_left_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"1 of 1 samples of .* cannot be used"):
        _tokenize([_BAD["over_length"]], tmp_path)


def test_a_fault_of_the_encoder_stops_the_stage(samples, tmp_path, monkeypatch):
    """The check of the stored bytes does not use the encoder, so it must see a mask without an end-of-turn token."""
    good = ChatEncoder._mask_answers

    def faulty(self, ids, messages):
        return np.where(ids == self.end_of_turn_id, 0, good(self, ids, messages)).astype(np.uint8)

    monkeypatch.setattr(ChatEncoder, "_mask_answers", faulty)
    tokenize_shard._encoders.clear()
    with pytest.raises(AssertionError, match="the mask decodes to"):
        _tokenize(samples, tmp_path)
