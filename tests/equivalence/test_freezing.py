"""Training with parts frozen or with rates of their own: whole runs, most of them in this process."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from dataset_builders.errors import InputError
from tests.helpers.reference import random_hf_dir
from tests.helpers.run_dir import SEQ_LEN, make_bins, metrics_of, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import tiered
from tests.helpers.world import run_world
from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.directory import list_checkpoints
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import PartConfig, RunConfig, TrainConfig
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.families.qwen3_vl.family import part_of
from trainer.libraries.megatron_private import patch_torch_adam
from trainer.loop.train import train

pytestmark = pytest.mark.promise(
    "Vision, merger or language keep their bits where frozen, in every combination; each may have its own rate "
    "and decay."
)

PARTS = ("vision", "merger", "language")
FREEZINGS = ("nothing", *PARTS, "vision+merger", "vision+language", "merger+language")
RATES = {
    "vision": PartConfig(lr=4e-3, weight_decay=0.0),
    "merger": PartConfig(lr=8e-3, weight_decay=0.5),
    "language": PartConfig(lr=1e-3),
}


NUM_STEPS = 6  # two epochs of six bins in global batches of two


@pytest.fixture(scope="module")
def mesh():
    """One process group for all runs of this module."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, single_rank() as mesh:
        if not torch.cuda.is_available():
            for name in ("_set_main_param_and_optimizer_states", "state_dict"):
                patch.setattr(DistributedOptimizer, name, getattr(DistributedOptimizer, name))
            patch_torch_adam()
        yield mesh
    signal.signal(signal.SIGTERM, handler)


def job(root: Path, parts: dict[str, PartConfig], *, num_steps: int = NUM_STEPS, **changes: object) -> RunConfig:
    """A run whose parts are trained as told, with its run.json."""
    run = write_job(root, num_steps=num_steps, **changes)
    config = TrainConfig(**{**run.train.model_dump(), "heldout_interval": num_steps, **parts})
    run = run.model_copy(update={"train": config})
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    return run


def frozen_parts(frozen: str) -> dict[str, PartConfig]:
    return {part: PartConfig(frozen=True) for part in PARTS if part in frozen}


def parameters(run: RunConfig, mesh, *, trained: bool) -> dict[str, torch.Tensor]:
    """Return the weights of the base model, or of the run's last checkpoint."""
    model = build_tiny(run.hf_dir, mesh, run.seq_len)
    if trained:
        checkpoint.load_model([model], list_checkpoints(run.output_dir / "checkpoints")[-1])
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("frozen", tiered(FREEZINGS, ("merger+language",)))
def test_what_is_frozen_keeps_its_bits_and_all_else_learns(frozen, mesh, tmp_path):
    run = job(tmp_path, frozen_parts(frozen), num_steps=9)
    assert train(run, mesh).status == "finished"
    before, after = parameters(run, mesh, trained=False), parameters(run, mesh, trained=True)
    for name, value in after.items():
        assert torch.equal(value, before[name]) is (part_of(name) in frozen), name
    rows = metrics_of(run)
    for row in rows:
        norms = {part: getattr(row, f"{part}_grad_norm") for part in PARTS}
        assert {part for part, norm in norms.items() if norm is None} == frozen_parts(frozen).keys()
        assert sum(norm**2 for norm in norms.values() if norm) == pytest.approx(row.grad_norm**2, rel=1e-6)
    first_epoch, last_epoch = rows[:3], rows[-3:]
    assert sum(row.loss for row in last_epoch) < sum(row.loss for row in first_epoch)


@pytest.mark.full
@pytest.mark.parametrize("frozen", FREEZINGS)
def test_bins_without_an_image(frozen, mesh, tmp_path):
    """Vision and merger get a gradient of exactly zero, whatever is frozen behind them."""
    text_only = [bin_ for bin_ in make_bins() if not any(len(sample.image_grid_thw) for sample in bin_)]
    run = job(tmp_path, frozen_parts(frozen), num_steps=3, bins=text_only * 2)
    train(run, mesh)
    for row in metrics_of(run):
        assert row.vision_grad_norm == (None if "vision" in frozen else 0)
        assert row.merger_grad_norm == (None if "merger" in frozen else 0)
        assert (row.language_grad_norm is None) if "language" in frozen else row.language_grad_norm > 0


@pytest.mark.full
def test_a_checkpoint_of_other_freezing_is_refused(mesh, tmp_path):
    train(job(tmp_path, {}, num_steps=3), mesh)
    run = job(tmp_path, frozen_parts("vision"), num_steps=3).model_copy(update={"fingerprint": "f" * 16})
    with pytest.raises(InputError, match=r"vision\.frozen: False -> True"):
        train(run, mesh)


VALUES = ("loss", "heldout_loss", "tokens", "param_norm", "grad_norm", *(f"{part}_grad_norm" for part in PARTS))


def values_of(run: RunConfig) -> list[tuple]:
    return [tuple(getattr(row, name) for name in VALUES) for row in metrics_of(run)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "frozen"), [({}, "nothing"), ({}, "vision"), ({"pp": 2}, "language")], ids=["rates", "data", "pipeline"]
)
def test_two_ranks_equal_one_and_resume_to_the_bit(layout, frozen, mesh, tmp_path):
    """The second pipeline rank has nothing to train where language is frozen; it saves and resumes all the same."""
    parts = RATES | frozen_parts(frozen)
    one = job(tmp_path, parts, name="one")
    two = job(tmp_path, parts, name="two", parallel=ParallelConfig(**layout), save_interval=3)
    train(one, mesh)
    run_world(two, 2, save=True)
    whole = values_of(two)
    for ours, theirs in zip(whole, values_of(one), strict=True):
        assert ours == tuple(value and pytest.approx(value, rel=1e-6) for value in theirs)
    shutil.rmtree(list_checkpoints(two.output_dir / "checkpoints")[-1])
    run_world(two, 2, save=True)
    assert values_of(two) == whole


def test_frozen_vision_keeps_no_graph(mesh):
    """Its layers cost the memory of a forward pass only."""
    model = build_tiny(random_hf_dir("first"), mesh)
    for name, param in model.named_parameters():
        param.requires_grad = part_of(name) != "vision"
    seen = []
    model.vision.blocks.layers[-1].register_forward_hook(lambda *given: seen.append(given[2][0].requires_grad))
    model(make_micro_batch(make_bins()[0], geometry_of(model.shape), SEQ_LEN))
    assert seen == [False]
