"""A training that reads features does what one does that encodes the same images with a frozen vision encoder.

Both are float32 here. The features are not always those of the training to the last bit: a matrix product rounds by the
number of its rows, and a shard's batch has other images in it than a bin. Everything behind the encoder is the same to
the bit.
"""

import dataclasses
import functools

import pytest
import torch

from tests.equivalence import test_layouts
from tests.equivalence.test_layouts import KINDS, SEQ_LEN, STEPS, Outcome, compare, layout_of, outcome_of
from tests.helpers.features import FLOAT32, encoded, images_of, share_images
from tests.helpers.run_dir import make_bins, model_dir
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import full
from tests.helpers.world import run_world
from trainer.contract.run import PartConfig, RunConfig
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.data.reader import BinReader, FeatureReader
from trainer.data.slices import WHOLE
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Training on features that were stored once equals computing them in eleven layouts, losses to 1e-5 and "
    "weights to 2e-6; damaged or foreign features are refused."
)

FROZEN = {"vision": PartConfig(frozen=True), "merger": PartConfig(frozen=True)}
LAYOUTS = (
    *("dp2", "pp2", "pp2-vpp2", "tp2", "tp2-sp", "tp2-vision", "tp2-sp-cp2-vision", "cp2"),
    *("hybrid-tp2-sp", "hybrid-pp2", "hybrid-cp2"),
)
ALONE = [("alone", shape) for shape in ("first", "second", "hybrid-first")]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Writes a job of a shape and a layout whose vision encoder is frozen; the data of a shape are written once."""
    root = functools.cache(tmp_path_factory.mktemp)

    def write(name: str, shape: str, layout: dict) -> RunConfig:
        bins = share_images(make_bins(shape, KINDS))
        run = test_layouts.job(root(shape), name, shape, layout, num_steps=STEPS, bins=bins)
        return run.model_copy(update={"train": run.train.model_copy(update=FROZEN)})

    return write


@pytest.fixture(scope="module")
def features(job, tmp_path_factory):
    """The features of a shape's images."""

    @functools.cache
    def of_shape(shape: str):
        run = job("encode", shape, {})
        return encoded(run.hf_dir, run.tokenized_dir, tmp_path_factory.mktemp("features"))

    return of_shape


@pytest.fixture(scope="module")
def outcome(job, features):
    """Trains a layout once, with features that are read or computed."""

    @functools.cache
    def run_layout(name: str, shape: str, *, is_cached: bool) -> Outcome:
        layout, processes = layout_of(name)
        run = job(f"{name}-{is_cached}", shape, layout)
        if is_cached:
            run = run.model_copy(update={"features_dir": features(shape).dir})
        return outcome_of(run, processes)

    return run_layout


@pytest.mark.full
@pytest.mark.parametrize(("name", "shape"), [*ALONE, *((name, test_layouts.LAYOUTS[name][2]) for name in LAYOUTS)])
def test_a_layout_trains_as_one_process_with_computed_features(name, shape, outcome):
    cached = outcome(name, shape, is_cached=True)
    compare(cached, outcome("alone", shape, is_cached=False))
    assert all(rank["drift"] == 0.0 for rank in cached.world.ranks)


@pytest.mark.full
def test_fsdp_too(job, features):
    """Its ranks divide the weights, which a checkpoint alone holds whole."""
    read, computed = (job(f"fsdp-{number}", "first", {"sharding": "fsdp"}) for number in range(2))
    read = read.model_copy(update={"features_dir": features("first").dir})
    rows, expected = (run_world(run, 2).rows for run in (read, computed))
    for row, wanted in zip(rows, expected, strict=True):
        for name in ("loss", "grad_norm", "language_grad_norm", "param_norm"):
            assert getattr(row, name) == pytest.approx(getattr(wanted, name), rel=1e-5), (row.step, name)
    assert rows[-1].heldout_loss == pytest.approx(expected[-1].heldout_loss, rel=1e-5)


@pytest.mark.full
def test_features_in_bfloat16_train_a_model_in_float32(job, outcome, tmp_path):
    run = job("short", "first", {})
    config = FLOAT32.model_copy(update={"dtype": "bfloat16"})
    features_dir = encoded(run.hf_dir, run.tokenized_dir, tmp_path, config).dir
    rows = run_world(run.model_copy(update={"features_dir": features_dir}), 1).rows
    expected = outcome("alone", "first", is_cached=False).world.rows
    losses = [row.loss for row in rows]
    assert losses == pytest.approx([row.loss for row in expected], rel=1e-3)
    assert losses != [row.loss for row in expected]


@pytest.mark.parametrize("shape", ["first", full("hybrid-first")])
def test_behind_the_encoder_everything_is_the_same_to_the_bit(shape, job, features):
    run, (_, sizes) = job("read", shape, {}), read_model(model_dir(shape))
    bins, geometry = share_images(make_bins(shape, KINDS)), geometry_of(sizes)
    reader = FeatureReader(features(shape).dir, sizes.feature_width)
    read = BinReader(run.tokenized_dir, run.bins_dir, "train", geometry, SEQ_LEN, WHOLE, reader)
    with single_rank() as mesh, torch.no_grad():
        model = build_tiny(run.hf_dir, mesh, SEQ_LEN)
        for number, samples in enumerate(bins):
            batch = make_micro_batch(samples, geometry, SEQ_LEN).to(mesh.device)
            computed = model.encode(model.vision, batch)
            assert torch.equal(model(dataclasses.replace(batch, features=computed)), model(batch))
            torch.testing.assert_close(read.read(number).features, computed.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_no_rank_reads_a_pixel_and_no_flops_of_vision_are_counted(outcome):
    world, computed = (outcome(name, "first", is_cached=name != "alone").world for name in ("tp2-sp", "alone"))
    assert not any(rank["pixels"] for rank in world.ranks)
    assert any(any(rank["encoded"]) for rank in world.ranks)
    cached, computed = world.rows[-1], computed.rows[-1]
    assert cached.vision_tflops == 0 < computed.vision_tflops and cached.language_tflops > 0
    assert "vision_seconds" not in cached.model_extra and computed.vision_seconds > 0


def test_the_bins_hold_what_breaks_caches(features):
    """Else the tests above would show less than they say."""
    stats = features("first").manifest.stats
    images = images_of(share_images(make_bins("first", KINDS)))
    assert (
        stats["distinct_images"] == len(set(images)) < len(images) < stats["images"]
    )  # the first bins are held out too
    assert len(features("first").manifest.shards) > 2
    assert len({grid for grid, *_ in images}) > 2 and len({bool(later) for *_, later in images}) == 2
