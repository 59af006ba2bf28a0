"""Other readers of athanor's shards: webdataset reads both kinds, and megatron-energon prepares and iterates one.

megatron-energon is not a dependency. Its test runs where it is installed (pip install megatron-energon).
"""

import io
import itertools
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from dataset_builders.contracts.sample import from_fields, to_fields
from dataset_builders.contracts.shard_io import ShardWriter, iter_records, read_record
from dataset_builders.contracts.tokenized import read_pixel_store
from dataset_builders.records.pixel_codecs import decode_sample
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.stage import STAGE as TOKENIZE
from tests.helpers.index import read_index
from tests.helpers.samples import make_sample, make_samples_artifact
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "webdataset reads athanor's shards, and so does megatron-energon where it is installed."
)

SHARDS = {
    "train/shard-00000.tar": [make_sample(i) for i in range(8)],
    "train/shard-00001.tar": [make_sample(i) for i in range(8, 13)],
    "heldout/shard-00000.tar": [make_sample(i) for i in range(13, 17)],
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return make_samples_artifact(tmp_path_factory.mktemp("samples"), SHARDS)


@pytest.fixture(scope="module")
def tokenized(samples, tmp_path_factory):
    config = TokenizeConfig(min_pixels=32 * 32, max_pixels=128 * 128, max_seq_len=4096, max_skip_fraction=0.5)
    inputs = {"samples": samples, "processor": External(tiny_hf_dir("first"), "hf_dir", "0" * 16)}
    return run_stage(TOKENIZE, config, inputs, tmp_path_factory.mktemp("root")).artifact


def fields_of(sample: dict) -> dict[str, bytes]:
    return {name: data for name, data in sample.items() if not name.startswith("__")}


def plain(paths) -> list[tuple[str, dict[str, bytes]]]:
    """Return (key, fields), undecoded, read only by webdataset."""
    read = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False)
    return [(sample["__key__"], fields_of(sample)) for sample in read]


def write(directory: Path, records: list[tuple[str, dict[str, bytes]]]) -> Path:
    """Write a shard with athanor's writer."""
    with ShardWriter(directory, "ours.tar") as writer:
        for key, fields in records:
            writer.write(key, fields)
        writer.commit("train")
    return directory / "ours.tar"


def test_webdataset_reads_and_decodes_sample_shards(samples):
    """webdataset's own decoders know the members by their extensions."""
    found = plain([samples.dir / name for name in SHARDS])
    assert [from_fields(key, fields) for key, fields in found] == list(itertools.chain(*SHARDS.values()))
    path = samples.dir / "train/shard-00000.tar"
    decoded = list(webdataset.WebDataset(str(path), shardshuffle=False).decode("pilrgb"))
    for sample, expected in zip(decoded, SHARDS["train/shard-00000.tar"], strict=True):
        assert [message["text"] for message in sample["json"]["messages"]] == [m.text for m in expected.messages]
        for i, image in enumerate(expected.images):
            picture = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
            np.testing.assert_array_equal(np.asarray(sample[f"{i}.png"]), picture)


def test_webdataset_reads_tokenized_shards(tokenized):
    store = read_pixel_store(tokenized.dir, tokenized.manifest.stats)
    rows = read_index(tokenized.dir).to_pylist()
    found = dict(plain([tokenized.dir / shard.name for shard in tokenized.manifest.shards]))
    assert list(found) == [row["key"] for row in rows] and len(rows) == 17
    for row in rows:
        fields = read_record(tokenized.dir / row["shard"], row["offset"], row["size"])
        assert found[row["key"]] == fields
        sample = decode_sample(row["key"], found[row["key"]], store)
        assert (len(sample.input_ids), len(sample.patches)) == (row["num_tokens"], row["num_patches"])


@pytest.mark.parametrize(
    "records",
    [
        [],
        [("s/00000000", {"json": b"{}", "0.png": b"x" * 513})],
        [(f"s/{i:08d}", {"json": b"x" * (512 * i), "0.png": b"", "1.png": bytes(range(256)) * i}) for i in range(40)],
    ],
    ids=["empty", "one", "many"],
)
def test_shards_are_written_as_webdataset_writes_them(records, tmp_path):
    """Athanor's writer gives the same bytes as TarWriter with a fixed time and owner."""
    ours = write(tmp_path, records)
    with webdataset.TarWriter(str(tmp_path / "theirs.tar"), mtime=0, user="athanor", group="athanor") as theirs:
        for key, fields in records:
            theirs.write({"__key__": key, **fields})
    assert ours.read_bytes() == (tmp_path / "theirs.tar").read_bytes()
    with tarfile.open(ours) as tar:
        assert len(tar.getmembers()) == sum(len(fields) for _, fields in records)


def test_names_over_100_bytes_are_read_too(tmp_path):
    """Here the bytes differ: athanor stays in the plain tar format, and TarWriter adds an extended header."""
    records = [(f"{'s' * 90}/{i:08d}", {"json": b"long", "0.png": b"x"}) for i in range(3)]
    path = write(tmp_path, records)
    assert plain([path]) == list(iter_records(path)) == records


def test_energon_prepares_and_iterates_sample_shards(samples, tmp_path):
    """Run the commands of docs/commands.md on a directory of hard links, since an artifact itself is never
    written to."""
    energon = pytest.importorskip("megatron.energon")
    linked = tmp_path / "energon"
    for name in SHARDS:
        (linked / name).parent.mkdir(parents=True, exist_ok=True)
        (linked / name).hardlink_to(samples.dir / name)
    splits = ["--split-parts", "train:train/.*", "--split-parts", "val:heldout/.*"]
    command = [Path(sys.executable).with_name("energon"), "prepare", linked, "--non-interactive", "--num-workers", "1"]
    command += [*splits, "--sample-type", "CrudeWebdataset"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    info = json.loads((linked / ".nv-meta/.info.json").read_text())
    assert info["shard_counts"] == {name: len(made) for name, made in SHARDS.items()}

    class Encoder(energon.TaskEncoder):
        decoder = None  # bytes as they are
        cookers = (energon.Cooker(energon.stateless(cook_record)),)

    workers = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings = {"batch_size": None, "worker_config": workers, "task_encoder": Encoder()}
    unshuffled = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False}
    train = energon.get_train_dataset(linked, **unshuffled, **settings)
    heldout = energon.get_val_dataset(linked, **settings)
    for dataset, split in ((train, "train"), (heldout, "heldout")):
        found = {sample["key"]: sample["fields"] for sample in energon.get_loader(dataset)}
        expected = [sample for name, made in SHARDS.items() if name.startswith(split) for sample in made]
        assert found == {sample.key: to_fields(sample) for sample in expected}


def cook_record(sample: dict) -> dict:
    """Return an energon record in the form of athanor's reader. `README.md` shows the cooker of a training."""
    kept = {"__key__": sample["__key__"], "__restore_key__": sample["__restore_key__"], "__subflavors__": None}
    return {**kept, "key": sample["__key__"], "fields": fields_of(sample)}
