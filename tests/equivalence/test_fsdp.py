"""Weights divided by FSDP2 against megatron-core's distributed optimizer: the same training, on any number of ranks."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from tests.equivalence.test_layouts import SMOOTH, assert_close
from tests.helpers.bins import MIXED, make_samples
from tests.helpers.hardware import requires_gpus
from tests.helpers.run_dir import OPTIM, changed, log_of, make_bins, metrics_of, model_dir, run_trainer, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import full
from tests.helpers.world import run_world
from trainer.checkpoint import hf_weights
from trainer.checkpoint.save_and_load import state_of_model
from trainer.contract.names import HF_EXPORT
from trainer.contract.parallel import ParallelConfig
from trainer.contract.result import MetricsRow
from trainer.contract.run import PartConfig, RunConfig, TrainConfig
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.data.order import bins_for_step
from trainer.loop.export import export
from trainer.loop.set_up import set_up
from trainer.parallel import fsdp
from trainer.parallel.fsdp import FullyShardedModel
from trainer.parts.delta import module as delta_module

pytestmark = pytest.mark.promise(
    "FSDP2 on 1, 2 and 3 processes trains as the distributed optimizer does: losses to 1e-6, gradient norms to "
    "1e-5, weights to 2e-6."
)

NUM_STEPS, GLOBAL_BATCH = 5, 6  # six bins: one, two and three ranks share them
FSDP = ParallelConfig(sharding="fsdp", balance=False)
FSDP_AGAIN = FSDP.model_copy(update={"recompute": "full", "recompute_vision": True})
PLAIN = ParallelConfig(balance=False)
FROZEN = PartConfig(frozen=True)
AT_ONCE = OPTIM.model_copy(update={"warmup_steps": 0})  # a warm-up must be shorter than the training
NORMS = ("param_norm", "grad_norm", "vision_grad_norm", "merger_grad_norm", "language_grad_norm")


def job(
    root: Path, parallel: ParallelConfig, name: str, shape: str = "first", steps: int = NUM_STEPS, **train: object
) -> RunConfig:
    """A run that saves after each second step, and keeps all checkpoints."""
    sizes = {"num_steps": steps, "global_batch_size": GLOBAL_BATCH, "save_interval": 2}
    run = write_job(root, **sizes, shape=shape, parallel=parallel, name=name)
    kept = run.execution.checkpoint.model_copy(update={"keep_last": 9})
    config = TrainConfig(**{**run.train.model_dump(), "heldout_interval": 1, **train})
    return changed(run, train=config, checkpoint=kept)


def trained(root: Path, parallel: ParallelConfig, processes: int, **train: object) -> RunConfig:
    run = job(root, parallel, f"{parallel.sharding}-{processes}-{parallel.recompute}", **train)
    run_world(run, processes, save=True)
    return run


def assert_same_training(run: RunConfig, expected: RunConfig, first_step: int = 1) -> None:
    rows = [row for row in metrics_of(run) if row.step >= first_step]
    others = [row for row in metrics_of(expected) if row.step >= first_step]
    assert len(rows) == NUM_STEPS - first_step + 1
    for ours, theirs in zip(rows, others, strict=True):
        assert_same_row(ours, theirs)


def assert_same_row(ours: MetricsRow, theirs: MetricsRow) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6), ours.step
    assert ours.heldout_loss == pytest.approx(theirs.heldout_loss, rel=1e-6), ours.step
    for name in NORMS:
        norm, expected = getattr(ours, name), getattr(theirs, name)
        assert norm == (expected and pytest.approx(expected, rel=1e-5)), (ours.step, name)
    assert ours.mtp_loss == (theirs.mtp_loss and pytest.approx(theirs.mtp_loss, rel=1e-6)), ours.step
    assert ours.tokens == theirs.tokens


def exported(run: RunConfig, mesh) -> dict[str, torch.Tensor]:
    """The HF weights of a run's last checkpoint."""
    (newest,) = run.output_dir.glob(f"checkpoints/step-{NUM_STEPS:06d}")
    update = {"task": "export", "checkpoint_dir": newest, "output_dir": run.output_dir / "export"}
    export(run.model_copy(update=update), mesh)
    return load_file(run.output_dir / "export" / HF_EXPORT / "model.safetensors")


def copy_with_checkpoint(run: RunConfig, name: str, step: int, parallel: ParallelConfig | None = None) -> RunConfig:
    """The run in another directory, which holds one checkpoint of it."""
    copy = changed(run, output_dir=run.output_dir.parent / name, parallel=parallel or run.execution.parallel)
    checkpoint = f"checkpoints/step-{step:06d}"
    shutil.copytree(run.output_dir / checkpoint, copy.output_dir / checkpoint)
    return copy


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "parallel", "parts"),
    [
        pytest.param("first", FSDP, {}, id="first"),
        pytest.param("hybrid-first", FSDP, {}, id="hybrid"),
        pytest.param("hybrid-second", FSDP_AGAIN, {}, id="hybrid-recompute"),
        pytest.param("mtp-first", FSDP, {}, id="mtp"),
        pytest.param("mtp-second", FSDP_AGAIN, {}, id="mtp-recompute"),
        pytest.param("hybrid-first", FSDP, dict.fromkeys(("vision", "merger"), FROZEN), id="hybrid-frozen"),
    ],
)
def test_two_ranks_equal_one_process(shape, parallel, parts, tmp_path):
    """And exported. And resumed: to the bit on as many ranks, on one, and on two again."""
    ours = trained(tmp_path, parallel, 2, shape=shape, optim=SMOOTH, **parts)
    theirs = trained(tmp_path, PLAIN, 1, shape=shape, optim=SMOOTH, **parts)
    assert_same_training(ours, theirs)
    with single_rank() as mesh:
        assert_close(exported(ours, mesh), exported(theirs, mesh))
    again, on_one = (copy_with_checkpoint(ours, name, 2) for name in ("again", "on-one"))
    run_world(again, 2)
    for row, expected in zip(metrics_of(again), metrics_of(ours)[2:], strict=True):
        for name in ("loss", "heldout_loss", "tokens", *NORMS):
            assert getattr(row, name) == getattr(expected, name), (row.step, name)
    run_world(on_one, 1, save=True)
    assert_same_training(on_one, ours, first_step=3)
    on_two = copy_with_checkpoint(on_one, "on-two", 4)
    run_world(on_two, 2)
    assert_same_training(on_two, ours, first_step=5)


def test_a_model_is_divided_before_it_has_memory(tmp_path, monkeypatch):
    """FSDP2 divides parameters that have only shapes. Each weight is read once, one whole weight at a time."""
    run, read, alive = job(tmp_path, FSDP, "empty"), [], []
    divide, read_part = fsdp._divide, hf_weights.read_part

    def dividing(module, *args):
        assert all(param.is_meta for param in module.parameters())
        divide(module, *args)

    def reading(*args):
        part = read_part(*args)
        read.append(StorageWeakRef(part.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in read))
        return part

    monkeypatch.setattr(fsdp, "_divide", dividing)
    monkeypatch.setattr(hf_weights, "read_part", reading)
    with single_rank() as mesh:
        chunk = set_up(run, mesh).chunks[0]
        assert len(read) == len(chunk.slices) > 8 and set(alive) == {1}
        assert not any(piece.is_meta for piece in chunk.slices.values())


def test_some_rank_sees_text_alone_in_each_step_of_three(tmp_path):
    """The other runs prove nothing unless some rank's vision encoder has no image."""
    bins, seed = make_bins(), job(tmp_path, PLAIN, "bins").train.seed
    for step in range(NUM_STEPS):
        numbers = bins_for_step([len(bins)], seed=seed, step=step, global_batch_size=GLOBAL_BATCH)
        assert any(all(len(s.image_grid_thw) == 0 for s in bins[n]) for n in numbers)


@pytest.mark.full
@pytest.mark.parametrize(("parallel", "processes"), [(FSDP, 1), (FSDP, 3), (FSDP_AGAIN, 2)], ids=["1", "3", "again-2"])
def test_other_ranks_equal_one_process(parallel, processes, tmp_path):
    """Three ranks share two held-out bins, and rows that do not divide by three."""
    assert_same_training(trained(tmp_path, parallel, processes), trained(tmp_path, PLAIN, 1))


@pytest.mark.full
@pytest.mark.parametrize(("written", "other"), [(FSDP, PLAIN), (PLAIN, FSDP)], ids=["fsdp", "distributed_optimizer"])
def test_a_checkpoint_of_the_other_sharding_is_refused(written, other, tmp_path):
    copy = copy_with_checkpoint(trained(tmp_path, written, 1), "other", 2, other)
    refusal = f"saved with parallel.sharding={written.sharding}, .* set parallel.sharding"
    with pytest.raises(AssertionError, match=refusal):
        run_world(copy, 1)


@pytest.mark.full
@pytest.mark.parametrize("frozen", ["vision", "language"])
def test_frozen_parts_and_rates_of_their_own(frozen, tmp_path):
    parts = {frozen: FROZEN, "merger": PartConfig(lr=1e-3, weight_decay=0.5)}
    ours, theirs = trained(tmp_path, FSDP, 2, **parts), trained(tmp_path, PLAIN, 1, **parts)
    assert_same_training(ours, theirs)
    assert all(getattr(row, f"{frozen}_grad_norm") is None for row in metrics_of(ours))


@pytest.mark.parametrize("shape", ["first", full("hybrid-first"), full("hybrid-second")])
def test_bfloat16_rounds_as_the_other_does(shape, tmp_path):
    """From weights that bfloat16 holds, both begin with the same; the first step shows the casts and the sums.

    Every gradient but those of the first vision layers comes from the same products and is summed in float32. There
    the gradient of a deepstack layer's output is a sum of three bfloat16 numbers, which the two add in another order:
    two roundings of at most 2^-9 each. Later steps differ by that. A delta layer's decays are no numbers of bfloat16,
    and a cast of them would show.
    """
    runs = []
    for parallel in (FSDP, PLAIN):
        run = job(tmp_path, parallel, parallel.sharding, shape, num_steps=1, optim=AT_ONCE, precision="bfloat16")
        run = run.model_copy(update={"hf_dir": rounded_hf_dir(tmp_path / "hf", shape)})
        run_world(run, 2)
        runs.append(metrics_of(run))
    ours, theirs = (rows[0] for rows in runs)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert ours.language_grad_norm == pytest.approx(theirs.language_grad_norm, rel=1e-6)
    assert ours.merger_grad_norm == pytest.approx(theirs.merger_grad_norm, rel=1e-6)
    assert ours.vision_grad_norm == pytest.approx(theirs.vision_grad_norm, rel=2**-8)


@pytest.mark.full
def test_layers_of_two_kinds_in_bfloat16_resumed(tmp_path):
    """To the bit on as many ranks; on one as far off as bfloat16's products are."""
    ours = trained(tmp_path, FSDP, 2, shape="hybrid-first", precision="bfloat16")
    for name, processes, close in (("again", 2, 0.0), ("on-one", 1, 2e-3)):
        run = copy_with_checkpoint(ours, name, 2)
        run_world(run, processes)
        for row, expected in zip(metrics_of(run), metrics_of(ours)[2:], strict=True):
            assert row.loss == pytest.approx(expected.loss, rel=close, abs=0), (name, row.step)


@pytest.mark.full
def test_bfloat16_keeps_float32_weights(tmp_path):
    run = trained(tmp_path, FSDP, 2, precision="bfloat16")
    with single_rank() as mesh:
        weights = exported(run, mesh)
    for name, weight in weights.items():
        assert (weight.bfloat16().float() != weight).float().mean() > 0.5, name


@pytest.mark.parametrize("recomputes", [False, True])
def test_decays_are_float32_in_layers_of_bfloat16(recomputes, monkeypatch):
    """Return the inputs of the delta rule in both forward passes, and the gradients."""
    seen, compute = [], delta_module.gated_delta_net

    def looked_at(*args):
        given = args[4]
        values = [getattr(given, field.name) for field in dataclasses.fields(given)]
        seen.append([value.dtype for value in values if isinstance(value, torch.Tensor)])
        return compute(*args)

    monkeypatch.setattr(delta_module, "gated_delta_net", looked_at)
    with single_rank() as mesh:
        model = build_tiny(model_dir("hybrid-first"), mesh)
        model.language.decoder.recompute = recomputes
        geometry = geometry_of(model.shape)
        batch = make_micro_batch(make_samples(MIXED, geometry, range(20, 300)), geometry, model.seq_len)
        expected = {name: p.detach().clone() for name, p in model.named_parameters() if ".decay." in name}
        chunk = FullyShardedModel(model, torch.bfloat16, mesh.groups.dp, mesh.device, state_of_model(model))
        chunk(batch).sum().backward()
        chunk.finish_grad_sync()
    assert len(expected) == 6 and len(seen) == (6 if recomputes else 3)
    rounded, exact = torch.bfloat16, torch.float32
    assert all(dtypes == [rounded, exact, exact, rounded] for dtypes in seen), seen
    for name, before in expected.items():
        assert torch.equal(chunk.slices[name], before) and chunk.slices[name].grad.any(), name


def rounded_hf_dir(directory: Path, shape: str = "first") -> Path:
    """A copy of the random weights, rounded to bfloat16, but for those that the model has in float32."""
    if not directory.is_dir():
        shutil.copytree(model_dir(shape), directory)
        weights = load_file(directory / "model.safetensors")
        exact = ("A_log", "dt_bias")
        rounded = {name: tensor if name.endswith(exact) else tensor.bfloat16() for name, tensor in weights.items()}
        save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@requires_gpus(2)
@pytest.mark.parametrize("shape", ["first", "hybrid-third"])
def test_two_gpus(shape, tmp_path):
    """Transformer Engine's modules and its Adam, on slices."""
    runs = []
    for parallel in (FSDP, PLAIN):
        run = job(tmp_path, parallel, parallel.sharding, shape, precision="bfloat16")
        run = run.model_copy(update={"hf_dir": rounded_hf_dir(tmp_path / "hf", shape)})
        assert run_trainer(run, processes=2) == 0, log_of(run)
        runs.append(metrics_of(run))
    for ours, theirs in zip(*runs, strict=True):
        assert math.isclose(ours.loss, theirs.loss, rel_tol=5e-3), ours.step
