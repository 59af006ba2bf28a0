"""Jobs of six steps that are saved after three: resumed in another layout, and exported by another."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.world import World, run_world
from trainer.contract.names import HF_EXPORT
from trainer.contract.run import RunConfig

STEPS, SAVED_AT = 6, 3


def checkpoint_of(run: RunConfig, step: int) -> Path:
    return run.output_dir / f"checkpoints/step-{step:06d}"


def assert_resumes(saved: tuple[RunConfig, World], resumed: RunConfig, processes: int, *, exact: bool = False) -> World:
    """Resume, in another layout, a run that was saved at SAVED_AT, and compare the steps that follow.

    Args:
        saved: the saved run, and what it gave without an interruption.
        resumed: the run that goes on, of as many processes as its layout needs.
        exact: whether the sums are taken in the same order, so that every bit must agree.
    """
    run, whole = saved
    shutil.copytree(checkpoint_of(run, SAVED_AT), checkpoint_of(resumed, SAVED_AT))
    world = run_world(resumed, processes)
    expected = [row for row in whole.rows if row.step > SAVED_AT]
    assert [row.step for row in expected] == [4, 5, 6]
    for ours, theirs in zip(world.rows, expected, strict=True):
        if exact:
            assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
            assert ours.heldout_loss == theirs.heldout_loss
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert (ours.step, ours.tokens) == (theirs.step, theirs.tokens)
    return world


def exported_file(saved: RunConfig, run: RunConfig, processes: int) -> bytes:
    """Export the last checkpoint of a run in the layout of another, and return the only file."""
    run = run.model_copy(update={"task": "export", "checkpoint_dir": checkpoint_of(saved, STEPS)})
    run_world(run, processes)
    (file,) = (run.output_dir / HF_EXPORT).iterdir()
    assert file.name == "model.safetensors"
    return file.read_bytes()
