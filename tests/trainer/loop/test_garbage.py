"""Garbage is collected between steps, at the same ones everywhere, and a step makes none."""

import gc

import pytest

from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import single_rank
from trainer.loop import garbage
from trainer.loop import train as loop
from trainer.loop.garbage import collect_after, collected_by_steps


def test_nothing_is_collected_but_after_the_steps_that_are_told():
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase) if phase == "start" else None)
    try:
        with collected_by_steps():
            collections.clear()
            cycles = [[] for _ in range(100_000)]
            for cycle in cycles:
                cycle.append(cycle)
            del cycles, cycle
            for step in range(1, 2 * garbage.INTERVAL):
                collect_after(step)
            assert len(collections) == 1
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()


def test_it_is_as_before_after_an_error():
    with pytest.raises(KeyError), collected_by_steps():
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_step_makes_no_garbage_that_waits_for_a_collection(tmp_path, monkeypatch):
    """Tensors in cycles would hold a device's memory until then."""
    found = []
    monkeypatch.setattr(loop, "collect_after", lambda step: found.append(gc.collect()))
    run = write_job(tmp_path, num_steps=8)
    with single_rank() as mesh:
        loop.train(run, mesh)
    assert len(found) == 8 and found[4:] == [0] * 4, found
