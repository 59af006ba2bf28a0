"""A training that reads features does what one does that encodes the same images with a frozen vision encoder."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch

from dataset_builders.contracts.features import FeatureShards
from dataset_builders.contracts.tokenized import TokenizedSample
from stages.artifacts.artifact import Artifact, External
from stages.artifacts.run_stage import run_stage
from stages.artifacts.workers import StageResources
from stages.encode_images.config import EncodingConfig
from stages.encode_images.stage import STAGE
from stages.launchers.config import ClusterConfig
from tests.equivalence.test_layouts import CUT_VISION, KINDS, SEQ_LEN, SMOOTH, SP, STEPS, Outcome, compare
from tests.helpers.run_dir import make_bins, write_job
from tests.helpers.world import exported, run_world
from trainer.contract.answer import read_heldout
from trainer.contract.names import HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import PartConfig, RunConfig

FROZEN = {"vision": PartConfig(frozen=True), "merger": PartConfig(frozen=True)}
FLOAT32 = EncodingConfig(dtype="float32", precision="float32", shard_size_mb=0.02)
# name -> (layout, processes, shape)
LAYOUTS = {
    "dp2": ({}, 2, "first"),
    "pp2": ({"pp": 2}, 2, "first"),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, 2, "deep"),
    "tp2-sp": ({"tp": 2, **SP}, 2, "first"),
    "tp2-vision": ({"tp": 2, **CUT_VISION}, 2, "first"),
    "tp2-sp-vision": ({"tp": 2, **SP, **CUT_VISION}, 2, "first"),
    "cp2": ({"cp": 2}, 2, "first"),
    "fsdp2": ({"sharding": "fsdp"}, 2, "first"),
    "hybrid-tp2-sp": ({"tp": 2, **SP}, 2, "hybrid-first"),
    "hybrid-cp2": ({"cp": 2}, 2, "hybrid-first"),
}


def encoded(run: RunConfig, root, config: EncodingConfig = FLOAT32, processes: int = 1) -> Artifact:
    """The features of a job's images, made by the stage as a flow makes them."""
    inputs = {"model": External(run.hf_dir, "hf_dir", "0" * 16), "tokenized": Artifact.load(run.tokenized_dir)}
    cluster = ClusterConfig(processes=processes, num_threads=1)
    return run_stage(STAGE, config, inputs, root, StageResources(cluster=cluster)).artifact


def shared_bins(shape: str) -> list[list[TokenizedSample]]:
    """Bins of KINDS in which every image of 4 x 6 patches is the same one."""
    bins, one = make_bins(shape, KINDS), None
    for samples in bins:
        for place, sample in enumerate(samples):
            if sample.image_grid_thw.tolist() == [[1, 4, 6]]:
                one = sample.patches if one is None else one
                samples[place] = dataclasses.replace(sample, patches=one)
    return bins


def images_of(bins: list[list[TokenizedSample]]) -> list[tuple[bytes, bytes]]:
    """Grid and patches of every image."""
    images = []
    for sample in itertools.chain(*bins):
        pieces = np.split(sample.patches, sample.image_grid_thw.prod(1).cumsum())[:-1]
        images += [(grid.tobytes(), piece.tobytes()) for grid, piece in zip(sample.image_grid_thw, pieces)]
    return images


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of a shape and a layout with a frozen vision encoder; its data are written once."""

    @functools.cache
    def root(shape: str):
        return tmp_path_factory.mktemp(shape)

    def write(name: str, shape: str, layout: dict) -> RunConfig:
        run = write_job(
            root(shape),
            num_steps=STEPS,
            shape=shape,
            bins=shared_bins(shape),
            global_batch_size=4,
            parallel=ParallelConfig(**layout),
            optim=SMOOTH,
            name=name,
        )
        return run.model_copy(update={"seq_len": SEQ_LEN, "train": run.train.model_copy(update=FROZEN)})

    return write


@pytest.fixture(scope="module")
def features(job, tmp_path_factory):
    """The float32 features of a shape's images."""
    return functools.cache(lambda shape: encoded(job("encode", shape, {}), tmp_path_factory.mktemp("features")))


@pytest.fixture(scope="module")
def outcome(job, features):
    @functools.cache
    def run_layout(name: str, shape: str, is_cached: bool) -> Outcome:
        layout, processes, _ = LAYOUTS.get(name, ({}, 1, shape))
        run = job(f"{name}-{is_cached}", shape, layout)
        if is_cached:
            run = run.model_copy(update={"features_dir": features(shape).dir})
        is_saved = layout.get("sharding") == "fsdp"
        world = run_world(run, processes)
        heldout, before = (read_heldout(run.output_dir / name) for name in (HELDOUT_JSONL, HELDOUT_BASE_JSONL))
        return Outcome(world, {} if is_saved else exported(run), heldout, before)

    return run_layout


@pytest.mark.parametrize("shape", ["first", "second", "hybrid-first"])
def test_one_process_gives_the_same_with_read_features(shape, outcome):
    cached, computed = (outcome("alone", shape, is_cached) for is_cached in (True, False))
    compare(cached, computed)
    print([row.loss - r.loss for row, r in zip(cached.world.rows, computed.world.rows)])
    print(max(float((w - computed.weights[n]).abs().max()) for n, w in cached.weights.items()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_same_with_read_features(name, outcome):
    shape = LAYOUTS[name][2]
    cached, alone = outcome(name, shape, True), outcome("alone", shape, False)
    if not cached.weights:
        alone = dataclasses.replace(alone, weights={})
    compare(cached, alone)


def test_it(features, job):
    art = features("first")
    print(art.manifest.model_dump_json(indent=1))
    print(sorted(str(p.relative_to(art.dir)) for p in art.dir.rglob("*")))
    images = images_of(shared_bins("first"))
    assert art.manifest.stats["distinct_images"] == len(set(images)) < len(images)
