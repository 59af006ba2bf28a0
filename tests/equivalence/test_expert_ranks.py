"""Ranks that divide the experts: checkpoints and exports of other layouts, stacked matrices on disk.

The layouts themselves are among those of `test_layouts.py`.
"""

import functools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.equivalence.test_layouts import SP
from tests.equivalence.test_resharding import job
from tests.helpers.resuming import assert_resumes, exported_file
from tests.helpers.run_dir import changed
from tests.helpers.tiers import tiered
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.world import World, run_world
from trainer.contract.adapter import AdapterConfig
from trainer.contract.names import HF_EXPORT
from trainer.contract.run import ExpertsConfig, PartConfig, RunConfig

pytestmark = pytest.mark.promise(
    "A checkpoint resumes to the bit, and in other layouts with losses to 1e-6 and gradient norms to 1e-5, also "
    "where ranks hold unlike parts; one of adapters refuses another base; all layouts export the same bytes."
)

SHAPE = "experts-shared"
EP2 = {"ep": 2}
LAYOUTS = {
    "alone": ({}, 1),
    "ep2": (EP2, 2),
    "dp2": ({}, 2),
    "tp2-sp": ({"tp": 2, **SP}, 2),
    "ep4-tp2-sp": ({"ep": 4, "tp": 2, **SP}, 4),
    "ep2-pp2": ({**EP2, "pp": 2}, 4),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[RunConfig, World]:
    """Six steps on two ranks that divide the experts, saved after three, uninterrupted."""
    run = job(tmp_path_factory.mktemp("experts"), "saved", EP2, SHAPE)
    return run, run_world(run, 2, save=True)


@pytest.mark.parametrize("name", tiered(LAYOUTS, ("alone",)))
def test_saved_on_ep2_and_resumed(name, saved):
    layout, processes = LAYOUTS[name]
    resumed = job(saved[0].output_dir.parent, f"resumed-{name}", layout, SHAPE)
    assert_resumes(saved, resumed, processes, exact=name == "ep2")


@pytest.fixture(scope="module")
def exported(saved):
    """Returns the exported file of the trained checkpoint, by the layout that exports it."""

    @functools.cache
    def export(name: str) -> bytes:
        layout, processes = LAYOUTS[name]
        run = job(saved[0].output_dir.parent, f"export-{name}", layout, SHAPE)
        return exported_file(saved[0], run, processes)

    return export


@pytest.mark.parametrize("name", tiered([name for name in LAYOUTS if name != "alone"], ("ep2",)))
def test_export_is_the_same_bytes_from_any_layout(name, exported):
    assert exported(name) == exported("alone")


def write_stacked(directory: Path) -> Path:
    """Write the model with one tensor for the matrices of all experts of a layer, as the published models have it.

    transformers writes one tensor for each matrix.
    """
    shutil.copytree(experts_hf_dir("shared"), directory)
    tensors = load_file(directory / "model.safetensors")
    single = [name for name in tensors if ".mlp.experts." in name]
    for layer in sorted({name.partition("experts.")[0] for name in single}):
        experts = range(sum(name.startswith(layer) and name.endswith("down_proj.weight") for name in single))
        for stacked, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            matrices = [
                torch.cat([tensors.pop(f"{layer}experts.{number}.{part}.weight") for part in parts])
                for number in experts
            ]
            tensors[f"{layer}experts.{stacked}"] = torch.stack(matrices)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.full
def test_stacked_matrices_are_read_and_written_by_ranks_that_divide_the_experts(tmp_path, saved):
    run = changed(job(tmp_path, "stacked", EP2, SHAPE), hf_dir=write_stacked(tmp_path / "hf"))
    world = run_world(run, 2, save=True)
    assert [row.loss for row in world.rows] == [row.loss for row in saved[1].rows]
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


@pytest.mark.full
@pytest.mark.parametrize("name", ["alone", "ep4-tp2-sp", "ep2-pp2"])
@pytest.mark.promise(
    "PEFT gives our logits from our adapters to 1e-5, those of experts too; merging is `merge_and_unload` to the "
    "bit, training continues from its directory and ours, and an adapter beside its base answers as the merged "
    "model."
)
def test_adapters_of_experts_resume_and_are_exported_in_other_layouts(name, tmp_path):
    adapter = AdapterConfig(rank=8, alpha=16, targets=("attention", "experts"))
    (layout, processes), given = LAYOUTS[name], {"adapter": adapter}

    def with_adapters(called: str, layout: dict) -> RunConfig:
        run = job(tmp_path, called, layout, SHAPE)
        return changed(run, train=run.train.model_copy(update=given), base_digest="hf_dir@1234")

    run = with_adapters("saved", EP2)
    saved = run, run_world(run, 2, save=True)
    assert_resumes(saved, with_adapters(f"resumed-{name}", layout), processes)
    assert_resumes(saved, with_adapters("resumed-ep2", EP2), 2, exact=True)
    files = {
        called: exported_file(run, with_adapters(f"export-{called}", layout), processes)
        for called, (layout, processes) in ((name, LAYOUTS[name]), ("ep2", LAYOUTS["ep2"]))
    }
    assert files[name] == files["ep2"]
