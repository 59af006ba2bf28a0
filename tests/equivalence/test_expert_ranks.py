"""Ranks that divide the experts: stacked matrices on disk, other trainings, checkpoints of adapters.

The layouts themselves are among those of `test_layouts.py`, and their checkpoints among those of `test_resharding.py`.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.equivalence.test_layouts import layout_of
from tests.equivalence.test_resharding import job
from tests.helpers.adapters import job_with
from tests.helpers.resuming import assert_resumes, exported_file
from tests.helpers.run_dir import changed
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.world import World, run_world
from tests.parity.test_experts import stored_as
from trainer.contract.adapter import AdapterConfig
from trainer.contract.names import HF_EXPORT
from trainer.contract.run import ExpertsConfig, PartConfig, RunConfig

pytestmark = pytest.mark.promise(
    "A checkpoint resumes to the bit, and in other layouts with losses to 1e-6 and gradient norms to 1e-5, also "
    "where ranks hold unlike parts; one of adapters refuses another base; all layouts export the same bytes."
)

SHAPE = "experts-shared"
EP2 = {"ep": 2}


@pytest.mark.full
def test_stacked_matrices_are_read_and_written_by_ranks_that_divide_the_experts(tmp_path):
    """The published models have them stacked; transformers writes one tensor for each matrix."""
    hf_dir = stored_as("stacked", experts_hf_dir("shared"), tmp_path / "hf")
    run = changed(job(tmp_path, "stacked", EP2, SHAPE), hf_dir=hf_dir)
    single = job(tmp_path, "single", EP2, SHAPE)
    losses = [[row.loss for row in run_world(one, 2, save=True).rows] for one in (run, single)]
    assert losses[0] == losses[1]
    export = changed(job(tmp_path, "export", EP2, SHAPE), hf_dir=run.hf_dir)
    exported_file(run, export, 2)
    before, after = (load_file(path / "model.safetensors") for path in (run.hf_dir, export.output_dir / HF_EXPORT))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    experts = [name for name in before if ".mlp.experts." in name]
    assert experts and all((before[name] != after[name]).any() for name in experts)


TRAININGS = {
    "adapters": {"adapter": AdapterConfig(kind="lora", rank=4, alpha=8)},
    "language frozen": {"language": PartConfig(frozen=True)},
    "vision frozen": {"vision": PartConfig(frozen=True), "experts": ExpertsConfig(coefficient=0.1)},
}


@pytest.mark.full
@pytest.mark.parametrize("training", TRAININGS)
def test_other_trainings_on_ep2_are_those_of_one_process(training, tmp_path):
    rows = {}
    for name, layout, processes in (("alone", {}, 1), ("ep2", EP2, 2)):
        run = job(tmp_path, name, layout, SHAPE)
        run = changed(run, train=run.train.model_copy(update=TRAININGS[training]))
        rows[name] = run_world(run, processes, save=True).rows
    for ours, theirs in zip(rows["ep2"], rows["alone"], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert ours.param_norm == pytest.approx(theirs.param_norm, rel=1e-6)


def with_adapters(root: Path, name: str, layout: dict) -> RunConfig:
    adapter = AdapterConfig(rank=8, alpha=16, targets=("attention", "experts"))
    return job_with(job(root, name, layout, SHAPE), adapter, base_digest="hf_dir@1234")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[RunConfig, World, bytes]:
    """Six steps on two ranks that divide the experts, saved after three, uninterrupted, and exported by them."""
    root = tmp_path_factory.mktemp("adapters")
    run = with_adapters(root, "saved", EP2)
    whole = run_world(run, 2, save=True)
    return run, whole, exported_file(run, with_adapters(root, "export", EP2), 2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["alone", "experts-ep2-dp2", "experts-ep4-tp2-sp-dp2", "experts-ep2-pp2"])
@pytest.mark.promise(
    "PEFT gives our logits from our adapters to 1e-5, those of experts too; merging is `merge_and_unload` to the "
    "bit, training continues from its directory and ours, and an adapter beside its base answers as the merged "
    "model."
)
def test_adapters_of_experts_resume_and_are_exported_in_other_layouts(name, saved, tmp_path):
    (run, whole, file), (layout, processes) = saved, layout_of(name)
    resumed = with_adapters(tmp_path, "resumed", layout)
    assert_resumes((run, whole), resumed, processes, exact=name == "experts-ep2-dp2")
    assert exported_file(run, with_adapters(tmp_path, "export", layout), processes) == file
