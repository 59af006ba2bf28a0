"""Garbage is collected between steps, at the same steps on every rank, and no tensor of a step waits for it."""

import gc
from unittest.mock import MagicMock

import pytest
import torch

from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import single_rank
from trainer.loop import train as loop
from trainer.loop.train import garbage_collected_by_steps


def test_nothing_is_collected_in_the_middle_of_a_step():
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase) if phase == "start" else None)
    try:
        with garbage_collected_by_steps():
            collections.clear()
            cycles = [[] for _ in range(100_000)]
            for cycle in cycles:
                cycle.append(cycle)
            del cycles, cycle
            assert not collections
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()


def test_it_is_as_before_after_an_error():
    with pytest.raises(KeyError), garbage_collected_by_steps():
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_no_tensor_of_a_step_waits_for_a_collection(tmp_path, monkeypatch):
    """Tensors in reference cycles would hold a device's memory until a collection. Only tensors are counted, because
    threads of libraries that earlier tests started in the same process make garbage of their own."""
    tensors = []

    def collect():
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            tensors.append([tuple(thing.shape) for thing in gc.garbage if isinstance(thing, torch.Tensor)])
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    monkeypatch.setattr(loop, "COLLECTION_INTERVAL", 2)
    monkeypatch.setattr(loop, "gc", MagicMock(wraps=gc, collect=collect))  # megatron-core and torch collect too
    run = write_job(tmp_path, num_steps=16)
    with single_rank() as mesh:
        loop.train(run, mesh)
    # One collection before the first step, and one after every second.
    assert len(tensors) == 9 and tensors[5:] == [[]] * 4
