"""A checkpoint of one layout goes on in any other, and exports to the same bytes from any.

test_unlike_ranks.py and test_adapter_checkpoints.py have those that hold a part of the model.
"""

import functools
import shutil

import pytest

from tests.equivalence import test_layouts
from tests.equivalence.test_layouts import layout_of
from tests.helpers.resuming import SAVED_AT, STEPS, assert_resumes, checkpoint_of, exported_file
from tests.helpers.run_dir import changed
from tests.helpers.tiers import tiered
from tests.helpers.world import World, run_world
from trainer.contract.run import CheckpointConfig, RunConfig

pytestmark = pytest.mark.promise(
    "A checkpoint resumes to the bit, and in other layouts with losses to 1e-6 and gradient norms to 1e-5, also "
    "where ranks hold unlike parts; one of adapters refuses another base; all layouts export the same bytes."
)

EP2, EP4 = "experts-ep2-dp2", "experts-ep4-tp2-sp-dp2"
# Shape, layout that saves -> layouts that go on.
RESUMED = {
    ("first", "tp2"): (
        *("alone", "tp2", "tp2-sp-vision", "pp2-first-3", "pp2-dealt", "own-1+2-pp2", "dp2", "cp2", "tp2-pp2"),
        "fourfold",
    ),
    ("first", "fourfold"): ("alone",),
    ("first", "own-2+1"): ("alone",),
    ("hybrid-first", "own-2+1"): ("alone",),
    # Three value heads for each key head: tp2 holds a part of each of six runs of rows.
    ("hybrid-second", "tp2-sp"): ("alone", "tp2", "pp2", "cp2", "tp2-sp"),
    ("hybrid-second", "alone"): ("tp2",),
    # Layers of one kind would be stacked in a checkpoint, which runs of rows cannot be.
    ("hybrid-linear", "tp2-sp"): ("alone", "tp2-sp"),
    ("mtp-second", "tp2-sp"): ("alone", "cp2", "tp2-sp"),
    ("experts-shared", EP2): ("alone", EP2, "dp2", "tp2-sp", EP4, "experts-ep2-pp2"),
    # Pipelines of other pieces.
    ("first", "pp2"): ("alone", "pp2", "pp2-dealt", "pp2-first-3"),
    ("first", "pp2-first-3"): ("pp2",),
    ("first", "pp2-dealt"): ("pp2-first-3",),
    ("hybrid-first", "pp2"): ("pp2-first-3",),
    ("hybrid-first", "pp2-first-3"): ("pp2",),
    ("hybrid-first", "pp2-dealt"): ("pp2-first-3",),
    ("odd", "hybrid-pp3-uneven"): ("pp2-vpp2",),
    ("hybrid-odd", "pp2-vpp2"): ("hybrid-pp3-uneven",),
}
EXPORTED = {
    ("first", "tp2"): ("tp2-sp-vision", "own-1+2-pp2", "tp2-pp2", "pp2-first-3", "pp2-dealt", "fourfold"),
    ("experts-shared", EP2): (EP2, "dp2", "tp2-sp", EP4, "experts-ep2-pp2"),
}


def rows(table: dict[tuple[str, str], tuple[str, ...]], core: tuple[str, str, str]) -> list:
    return tiered([(*saved, name) for saved, names in table.items() for name in names], [core])


def job(root, name: str, layout: dict, shape: str = "first") -> RunConfig:
    run = test_layouts.job(root, name, shape, layout, num_steps=STEPS, global_batch_size=2)
    return changed(run, checkpoint=CheckpointConfig(save_interval=SAVED_AT, keep_last=5))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Trains six steps in a layout once, saved after three, uninterrupted."""
    root = functools.cache(tmp_path_factory.mktemp)

    @functools.cache
    def train(shape: str, name: str) -> tuple[RunConfig, World]:
        layout, processes = layout_of(name)
        run = job(root(shape), f"saved-{name}", layout, shape)
        return run, run_world(run, processes, save=True)

    return train


@pytest.mark.parametrize(("shape", "before", "after"), rows(RESUMED, ("experts-shared", EP2, "alone")))
def test_a_checkpoint_goes_on_in_another_layout(shape, before, after, saved):
    whole = saved(shape, before)
    layout, processes = layout_of(after)
    resumed = job(whole[0].output_dir.parent, f"{before}-{after}", layout, shape)
    assert_resumes(whole, resumed, processes, exact=before == after)


@pytest.fixture(scope="module")
def exported(saved):
    """Exports the trained checkpoint of a layout by another, and returns the file."""

    @functools.cache
    def export(shape: str, before: str, by: str) -> bytes:
        (run, _), (layout, processes) = saved(shape, before), layout_of(by)
        return exported_file(run, job(run.output_dir.parent, f"export-{before}-{by}", layout, shape), processes)

    return export


@pytest.mark.parametrize(("shape", "before", "by"), rows(EXPORTED, ("experts-shared", EP2, EP2)))
def test_export_is_the_same_bytes_from_any_layout(shape, before, by, saved, exported):
    alone = exported(shape, before, "alone")
    assert alone != (saved(shape, before)[0].hf_dir / "model.safetensors").read_bytes(), "training changed nothing"
    assert exported(shape, before, by) == alone


@pytest.mark.promise(
    "With AdamW's moments in bfloat16, weights are after 20 updates less than 4% of their way off, and a "
    "training resumes to the bit."
)
@pytest.mark.full
@pytest.mark.parametrize("name", ["alone", "tp2", "tp2-sp"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_layers_of_two_kinds_in_bfloat16_saved_and_resumed(name, moments, tmp_path):
    """A group of the optimizer would hold bfloat16 and float32 parameters, whose numbers change places in a checkpoint.
    As it was saved it goes on to the bit; on two ranks as far off as bfloat16's products are."""
    layout, processes = layout_of(name)

    def low(name: str, layout: dict) -> RunConfig:
        run = job(tmp_path, name, layout, "hybrid-second")
        optim = run.train.optim.model_copy(update={"moments": moments})
        return changed(run, train=run.train.model_copy(update={"precision": "bfloat16", "optim": optim}))

    run, resumed = low("saved", {}), low("resumed", layout)
    whole = run_world(run, 1, save=True)
    shutil.copytree(checkpoint_of(run, SAVED_AT), checkpoint_of(resumed, SAVED_AT))
    expected = [row for row in whole.rows if row.step > SAVED_AT]
    for ours, theirs in zip(run_world(resumed, processes).rows, expected, strict=True):
        close = 0.0 if name == "alone" else 2e-3
        assert ours.loss == pytest.approx(theirs.loss, rel=close, abs=0)
        assert ours.param_norm == pytest.approx(theirs.param_norm, rel=close / 100, abs=0)
