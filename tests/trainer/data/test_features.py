"""Features that are damaged, of other samples or of another model are not learnt."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from dataset_builders.contracts.bins import read_bins
from dataset_builders.contracts.features import FeatureShards, index_name, samples_name, shard_name
from dataset_builders.contracts.manifest import load_manifest
from dataset_builders.errors import DamagedFile, InputError
from tests.helpers.features import encoded, share_images
from tests.helpers.run_dir import SEQ_LEN, changed, check_job, make_bins, write_job
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import PartConfig, RunConfig
from trainer.data.micro_batch import geometry_of
from trainer.data.reader import BinReader, FeatureReader
from trainer.data.slices import WHOLE, RankSlice
from trainer.model.registry import read_model
from trainer.plan.checks import pieces_of

pytestmark = pytest.mark.promise(
    "Training on features that were stored once equals computing them in eleven layouts, losses to 1e-5 and "
    "weights to 2e-6; damaged or foreign features are refused."
)

WIDTH = 192
TRAIN = "train/shard-00000.tar"


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> RunConfig:
    root = tmp_path_factory.mktemp("job")
    run = write_job(root, num_steps=4, bins=share_images(make_bins()))
    frozen = {"vision": PartConfig(frozen=True), "merger": PartConfig(frozen=True)}
    train = run.train.model_copy(update=frozen)
    features_dir = encoded(run.hf_dir, run.tokenized_dir, root / "root").dir
    return run.model_copy(update={"train": train, "features_dir": features_dir})


@pytest.fixture
def features(job, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(job.features_dir, tmp_path / "features"))


def bin_reader(job: RunConfig, features: Path | None, part: RankSlice = WHOLE) -> BinReader:
    """Return a reader of the train bins; with None it reads pixels."""
    geometry = geometry_of(read_model(job.hf_dir)[1])
    reader = None if features is None else FeatureReader(features, WIDTH)
    return BinReader(job.tokenized_dir, job.bins_dir, "train", geometry, SEQ_LEN, part, reader)


def read_all(job: RunConfig, features: Path, part: RankSlice = WHOLE) -> int:
    """The rows of features of all train bins."""
    reader = bin_reader(job, features, part)
    return sum(len(reader.read(number).features) for number in range(len(reader.bins)))


@pytest.mark.full
def test_the_ranks_that_share_images_read_each_once(job):
    whole = read_all(job, job.features_dir)
    shares = [RankSlice(vision_ranks=3, vision_rank=n, vision_shares=3, vision_share=n) for n in range(3)]
    parts = [read_all(job, job.features_dir, share) for share in shares]
    assert sum(parts) == whole > 0 and all(part < whole for part in parts)


def test_pixels_are_passed_over(job):
    readers = [bin_reader(job, job.features_dir), bin_reader(job, None)]
    read, computed = ([len(sample.patches) for sample in reader.samples(0)] for reader in readers)
    assert not any(read) and any(computed)
    assert [len(reader.read(0).patches) for reader in readers] == [0, sum(computed)]


def test_the_pieces_of_a_pipeline_leave_no_room_for_vision(job, tmp_path):
    sums = {"num_samples": 4, "num_tokens": 128, "num_loss_tokens": 40, "num_patches": 512, "num_images": 4}
    stats = {"epochs": [{"num_bins": 1, "subsets": {"all": sums}}]}
    load_manifest(job.bins_dir).model_copy(update={"stats": stats}).write(tmp_path)
    run = changed(job.model_copy(update={"bins_dir": tmp_path}), parallel=ParallelConfig(pp=2))
    shape = dataclasses.replace(
        (small := read_model(job.hf_dir)[1]),
        language=dataclasses.replace(small.language, layers=2 * small.language.layers),
    )
    cached, computed = (pieces_of(each, shape) for each in (run, run.model_copy(update={"features_dir": None})))
    assert len(cached[0]) == 4 > len(computed[0])


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (shard_name(0), "image 0: .*00000.tar is damaged: the .* bytes at byte 0 are not the ones that were written"),
        (index_name(0), "index/00000.arrow"),
        (samples_name(TRAIN), "samples/train/shard-00000.arrow"),
    ],
)
def test_a_flipped_bit_is_refused(name, words, job, features):
    flip(features / name, 700)
    with pytest.raises(DamagedFile, match=f"{words}.*; delete .* and run the same command again"):
        read_all(job, features)


@pytest.mark.parametrize("name", [shard_name(0), index_name(0), samples_name(TRAIN)])
def test_a_missing_file_is_refused(name, job, features):
    (features / name).unlink()
    with pytest.raises(DamagedFile, match=f"{name} is missing"):
        read_all(job, features)


def test_a_table_of_other_samples_is_refused(job, features):
    manifest = load_manifest(features)
    (features / samples_name(TRAIN)).write_bytes((features / samples_name("heldout/shard-00000.tar")).read_bytes())
    sha256 = {file.name: file.sha256 for file in manifest.files}["samples/heldout/shard-00000.arrow"]
    files = [f.model_copy(update={"sha256": sha256}) if f.name == samples_name(TRAIN) else f for f in manifest.files]
    manifest.model_copy(update={"files": files}).write(features)
    with pytest.raises(DamagedFile, match=r"samples/train/shard-00000.arrow knows 0 of \d images at byte"):
        read_all(job, features)


def test_a_place_between_two_samples_is_no_sample(job):
    shards, refs = FeatureShards(job.features_dir), read_bins(job.bins_dir, "train")[0]
    (ref, *_) = (ref for ref in refs if ref.num_images)
    assert len(shards.places(ref.shard, ref.offset, ref.num_images)) == ref.num_images
    for offset, number in ((ref.offset - 512, ref.num_images), (ref.offset, ref.num_images + 1)):
        with pytest.raises(DamagedFile, match=f"of {number} images at byte {offset}"):
            shards.places(ref.shard, offset, number)


def test_features_of_another_width_are_refused(job):
    with pytest.raises(InputError, match="holds features of 192 numbers an image token, and this model takes 64"):
        FeatureReader(job.features_dir, 64)


def test_features_of_other_samples_are_refused_before_the_training(job, features):
    check_job(job, 1)
    manifest = load_manifest(features)
    other = manifest.parents["tokenized"].model_copy(update={"fingerprint": "e" * 16})
    manifest.model_copy(update={"parents": {**manifest.parents, "tokenized": other}}).write(features)
    with pytest.raises(InputError, match="was made of the samples eeeeeeeeeeeeeeee, and tokenized_dir="):
        check_job(job.model_copy(update={"features_dir": features}), 1)


def test_what_holds_no_features_is_refused(job):
    with pytest.raises(InputError, match=r"stats\.features is not of format_version 1"):
        check_job(job.model_copy(update={"features_dir": job.tokenized_dir}), 1)


@pytest.mark.parametrize("part", ["vision", "merger"])
def test_a_trained_encoder_is_refused(part, job):
    train = job.train.model_copy(update={part: PartConfig()})
    with pytest.raises(InputError, match=f"train.{part}.frozen=false changes what they become"):
        check_job(job.model_copy(update={"train": train}), 1)


def test_a_run_json_of_before_has_no_features(job):
    values = json.loads(job.model_dump_json())
    del values["features_dir"]
    assert RunConfig.model_validate(values).features_dir is None
