"""The optimizer's tensors, written by whoever holds them, are those that megatron-core would gather."""

import importlib.util
import math
import random

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import single_rank
from tests.trainer.checkpoint.test_checkpoint_reader import make_parts, torch_adam  # noqa: F401, a fixture
from trainer.checkpoint import optimizer_state
from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.directory import list_checkpoints
from trainer.checkpoint.optimizer_state import rectangles
from trainer.checkpoint.saver import Checkpointer

pytestmark = pytest.mark.promise(
    "Saves change no bit of a training; a kill at any point of a save, or a full disk, costs that save alone; "
    "SIGTERM ends with one, and what was killed with -9 goes on to the bit."
)


def test_rectangles_cover_any_run_of_numbers_once_and_in_order():
    draw = random.Random(0)
    for _ in range(2000):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        first = draw.randrange(math.prod(shape))
        last = draw.randint(first + 1, math.prod(shape))
        numbers = torch.arange(math.prod(shape)).view(shape)
        found = [
            numbers[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].flatten()
            for offset, size in rectangles(shape, first, last)
        ]
        assert torch.equal(torch.cat(found), torch.arange(first, last)), (shape, first, last)


def test_a_whole_tensor_is_one_rectangle():
    assert list(rectangles((3, 4, 5), 0, 60)) == [((0, 0, 0), (3, 4, 5))]


def megatrons_own():
    """The function that `install` replaces, from a second copy of its module."""
    spec = importlib.util.spec_from_file_location("distrib_optimizer_as_it_was", distrib_optimizer.__file__)
    spec.submodule_search_locations = None
    module = importlib.util.module_from_spec(spec)
    module.__package__ = distrib_optimizer.__package__
    spec.loader.exec_module(module)
    return module.DistributedOptimizer.sharded_param_state_fully_reshardable


@pytest.mark.full
@pytest.mark.parametrize("writer", ["megatron-core", "athanor"])
def test_a_checkpoint_of_before_is_loaded_as_one_of_today(tmp_path, writer, monkeypatch):
    run = write_job(tmp_path, num_steps=4)
    with single_rank() as mesh:
        chunks, optimizer = make_parts(run, mesh)
        for param in chunks[0].module.parameters():
            param.main_grad.normal_()
        optimizer.step()
        with Checkpointer(chunks, optimizer, run, mesh) as saver, monkeypatch.context() as patch:
            if writer == "megatron-core":
                cls = distrib_optimizer.DistributedOptimizer
                patch.setattr(optimizer_state, "install", lambda: None)
                patch.setattr(cls, "sharded_param_state_fully_reshardable", megatrons_own())
            saver.save(1)
            saver.finish()
        expected = tensors_of(optimizer)
        others, empty = make_parts(run, mesh)
        checkpoint.load(others, empty, list_checkpoints(run.output_dir / "checkpoints")[0], mesh)
        assert len(expected) > 100
        for ours, theirs in zip(tensors_of(empty), expected, strict=True):
            assert torch.equal(ours, theirs)


def tensors_of(optimizer) -> list[torch.Tensor]:
    (part,) = optimizer.chained_optimizers
    params = [param for group in part.optimizer.param_groups for param in group["params"]]
    return [tensor for p in params for tensor in (p, *part.optimizer.state[p].values())]
