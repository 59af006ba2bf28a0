"""Every damage to a file of an artifact ends in one line that names the file and the fix; damaged data is never
used."""

import contextlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataset_builders.contracts.bins import read_bins
from dataset_builders.contracts.manifest import Manifest, load_manifest
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.errors import InputError
from dataset_builders.storage.files import sha256_file
from stages.answer.heldout import heldout_samples
from stages.contamination.stage import STAGE as CONTAMINATION
from stages.contamination.stage import ContaminationConfig
from stages.plan_bins.stage import STAGE as PLAN_BINS
from stages.shared.artifacts import verify
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.verify import DigestCache, check_inputs
from stages.shared.inputs.model_directory import ModelDirectory, model_input, processor_input
from tests.helpers.data_stages import run_all, run_convert, run_plan_bins, run_tokenize
from tests.helpers.raw_rows import plain_rows, write_source
from tests.helpers.tiers import full
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.trees import tree_digest
from trainer.data.micro_batch import geometry_of
from trainer.data.reader import BinReader
from trainer.data.slices import RankSlice
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "A damaged record, shard, index, plan, manifest or exported weight is not used, and one line names it."
)

Damage = Callable[[Path], None]  # receives the artifact's directory
SHARD, OTHER, HELDOUT = "train/shard-00000.tar", "train/shard-00001.tar", "heldout/shard-00000.tar"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return a root with the three data stages, several shards each."""
    directory = tmp_path_factory.mktemp("whole")
    run_all(write_source(directory / "raw", {"first": plain_rows(60)}, file_rows=20), tiny_hf_dir(), directory / "root")
    return directory / "root"


@pytest.fixture
def root(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "root"))


def artifact(root: Path, stage: str) -> Path:
    (directory,) = (root / "artifacts" / stage).iterdir()
    return directory


def edit(name: str, change: Callable[[bytearray], object]) -> Damage:
    """Return a damage that changes a file in place; `change` may return new bytes."""

    def damage(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        changed = change(data)
        (directory / name).write_bytes(data if changed is None else changed)

    return damage


def member(data: bytearray, suffix: str, number: int = 0) -> tuple[int, int]:
    """Return the start offset and the size of a member's content. `number` counts the members with that suffix."""
    place = 0
    while True:
        info = tarfile.TarInfo.frombuf(bytes(data[place : place + 512]), "utf-8", "strict")
        if info.name.endswith(suffix) and (number := number - 1) < 0:
            return place + 512, info.size
        place += 512 + -(-info.size // 512) * 512


def flip(suffix: str, offset: int) -> Damage:
    """Return a damage of one bit at an offset of a member's content, in the first train shard."""

    def change(data: bytearray) -> None:
        data[member(data, suffix)[0] + offset] ^= 1

    return edit(SHARD, change)


def answer_letter(data: bytearray) -> None:
    start, size = member(data, ".json")
    place = data.index(b'"role": "assistant", "text": "', start, start + size) + len(b'"role": "assistant", "text": "')
    data[place] ^= 1


def swapped_ids(data: bytearray) -> None:
    (one, size), (two, other) = (member(data, ".input_ids.i32", number) for number in (0, 1))
    size = min(size, other)
    assert data[one : one + size] != data[two : two + size]
    data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]


def copy(source: str, target: str) -> Damage:
    return lambda directory: shutil.copyfile(directory / source, directory / target)


def swap(directory: Path) -> None:
    first, second = (directory / SHARD).read_bytes(), (directory / OTHER).read_bytes()
    (directory / SHARD).write_bytes(second)
    (directory / OTHER).write_bytes(first)


OF_FILES: dict[str, Damage] = {
    "a shard is removed": lambda directory: (directory / SHARD).unlink(),
    "a shard is cut": edit(SHARD, lambda data: data[:-11_000]),
    "a shard lacks its end": edit(SHARD, lambda data: data[:-1]),
    "a shard is empty": edit(SHARD, lambda data: b""),
    "zeros": edit(SHARD, lambda data: bytes(10_240)),
    "as many zeros": edit(SHARD, lambda data: bytes(len(data))),
    "another shard in its place": copy(OTHER, SHARD),
    "held out in train": copy(HELDOUT, SHARD),
    "two shards swapped": swap,
    "a bit of a name": edit(SHARD, lambda data: data.__setitem__(3, data[3] ^ 1)),
    "a bit of a size": edit(SHARD, lambda data: data.__setitem__(133, data[133] ^ 1)),
    "a bit of a header's filling": edit(SHARD, lambda data: data.__setitem__(505, 1)),
}
OF_SAMPLES: dict[str, Damage] = {
    "a letter of an answer": edit(SHARD, answer_letter),
    "a bit of a picture": flip(".0.png", 90),
}
OF_TOKENS: dict[str, Damage] = {
    "a bit of an id": flip(".input_ids.i32", 0),
    "a bit of a mask": flip(".loss_mask.u8", 2),
    "a bit of a pixel": flip(".patches.u8", 1000),
    "a bit of a grid": flip(".image_grid_thw.i32", 4),
    "ids of two samples": edit(SHARD, swapped_ids),
}


@contextlib.contextmanager
def refused(directory: Path, *words: str, begin: str = "") -> Iterator[None]:
    """Expect one line that names one of the words, and tells the user to delete the artifact's directory."""
    with pytest.raises(InputError) as error:
        yield
    line = str(error.value)
    assert "\n" not in line and len(line) < 1000
    assert f"; delete {directory} and run the same command again" in line
    assert line.startswith(begin) and any(word in line for word in words), line


@pytest.mark.parametrize("name", [*OF_FILES, *OF_SAMPLES])
def test_a_damaged_sample_shard_is_not_tokenized(root, name, tmp_path):
    samples = artifact(root, "convert")
    (OF_FILES | OF_SAMPLES)[name](samples)
    with refused(samples, str(samples / SHARD), str(samples / OTHER)):
        run_tokenize(samples, tiny_hf_dir(), tmp_path / "other")
    with refused(samples, str(samples / SHARD), str(samples / OTHER)):
        inputs = {"samples": Artifact.load(samples)}
        run_stage(CONTAMINATION, ContaminationConfig(), inputs, tmp_path / "other")
    assert not list((tmp_path / "other").rglob("manifest.json"))


@pytest.mark.parametrize("name", [*OF_FILES, *OF_SAMPLES])
def test_every_shard_is_compared_while_it_is_read(root, name):
    """This check works without the check before a stage, since a shard may be damaged between the two."""
    samples = Artifact.load(artifact(root, "convert"))
    (OF_FILES | OF_SAMPLES)[name](samples.dir)
    with refused(samples.dir, str(samples.dir / SHARD)):
        for shard in samples.manifest.shards:
            list(iter_records(samples.dir / shard.name, shard))


def test_a_damaged_heldout_shard_is_not_asked(root):
    samples = Artifact.load(artifact(root, "convert"))
    copy(SHARD, HELDOUT)(samples.dir)
    with refused(samples.dir, str(samples.dir / HELDOUT)):
        list(heldout_samples(samples, None))


def reader_of(root: Path, part: RankSlice) -> BinReader:
    geometry = geometry_of(read_model(tiny_hf_dir())[1])
    bins = artifact(root, "plan_bins")
    seq_len = Artifact.load(bins).manifest.config["seq_len"]
    return BinReader(artifact(root, "tokenize"), bins, "train", geometry, seq_len, part)


@pytest.mark.parametrize("part", [RankSlice(), RankSlice(has_vision=False)], ids=["vision", "no vision"])
@pytest.mark.parametrize("name", [*sorted(OF_FILES.keys() - {"a shard lacks its end"}), *OF_TOKENS])
def test_a_damaged_record_is_not_trained_on(root, name, part):
    tokenized = artifact(root, "tokenize")
    (OF_FILES | OF_TOKENS)[name](tokenized)
    with refused(tokenized, str(tokenized / SHARD), str(tokenized / OTHER), begin="sample first/0000"):
        reader = reader_of(root, part)
        for number in range(len(reader.bins)):
            reader.read(number)


def test_whole_records_are_read(root):
    reader = reader_of(root, RankSlice())
    assert sum(len(reader.read(number).keys) for number in range(len(reader.bins))) > 30


@pytest.mark.parametrize(
    "damage", [full(lambda text: ""), full(lambda text: text[:-9]), lambda text: text.replace("1", "2", 1)]
)
@pytest.mark.parametrize(
    ("stage", "last", "mark"),
    [
        ("convert", "write_convert_report", f"{SHARD}.json"),
        ("tokenize", "_collect_notes", f"{SHARD}.json"),
        ("tokenize", "_collect_notes", f"{SHARD}.notes.json"),
        ("plan_bins", "write_bins", "bins/00000.json"),
    ],
)
def test_work_with_a_damaged_mark_is_done_again(whole, stage, last, mark, damage, tmp_path, monkeypatch):
    """The stage is stopped before its last step, so that the marks of its finished parts are still there."""

    def stop(*_):
        raise RuntimeError("stopped")

    root, source = tmp_path / "root", whole.parent / "raw"
    monkeypatch.setattr(f"stages.{stage}.stage.{last}", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        run_all(source, tiny_hf_dir(), root)
    monkeypatch.undo()
    (path,) = root.glob(f"scratch/{stage}-*/{mark}")
    path.write_text(damage(path.read_text()))
    run_all(source, tiny_hf_dir(), root)
    assert tree_digest(artifact(root, stage)) == tree_digest(artifact(whole, stage))


@pytest.mark.parametrize("name", list(OF_FILES)[:5])
def test_sizes_are_compared_before_a_stage_begins(root, name, tmp_path, monkeypatch):
    tokenized = artifact(root, "tokenize")
    OF_FILES[name](tokenized)
    monkeypatch.setattr("stages.plan_bins.stage.scan_partition", lambda task: pytest.fail("it began"))
    with refused(tokenized, str(tokenized / SHARD)):
        run_plan_bins(tokenized, tmp_path / "other")


@pytest.mark.parametrize("name", list(OF_FILES)[:5])
def test_sizes_are_compared_when_an_artifact_is_used_again(root, name):
    samples = artifact(root, "convert")
    source = root.parent / "raw"  # its digest is made up: the files are not read
    OF_FILES[name](samples)
    with refused(samples, str(samples / SHARD)):
        run_convert(source, root)


@pytest.mark.parametrize(
    "name",
    [
        *("convert/quarantine.jsonl", "convert/pictures.parquet", "tokenize/quarantine.jsonl"),
        *("tokenize/shortened.jsonl", "plan_bins/quarantine.jsonl"),
    ],
)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("?")], ids=["removed", "changed"])
def test_a_damaged_list_of_samples_is_noticed(root, name, damage):
    stage, _, file = name.partition("/")
    path = artifact(root, stage) / file
    damage(path)
    with refused(path.parent, str(path)):
        run_all(root.parent / "raw", tiny_hf_dir(), root)


@pytest.mark.parametrize("stage", ["convert", "tokenize"])
def test_a_manifest_that_counts_other_samples_is_noticed(root, stage, tmp_path):
    directory = artifact(root, stage)
    raw = json.loads((directory / "manifest.json").read_text())
    raw["shards"][0]["num_samples"] += 1
    (directory / "manifest.json").write_text(json.dumps(raw))
    with refused(directory, "manifest.json"):
        if stage == "convert":
            run_tokenize(directory, tiny_hf_dir(), tmp_path / "other")
        else:
            run_plan_bins(directory, tmp_path / "other")


OF_JSON: dict[str, Callable[[bytearray], object]] = {
    "cut": lambda data: data[:-40],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "a list": lambda data: b"[]",
    "null": lambda data: b"null",
    "deep": lambda data: b'{"a":' * 5000,
    "a long number": lambda data: data.replace(b'"format_version": ', b'"format_version": ' + b"1" * 5000, 1),
    "not text": lambda data: b"\xff" + data,
    "a wrong type": lambda data: data.replace(b'"split": "train"', b'"split": 7', 1),
    "an unknown key": lambda data: data.replace(b"{", b'{"more": 1, ', 1),
}


@pytest.mark.parametrize("damage", OF_JSON)
@pytest.mark.parametrize(
    ("stage", "name", "read"),
    [("convert", "manifest.json", Artifact.load), ("plan_bins", "bins.json", lambda place: read_bins(place, "train"))],
    ids=["manifest", "plan"],
)
def test_a_damaged_manifest_or_plan_is_one_line(root, stage, name, read, damage):
    directory = artifact(root, stage)
    edit(name, OF_JSON[damage])(directory)
    with pytest.raises(InputError) as error:
        read(directory)
    line = str(error.value)
    assert line.startswith(str(directory / name)) and f"delete {directory}" in line and "\n" not in line


def test_a_manifest_of_any_stats_is_read_as_it_was_written(tmp_path):
    stats = {"by length": {9: 1, 10: 2, 100: float("inf")}, "text": "\u00e4\n", "pair": (1, 2.5), "none": float("nan")}
    manifest = Manifest(stage="s", version=1, fingerprint="0" * 16, config={}, parents={}, stats=stats)
    manifest.write(tmp_path)
    assert load_manifest(tmp_path).stats["pair"] == [1, 2.5]


def first_partition(directory: Path) -> str:
    return json.loads((directory / "bins.json").read_text())["partitions"][0]["name"]


def other_number(directory: Path, field: str, change: int) -> None:
    raw = json.loads((directory / "bins.json").read_text())
    raw["partitions"][-1][field] += change
    (directory / "bins.json").write_text(json.dumps(raw))


def no_heldout(directory: Path) -> None:
    raw = json.loads((directory / "bins.json").read_text())
    raw["partitions"] = raw["partitions"][:-1]
    (directory / "bins.json").write_text(json.dumps(raw))


OF_PLANS: dict[str, Damage] = {
    "fewer bins": lambda directory: other_number(directory, "num_bins", -1),
    "more loss tokens": lambda directory: other_number(directory, "num_loss_tokens", 1),
    "another first bin": lambda directory: other_number(directory, "first_bin", 1),
    "a partition less": no_heldout,
    "a partition is missing": lambda directory: (directory / first_partition(directory)).unlink(),
    "a partition is cut": lambda directory: edit(first_partition(directory), lambda data: data[:-9])(directory),
    "a bit of a partition": lambda directory: edit(first_partition(directory), _middle_bit)(directory),
}


def _middle_bit(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


@pytest.mark.parametrize("name", OF_PLANS)
def test_a_damaged_plan_is_seen_before_training(root, name, tmp_path, monkeypatch):
    """Any stage that takes the plan sees the damage; plan_bins is used here as an example of such a stage."""
    bins = artifact(root, "plan_bins")
    OF_PLANS[name](bins)
    monkeypatch.setattr("stages.plan_bins.stage.scan_partition", lambda task: pytest.fail("it began"))
    with refused(bins, "bins.json", "bins/train-000-00000.arrow"):
        run_stage(PLAN_BINS, ContaminationConfig(), {"bins": Artifact.load(bins)}, tmp_path / "other")


def test_a_bit_of_a_partition_is_seen_when_it_is_opened(root):
    bins = artifact(root, "plan_bins")
    OF_PLANS["a bit of a partition"](bins)
    with refused(bins, "train-000-00000.arrow is damaged: its SHA-256"):
        reader_of(root, RankSlice()).read(0)


def test_a_bit_of_the_index_is_seen_before_bins_are_planned(root, tmp_path):
    tokenized = artifact(root, "tokenize")
    edit("index/00000.parquet", _middle_bit)(tokenized)
    with refused(tokenized, str(tokenized / "index" / "00000.parquet")):
        run_plan_bins(tokenized, tmp_path / "other")


@pytest.mark.parametrize("stage", ["convert", "tokenize", "plan_bins"])
def test_a_manifest_without_its_digest_is_refused(root, stage):
    """A manifest without a digest is never taken for an older version: its list of shards could be cut unnoticed."""
    directory = artifact(root, stage)
    raw = json.loads((directory / "manifest.json").read_text())
    del raw["digest"], raw["shards"]
    (directory / "manifest.json").write_text(json.dumps(raw))
    with refused(directory, f"{directory / 'manifest.json'} is damaged: it has no digest"):
        Artifact.load(directory)


def change_unseen(path: Path, offset: int) -> None:
    """Change a bit in place; size and modification time stay the same."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def settled(monkeypatch) -> None:
    monkeypatch.setattr(verify, "_SETTLED_NS", 0)


def read_files(monkeypatch) -> list[Path]:
    """Return the list of the files that are read whole from now on, with an empty cache as in a new process."""
    found: list[Path] = []
    monkeypatch.setattr(verify, "_digests", {})
    monkeypatch.setattr(DigestCache.digest, "__defaults__", (lambda path: found.append(path) or sha256_file(path),))
    return found


def test_a_reused_artifact_is_read_once_and_again_when_a_bit_changed(root, settled, monkeypatch):
    tokenized, index = artifact(root, "tokenize"), artifact(root, "tokenize") / "index" / "00000.parquet"
    for number, is_first in enumerate((True, False)):
        found = read_files(monkeypatch)
        run_tokenize(artifact(root, "convert"), tiny_hf_dir(), root)
        assert (index in found) == is_first, number
    change_unseen(index, index.stat().st_size // 2)
    with refused(tokenized, f"{index} is damaged: its SHA-256"):
        run_tokenize(artifact(root, "convert"), tiny_hf_dir(), root)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b"\xff", None])
def test_kept_digests_that_are_damaged_are_made_again(root, settled, monkeypatch, content):
    for _ in range(2):
        found = read_files(monkeypatch)
        run_tokenize(artifact(root, "convert"), tiny_hf_dir(), root)
        (kept,) = (root / "scratch").glob("tokenize-*.whole.json")
        whole = kept.read_bytes()
        assert found and str(artifact(root, "tokenize") / "index") in whole.decode()
        kept.unlink() if content is None else kept.write_bytes(content)


def test_a_stages_inputs_are_read_in_each_process_whatever_was_kept(root, settled, monkeypatch, tmp_path):
    run_tokenize(artifact(root, "convert"), tiny_hf_dir(), root)
    monkeypatch.setattr(verify, "_digests", {})
    index, found = artifact(root, "tokenize") / "index" / "00000.parquet", []
    monkeypatch.setattr(verify.digest_once, "__defaults__", (lambda p: found.append(p) or sha256_file(p),))
    for _ in range(2):
        check_inputs({"tokenized": Artifact.load(artifact(root, "tokenize"))})
    tokenized = artifact(root, "tokenize")
    assert sorted(found) == [index, tokenized / "quarantine.jsonl", tokenized / "shortened.jsonl"]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_model_that_is_changed_while_a_run_goes_on_is_not_used_under_the_digest_of_before(file, tmp_path):
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "hf"))
    inputs = {"model": model_input(ModelDirectory(hf_dir)), "processor": processor_input(ModelDirectory(hf_dir))}
    check_inputs(inputs)
    change_unseen(hf_dir / file, -1)
    for role in ["model", "processor"] if file == "tokenizer.json" else ["model"]:
        with pytest.raises(InputError, match=rf"{file} was changed while this run went on; run the same command again"):
            check_inputs({role: inputs[role]})
