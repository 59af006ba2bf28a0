"""Images that other ranks encode than those that use their tokens: dealt over a pipeline, or by ranks that do nothing
else. Every layout trains as one process does."""

import itertools

import pytest

from tests.equivalence.test_layouts import (
    DEALT,
    ELSEWHERE,
    LAYOUTS,
    compare,
    job,
    outcome,  # noqa: F401  a fixture
    own,
)
from tests.helpers.bins import MIXED, TEXT_ONLY
from tests.helpers.patience import at_most
from tests.helpers.run_dir import make_bins
from tests.helpers.tiers import tiered
from tests.helpers.world import run_world, start_ranks

CORE = ("pp2-dealt", "own-1+1")

pytestmark = pytest.mark.promise(
    "Layouts of tp, sp, pp, cp, dp and ep, with recompute, and images that other ranks encode train on up to 16 "
    "processes as one does: losses to 1e-5, gradient norms to 1e-4, weights to 2e-6."
)


@pytest.mark.parametrize("name", tiered(ELSEWHERE, CORE))
def test_a_layout_trains_as_one_process_does(name, outcome):  # noqa: F811
    shape = LAYOUTS[name][2]
    ours, alone = outcome(name, shape), outcome("alone", shape)
    compare(ours, alone)
    assert all(rank["drift"] == 0.0 for rank in ours.world.ranks), "copies of a parameter differ"
    works = [[row.vision_tflops > 0 for row in one.world.rows] for one in (ours, alone)]
    assert works[0] == works[1] and any(works[1]), "the work of vision is counted wherever it is done"


PARTS = ("vision", "merger", "language")
FROZEN = [frozen for count in (1, 2) for frozen in itertools.combinations(PARTS, count)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "frozen"),
    itertools.product(["pp2-dealt", "pp2-cp2-dealt", "own-1+2-pp2"], FROZEN),
    ids=str,
)
def test_with_frozen_parts_too(name, frozen, outcome):  # noqa: F811
    compare(outcome(name, "first", frozen), outcome("alone", "first", frozen))


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"pp": 2, **DEALT}, {"pp": 2, **own(1)}], ids=str)
def test_a_training_without_an_image_ends(layout, tmp_path):
    """Vision elsewhere has nothing to do, and nobody waits for it; its gradient is zero."""
    bins = make_bins("first", [[TEXT_ONLY] * 5] * 6)
    runs = {
        name: job(tmp_path, name, "first", parallel, num_steps=3, global_batch_size=2, bins=bins)
        for name, parallel in (("alone", {}), ("elsewhere", layout))
    }
    ours = run_world(runs["elsewhere"], 2 + ("ranks" in str(layout))).rows
    for a, b in zip(ours, run_world(runs["alone"], 1).rows, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.vision_grad_norm == b.vision_grad_norm == 0


@pytest.mark.full
def test_dealt_images_wait_for_few_micro_batches(tmp_path):
    """16 micro batches a step; two pipeline ranks hold images of at most four, besides the one that they encode."""
    bins = make_bins("first", [MIXED] * 16)
    run = job(tmp_path, "long", "first", {"pp": 2, **DEALT}, num_steps=3, global_batch_size=16, bins=bins)
    first, second = run_world(run, 2).ranks
    assert (first["open"], second["open"]) == (0, 4)


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 4])
def test_no_message_of_a_dealt_image_waits_for_its_own_rank(pp, tmp_path):
    """Two ranks that wait for their devices would wait for each other for ever."""
    bins = make_bins("wide", [MIXED] * 8)
    run = job(tmp_path, "run", "wide", {"pp": pp, **DEALT}, num_steps=3, global_batch_size=8, bins=bins)
    path, log = run.output_dir / "run.json", tmp_path / "log.txt"
    path.write_text(run.model_dump_json())
    ranks = start_ranks("tests.helpers.waiting_devices", pp, path, log=log)
    assert [rank.wait(at_most(120)) for rank in ranks] == [0] * pp, log.read_text()[-3000:]
