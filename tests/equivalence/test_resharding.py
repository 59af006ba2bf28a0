"""A checkpoint of one layout goes on in any other, and exports to the same bytes from any.

In the core, test_expert_ranks.py, test_unlike_ranks.py and test_adapter_checkpoints.py show this.
"""

import functools
import shutil

import pytest

from tests.equivalence.test_layouts import CUT_VISION, FOURFOLD, SEQ_LEN, SMOOTH, SP, kinds_of
from tests.helpers.resuming import SAVED_AT, STEPS, assert_resumes, checkpoint_of, exported_file
from tests.helpers.run_dir import changed, make_bins, write_job
from tests.helpers.world import World, run_world
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import CheckpointConfig, RunConfig

pytestmark = pytest.mark.promise(
    "A checkpoint resumes to the bit, and in other layouts with losses to 1e-6 and gradient norms to 1e-5, also "
    "where ranks hold unlike parts; one of adapters refuses another base; all layouts export the same bytes."
)

TP2 = {"tp": 2}
LAYOUTS = {
    "alone": ({}, 1),
    "tp2": (TP2, 2),
    "tp2-sp-vision": ({**TP2, **SP, **CUT_VISION}, 2),
    "pp2": ({"pp": 2, "first_pipeline_layers": 3}, 2),
    "pp2-dealt": ({"pp": 2, "vision": "dealt"}, 2),
    "own-1+2-pp2": ({"pp": 2, "vision": {"ranks": 1}}, 3),
    "dp2": ({}, 2),
    "cp2": ({"cp": 2}, 2),
    "tp2-pp2": ({"tp": 2, "pp": 2}, 4),
    "fourfold": (FOURFOLD, 16),
}


def job(root, name: str, layout: dict, shape: str = "first") -> RunConfig:
    run = write_job(
        root,
        num_steps=STEPS,
        shape=shape,
        bins=make_bins(shape, kinds_of(shape)),
        global_batch_size=2,
        parallel=ParallelConfig(**layout),
        optim=SMOOTH,
        name=name,
    )
    keep = CheckpointConfig(save_interval=SAVED_AT, keep_last=5)
    return changed(run, seq_len=SEQ_LEN, checkpoint=keep)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("reshard")


@pytest.fixture(scope="module")
def saved(root) -> tuple[RunConfig, World]:
    """Six steps on tp2, saved after three, uninterrupted."""
    run = job(root, "saved", TP2)
    return run, run_world(run, 2, save=True)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_saved_on_tp2_and_resumed(name, root, saved):
    layout, processes = LAYOUTS[name]
    assert_resumes(saved, job(root, f"resumed-{name}", layout), processes, exact=name == "tp2")


@pytest.mark.full
def test_saved_on_sixteen_ranks_and_resumed_on_one(root, saved):
    run = job(root, "sixteen", FOURFOLD)
    run_world(run, 16, save=True)
    assert_resumes((run, saved[1]), job(root, "sixteen-to-one", {}), 1)


@pytest.mark.full
@pytest.mark.parametrize("shape", ["first", "hybrid-first"])
def test_saved_beside_ranks_of_images_and_resumed_without_them(shape, tmp_path):
    run = job(tmp_path, "own", {"vision": {"ranks": 2}}, shape)
    assert_resumes((run, run_world(run, 3, save=True)), job(tmp_path, "own-to-one", {}, shape), 1)


HYBRID = {name: LAYOUTS[name] for name in ("alone", "tp2", "pp2", "cp2")} | {"tp2-sp": ({**TP2, **SP}, 2)}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> tuple[RunConfig, World]:
    """Like `saved`, from two kinds of layers with three value heads for each key head: tp2 holds a part of each of six
    runs of rows."""
    run = job(tmp_path_factory.mktemp("hybrid"), "saved", {**TP2, **SP}, "hybrid-second")
    return run, run_world(run, 2, save=True)


@pytest.mark.full
@pytest.mark.parametrize("name", HYBRID)
def test_layers_of_two_kinds_saved_on_tp2_and_resumed(name, hybrid):
    layout, processes = HYBRID[name]
    resumed = job(hybrid[0].output_dir.parent, f"resumed-{name}", layout, "hybrid-second")
    assert_resumes(hybrid, resumed, processes, exact=name == "tp2-sp")


@pytest.mark.full
def test_layers_of_two_kinds_saved_on_one_rank_and_resumed_on_tp2(hybrid):
    run = job(hybrid[0].output_dir.parent, "one", {}, "hybrid-second")
    run_world(run, 1, save=True)
    assert_resumes((run, hybrid[1]), job(run.output_dir.parent, "one-to-tp2", TP2, "hybrid-second"), 2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["alone", "tp2-sp"])
def test_layers_of_the_delta_rule_alone_saved_on_tp2_and_resumed(name, tmp_path):
    """Layers of one kind would be stacked in a checkpoint, which runs of rows cannot be."""
    saved = job(tmp_path, "saved", {**TP2, **SP}, "hybrid-linear")
    layout, processes = HYBRID[name]
    whole = (saved, run_world(saved, 2, save=True))
    assert_resumes(whole, job(tmp_path, "resumed", layout, "hybrid-linear"), processes, exact=name == "tp2-sp")


@pytest.mark.full
@pytest.mark.parametrize("name", ["alone", "cp2", "tp2-sp"])
def test_multi_token_prediction_saved_on_tp2_and_resumed(name, tmp_path):
    saved = job(tmp_path, "saved", {**TP2, **SP}, "mtp-second")
    layout, processes = HYBRID[name]
    whole = (saved, run_world(saved, 2, save=True))
    assert_resumes(whole, job(tmp_path, f"resumed-{name}", layout, "mtp-second"), processes, exact=name == "tp2-sp")


EVEN, UNEVEN, DEALT = {"pp": 2}, {"pp": 2, "first_pipeline_layers": 3}, {"pp": 2, "vision": "dealt"}
PIPELINES = [
    ("first", EVEN, UNEVEN),
    ("first", UNEVEN, EVEN),
    ("first", DEALT, UNEVEN),
    ("hybrid-first", DEALT, UNEVEN),
    ("hybrid-first", EVEN, UNEVEN),
    ("hybrid-first", UNEVEN, EVEN),
    ("odd", {"pp": 3}, {"pp": 2, "vpp": 2}),
    ("hybrid-odd", {"pp": 2, "vpp": 2}, {"pp": 3}),
]


@pytest.mark.full
@pytest.mark.parametrize(("shape", "before", "after"), PIPELINES)
def test_pipelines_of_other_pieces_go_on(shape, before, after, tmp_path):
    run = job(tmp_path, "saved", before, shape)
    whole = run_world(run, before["pp"], save=True)
    world = assert_resumes((run, whole), job(tmp_path, "resumed", after, shape), after["pp"])
    assert [rank["layers"] for rank in world.ranks] != [rank["layers"] for rank in whole.ranks]


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
    layout, processes = HYBRID[name]

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


@pytest.fixture(scope="module")
def exported(root, saved):
    """The exported file of the trained checkpoint, by the layout that exported it."""

    @functools.cache
    def export(name: str) -> bytes:
        layout, processes = LAYOUTS[name]
        return exported_file(saved[0], job(root, f"export-{name}", layout), processes)

    return export


@pytest.mark.full
@pytest.mark.parametrize(
    "names",
    [("tp2-sp-vision", "own-1+2-pp2"), ("tp2-pp2", "pp2", "pp2-dealt", "fourfold")],
    ids="+".join,
)
def test_export_is_the_same_bytes_from_any_layout(names, exported, saved):
    alone = exported("alone")
    assert alone != (saved[0].hf_dir / "model.safetensors").read_bytes(), "training changed nothing"
    for name in names:
        assert exported(name) == alone, name
