"""Checkpoints of adapters: small, of one base model, resumed to the bit and in other layouts, exported to one file."""

import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load, load_file

from dataset_builders.errors import InputError
from tests.equivalence import test_layouts
from tests.equivalence.test_layouts import SMOOTH, SP, layout_of
from tests.helpers.adapters import adapter_of, job_with
from tests.helpers.resuming import SAVED_AT, STEPS, assert_resumes, checkpoint_of
from tests.helpers.run_dir import changed
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import full
from tests.helpers.world import World, run_world
from trainer.checkpoint.directory import read_step
from trainer.contract.checkpoint import read_checkpoint_record
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT
from trainer.contract.parallel import ParallelConfig
from trainer.contract.peft import ADAPTER_WEIGHTS
from trainer.contract.result import read_metrics
from trainer.contract.run import CheckpointConfig, PartConfig, RunConfig

pytestmark = pytest.mark.promise(
    "A checkpoint resumes to the bit, and in other layouts with losses to 1e-6 and gradient norms to 1e-5, also "
    "where ranks hold unlike parts; one of adapters refuses another base; all layouts export the same bytes."
)

ADAPTERS = {
    "first": adapter_of("first", kind="dora"),
    "hybrid-first": adapter_of(
        "hybrid-first", targets=("attention", "mlp", "delta"), modules_to_save=(r"model\.visual\.merger",)
    ),
}
LAYOUTS = ("alone", "tp2-sp", "pp2-first-3", "pp2-dealt", "own-1+1", "dp2", "cp2", "tp2-pp2")
TP2 = {"tp": 2, **SP}


def job(root: Path, name: str, layout: dict, shape: str) -> RunConfig:
    optim = SMOOTH.model_copy(update={"lr": 1e-2})
    run = test_layouts.job(root, name, shape, layout, num_steps=STEPS, global_batch_size=2, optim=optim)
    keep = CheckpointConfig(save_interval=SAVED_AT, keep_last=5)
    return job_with(changed(run, checkpoint=keep), ADAPTERS[shape], base_digest="hf_dir@1234")


@pytest.fixture(scope="module", params=["first", full("hybrid-first")])
def saved(request, tmp_path_factory) -> tuple[str, RunConfig, World]:
    """Six steps on tp2, saved after three, uninterrupted."""
    run = job(tmp_path_factory.mktemp("adapters"), "saved", TP2, request.param)
    return request.param, run, run_world(run, 2, save=True)


def adapters_of(run: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_saved_on_tp2_and_resumed(name, saved):
    shape, run, whole = saved
    layout, processes = layout_of(name)
    resumed = job(run.output_dir.parent, f"resumed-{name}", layout, shape)
    assert_resumes((run, whole), resumed, processes, exact=name == "tp2-sp")
    ours, theirs = adapters_of(resumed), adapters_of(run)
    assert ours.keys() == theirs.keys()
    if name == "tp2-sp":
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 2e-6


def test_a_checkpoint_holds_what_is_trained_and_its_optimizer_alone(saved):
    """Each adapter's number four times: as it is, in float32, and two moments."""
    _, run, _ = saved
    with single_rank():
        found = dist_checkpointing.load_plain_tensors(str(checkpoint_of(run, STEPS)))
    tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    numbers = sum(tensor.numel() for tensor in adapters_of(run).values())
    weights = {name for name in tensors if not name.startswith("optimizer.")}
    assert sum(tensors[name].numel() for name in weights) == numbers
    for state in ("param", "exp_avg", "exp_avg_sq"):
        of_state = {name.removeprefix(f"optimizer.state.{state}."): name for name in tensors if f".{state}." in name}
        assert of_state.keys() == weights
        assert sum(tensors[name].numel() for name in of_state.values()) == numbers
    assert {".adapter." in name or "merger." in name for name in weights} == {True}
    assert len(tensors) == 4 * len(weights)


@pytest.mark.parametrize("task", ["train", "export"])
def test_another_base_is_refused_in_one_line_that_names_both(saved, task):
    _, run, _ = saved
    assert read_checkpoint_record(checkpoint_of(run, STEPS))["base"] == {
        "hf_dir": str(run.hf_dir),
        "digest": "hf_dir@1234",
    }
    other = run.model_copy(update={"base_digest": "hf_dir@5678", "task": task, "fingerprint": "0" * 16})
    with pytest.raises(InputError, match="holds adapters of the base model") as error:
        read_step(checkpoint_of(run, STEPS), other)
    message = str(error.value)
    assert message.count(str(run.hf_dir)) == 2 and "(hf_dir@1234)" in message and "(hf_dir@5678)" in message
    assert "set model to the first" in message and "\n" not in message


@pytest.mark.full
def test_frozen_parts_keep_their_adapters_through_a_checkpoint(tmp_path):
    """They are as they began, in the export too."""
    run = job(tmp_path, "saved", {}, "first")
    run = run.model_copy(update={"train": run.train.model_copy(update={"merger": PartConfig(frozen=True)})})
    run_world(run, 1, save=True)
    before = adapters_of(run)
    still = [name for name in before if ".visual." in name and "merger" in name and "lora_B" in name]
    assert still and not any(before[name].any() for name in still)
    exported = exported_from(run, "export", {}, 1)
    assert exported[f"adapter/{ADAPTER_WEIGHTS}"] == (run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS).read_bytes()


def exported_from(run: RunConfig, name: str, layout: dict, processes: int) -> dict[str, bytes]:
    """The files of the trained checkpoint's export by a layout."""
    other = changed(run, task="export", checkpoint_dir=checkpoint_of(run, STEPS), parallel=ParallelConfig(**layout))
    other = other.model_copy(update={"output_dir": run.output_dir.parent / name})
    other.output_dir.mkdir()
    run_world(other, processes)
    folders = (other.output_dir / ADAPTER_EXPORT, other.output_dir / HF_EXPORT)
    return {f"{folder.name}/{file.name}": file.read_bytes() for folder in folders for file in folder.iterdir()}


@pytest.fixture(scope="module")
def exported(saved) -> dict[str, bytes]:
    return exported_from(saved[1], "export", {}, 1)


def test_an_export_by_one_rank_has_the_bytes_that_the_training_on_two_wrote(saved, exported):
    _, run, _ = saved
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert exported.keys() == {*(f"adapter/{name}" for name in names), "hf/model.safetensors"}
    assert exported["hf/model.safetensors"] != (run.hf_dir / "model.safetensors").read_bytes(), "nothing was trained"
    assert all((run.output_dir / ADAPTER_EXPORT / name).read_bytes() == exported[f"adapter/{name}"] for name in names)


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp2-sp", "own-1+1"])
def test_export_is_the_same_bytes_from_any_layout(name, saved, exported):
    assert exported_from(saved[1], f"export-{name}", *layout_of(name)) == exported


@pytest.mark.full
@pytest.mark.parametrize("shape", ["first", "hybrid-first"])
def test_divided_by_fsdp(shape, tmp_path):
    """Trained as on one rank, resumed to the bit, and exported by another layout to the same adapters."""
    sharded = {"sharding": "fsdp", "balance": False}
    alone, run = job(tmp_path, "alone", {"balance": False}, shape), job(tmp_path, "fsdp", sharded, shape)
    expected, whole = run_world(alone, 1), run_world(run, 2, save=True)
    for ours, theirs in zip(whole.rows, expected.rows, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    with single_rank():
        found = dist_checkpointing.load_plain_tensors(str(checkpoint_of(run, STEPS)))
    tensors = {name for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert {".adapter." in name or "vision.merger." in name for name in tensors} == {True}
    resumed = job(tmp_path, "resumed", sharded, shape)
    shutil.copytree(checkpoint_of(run, SAVED_AT), checkpoint_of(resumed, SAVED_AT))
    rows = run_world(resumed, 2, save=True).rows
    assert [(r.loss, r.grad_norm) for r in rows] == [(r.loss, r.grad_norm) for r in whole.rows if r.step > SAVED_AT]
    files = exported_from(run, "export", {}, 1)
    assert files == exported_from(resumed, "export-resumed", sharded, 2) == exported_from(run, "export-tp2", TP2, 2)
    ours, theirs = load(files[f"adapter/{ADAPTER_WEIGHTS}"]), adapters_of(alone)
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in theirs) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp2-sp", "pp2-dealt", "own-1+1", "tp2-pp2"])
def test_a_training_goes_on_from_an_adapter_in_any_layout(name, saved):
    """Each rank reads its part of PEFT's file; ranks that encode for others are given theirs."""
    shape, run, _ = saved
    start = {"adapter_dir": run.output_dir / ADAPTER_EXPORT}
    alone = run.output_dir.parent / "started-alone"
    if not alone.exists():
        run_world(job(run.output_dir.parent, alone.name, {}, shape).model_copy(update=start), 1)
    layout, processes = layout_of(name)
    ours = run_world(job(run.output_dir.parent, f"started-{name}", layout, shape).model_copy(update=start), processes)
    expected = read_metrics(alone)
    assert expected[0].loss < read_metrics(run.output_dir)[0].loss - 0.1
    for row, other in zip(ours.rows, expected, strict=True):
        assert row.loss == pytest.approx(other.loss, rel=1e-6)
        assert row.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
