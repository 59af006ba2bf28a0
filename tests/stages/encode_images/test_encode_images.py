"""The stage that encodes each distinct image once: its records, for any number of ranks and after a kill."""

import os
import shutil

import numpy as np
import pytest
import torch

from dataset_builders.contracts.bins import read_bins
from dataset_builders.contracts.features import FeatureShards, image_digest, index_name, shard_name
from dataset_builders.contracts.tokenized import Visual
from dataset_builders.storage.files import write_sealed
from flows.pipeline.recipe import load_recipe
from stages.encode_images import stage
from stages.encode_images.config import EncodingConfig
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.model_directory import ModelDirectory, model_input, processor_input
from stages.shared.launchers.config import ClusterConfig
from stages.tokenize.stage import STAGE as TOKENIZE
from tests.helpers.bins import TEXT_ONLY
from tests.helpers.data_stages import SETTINGS, run_convert
from tests.helpers.features import FLOAT32, encoded, images_of, share_images
from tests.helpers.raw_rows import plain_rows, write_source
from tests.helpers.run_dir import make_bins, write_job
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.trees import tree_digest
from trainer.contract.run import RunConfig
from trainer.data.reader import FeatureReader

pytestmark = pytest.mark.promise(
    "Training on features that were stored once equals computing them in eleven layouts, losses to 1e-5 and "
    "weights to 2e-6; damaged or foreign features are refused."
)

WIDTH = 192  # the tiny model: 64 numbers per image token, and two deepstack levels


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> RunConfig:
    return write_job(tmp_path_factory.mktemp("job"), num_steps=4, bins=share_images(make_bins()))


@pytest.fixture(scope="module")
def made(job, tmp_path_factory) -> Artifact:
    """Return the features made by one process."""
    return encoded(job.hf_dir, job.tokenized_dir, tmp_path_factory.mktemp("root"))


def test_an_image_that_samples_share_is_stored_once(job, made):
    images = images_of(share_images(make_bins()))
    stats = made.manifest.stats
    assert stats["distinct_images"] == len(set(images)) < len(images)
    assert sum(shard.num_samples for shard in made.manifest.shards) == len(set(images))
    shards, content = FeatureShards(made.dir), {}
    bins = read_bins(job.bins_dir, "train")
    for refs, samples in zip([bins[number] for number in range(len(bins))], share_images(make_bins()), strict=True):
        for ref, sample in zip(refs, samples, strict=True):
            places = shards.places(ref.shard, ref.offset, ref.num_images)
            for place, image in zip(places, images_of([[sample]]), strict=True):
                assert content.setdefault(place, image) == image
    assert len(content) == len(set(images))


def test_its_figures(made):
    stats = made.manifest.stats
    tokens = sum(len(grid_and_pixels[1]) for grid_and_pixels in set(images_of(share_images(make_bins())))) // (768 * 4)
    assert stats["image_tokens"] == tokens and stats["bytes_per_image_token"] == 4 * WIDTH
    assert stats["bytes"] == 4 * WIDTH * tokens and stats["largest_error"] == 0
    assert stats["features"] == {"format_version": 1, "dtype": "float32", "width": WIDTH}


@pytest.mark.full
def test_two_ranks_write_the_same_bytes(job, made, tmp_path):
    assert len(made.manifest.shards) > 2
    both = encoded(job.hf_dir, job.tokenized_dir, tmp_path, processes=2)
    assert tree_digest(both.dir) == tree_digest(made.dir)


@pytest.mark.full
def test_a_killed_try_goes_on_with_its_finished_shards(job, made, tmp_path):
    scratch = tmp_path / "scratch" / f"encode_images-{made.dir.name}"
    entry = made.manifest.shards[1]
    for name in (shard_name(1), index_name(1)):
        (scratch / name).parent.mkdir(parents=True)
        shutil.copyfile(made.dir / name, scratch / name)
    write_sealed(scratch / f"{shard_name(1)}.json", entry.model_dump_json())
    (scratch / "features" / "00002.tar.tmp").write_bytes(b"cut")
    inode = os.stat(scratch / shard_name(1)).st_ino
    again = encoded(job.hf_dir, job.tokenized_dir, tmp_path)
    assert os.stat(again.dir / shard_name(1)).st_ino == inode
    assert tree_digest(again.dir) == tree_digest(made.dir)


@pytest.mark.full
@pytest.mark.parametrize(("precision", "is_exact"), [("float32", False), ("bfloat16", True)])
def test_the_error_of_the_stored_type_is_said(precision, is_exact, job, made, tmp_path):
    config = EncodingConfig(dtype="bfloat16", precision=precision)
    short = encoded(job.hf_dir, job.tokenized_dir, tmp_path, config)
    places = [FeatureReader(artifact.dir, WIDTH) for artifact in (made, short)]
    refs = read_bins(job.bins_dir, "train")[0]
    exact, rounded = (reader.of_bin(refs)(range(sum(ref.num_images for ref in refs))).float() for reader in places)
    error, said = float((rounded - exact).abs().max()), short.manifest.stats["largest_error"]
    assert short.manifest.stats["bytes_per_image_token"] == 2 * WIDTH
    if is_exact:  # a training in bfloat16 has exactly these bfloat16 features
        assert said == 0 < error
    else:
        assert 0 < error <= said <= float(exact.abs().max()) / 128
        assert torch.equal(rounded, exact.bfloat16().float())


def test_data_without_an_image_start_no_trainer(tmp_path, monkeypatch):
    job = write_job(tmp_path, num_steps=4, bins=make_bins(kinds=[[TEXT_ONLY] * 3]))
    monkeypatch.setattr(stage, "run_trainer", None)
    made = encoded(job.hf_dir, job.tokenized_dir, tmp_path / "root")
    assert made.manifest.shards == [] and made.manifest.stats["image_tokens"] == 0
    refs = read_bins(job.bins_dir, "train")[0]
    assert FeatureReader(made.dir, WIDTH).of_bin(refs)([]).shape == (0, WIDTH)


@pytest.mark.full
def test_every_codec_of_pixels_and_two_ranks_give_the_same_features(tmp_path):
    """Images that are decoded when they are read, two ranks, and shards of both splits."""
    samples = run_convert(write_source(tmp_path / "raw", {"first": plain_rows(24)}), tmp_path)
    features = []
    for codec, processes in (("u8", 1), ("original", 2)):
        config = load_recipe(overrides=[*SETTINGS, f"tokenize.codec={codec}"]).config.tokenize
        inputs = {"samples": Artifact.load(samples), "processor": processor_input(ModelDirectory(tiny_hf_dir()))}
        tokenized = run_stage(TOKENIZE, config, inputs, tmp_path).artifact
        resources = StageResources(cluster=ClusterConfig(processes=processes, num_threads=1))
        of_codec = {"model": model_input(ModelDirectory(tiny_hf_dir())), "tokenized": tokenized}
        made = run_stage(stage.STAGE, FLOAT32, of_codec, tmp_path, resources).artifact
        assert {shard.split for shard in made.manifest.shards} == {"train", "heldout"}
        features.append({name: value for name, value in tree_digest(made.dir).items() if name.startswith("features")})
    assert features[0] == features[1] and len(features[0]) > 1


def test_an_image_is_known_by_its_pixels_and_its_grid_and_a_temporal_group_by_both_frames():
    patches = np.arange(8 * 3, dtype=np.uint8).reshape(8, 3)
    wide, tall = np.array([1, 2, 4], np.int32), np.array([1, 4, 2], np.int32)
    visuals = [(wide, patches, patches[:0]), (tall, patches, patches[:0]), (wide, patches + 1, patches[:0])]
    groups = [(wide, patches, patches), (wide, patches, patches + 1), (tall, patches, patches)]
    digests = [image_digest(Visual(*arrays)) for arrays in (*visuals, *groups)]
    assert digests[0] == image_digest(Visual(wide, patches.copy(), patches[:0]))
    assert len({*digests}) == 6
