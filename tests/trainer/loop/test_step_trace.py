"""A trace of some steps: what is in it, which steps, and that training does not notice."""

import gzip
import json
import logging

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from tests.helpers.run_dir import changed, log_of, metrics_of, run_trainer, write_job
from trainer.contract.run import ProfileConfig
from trainer.layers.measures import PartClock
from trainer.loop.step_trace import MARK, StepTrace, table

PARTS = ("data", "vision", "language", "optimizer")


def run_steps(trace: StepTrace, clock: PartClock, steps: range, stop: int | None = None) -> None:
    """A loop of small matrix products in the place of a training; it ends after step `stop`."""
    for step in steps:
        trace.before(step)
        clock.switch("language")
        torch.ones(8, 8) @ torch.ones(8, 8)
        clock.switch(None)
        trace.after(step == steps[-1] or step == stop)
        if step == stop:
            return


def names_in(path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def steps_in(path) -> list[int]:
    return sorted({int(name.split()[1]) for name in names_in(path) if name.startswith("step ")})


@pytest.mark.parametrize(
    ("first", "count", "todo", "stop", "traced"),
    [
        (3, 2, range(1, 8), None, [3, 4]),
        (1, 1, range(1, 3), None, [1]),
        (6, 20, range(1, 8), None, [6, 7]),
        (3, 4, range(5, 9), None, [5, 6]),  # resumed in their midst
        (2, 5, range(1, 9), 3, [2, 3]),  # a training that stops early
    ],
)
def test_the_steps_that_are_asked_for_are_traced(tmp_path, first, count, todo, stop, traced):
    clock = PartClock()
    trace = StepTrace(ProfileConfig(first_step=first, num_steps=count, rank=2), tmp_path, clock, todo)
    run_steps(trace, clock, todo, stop)
    assert steps_in(tmp_path / "profile" / "rank-2.json.gz") == traced
    assert names_in(tmp_path / "profile" / "rank-2.json.gz").count(f"{MARK}language") == len(traced)
    page = (tmp_path / "profile" / "rank-2.md").read_text()
    assert page.startswith(f"# Steps {traced[0]} to {traced[-1]}: ")
    (row,) = [line for line in page.splitlines() if line.startswith("| `aten::mm` ")]
    assert row.split(" | ")[1] == str(len(traced))
    assert clock.on_switch is None


def test_steps_that_are_past_are_told(tmp_path, caplog):
    clock = PartClock()
    with caplog.at_level(logging.WARNING, "athanor.trainer"):
        trace = StepTrace(ProfileConfig(first_step=3, num_steps=2), tmp_path, clock, range(5, 9))
    assert "nothing is traced; steps 3 to 4 are chosen, 5 to 8 are to come" in caplog.text
    run_steps(trace, clock, range(5, 9))
    assert not (tmp_path / "profile").exists()


@pytest.mark.full
def test_training_does_not_notice(tmp_path):
    plain = write_job(tmp_path, num_steps=4, name="plain")
    traced = write_job(tmp_path, num_steps=4, name="traced")
    traced = changed(traced, profile=ProfileConfig(first_step=2, num_steps=2))
    for run in (plain, traced):
        assert run_trainer(run, processes=0) == 0, log_of(run)
    numbers = [
        [(row.step, row.loss, row.heldout_loss, row.grad_norm, row.language_grad_norm) for row in metrics_of(run)]
        for run in (plain, traced)
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 4
    assert not (plain.output_dir / "profile").exists()
    path = traced.output_dir / "profile" / "rank-0.json.gz"
    names = names_in(path)
    assert steps_in(path) == [2, 3]
    assert all(f"{MARK}{part}" in names for part in PARTS)
    assert "aten::addmm" in names or "aten::mm" in names
    assert "Steps 2 to 3 traced into" in log_of(traced)


def average(key: str, device_type: DeviceType, host: float, device: float) -> FunctionEventAvg:
    row = FunctionEventAvg()
    row.key, row.device_type, row.count = key, device_type, 2
    row.self_cpu_time_total, row.self_device_time_total = host, device
    return row


def test_what_the_device_did_is_counted_once():
    """On CUDA an operator has the time of its kernels, which have rows of their own."""
    rows = [
        average("aten::mm", DeviceType.CPU, host=500, device=3000),
        average("gemm_kernel", DeviceType.CUDA, host=0, device=3000),
        average("fill_kernel", DeviceType.CUDA, host=0, device=1000),
        average("step 4", DeviceType.CUDA, host=0, device=9000),
    ]
    title, *lines = table("Steps 4 to 5", rows).splitlines()
    assert title == "# Steps 4 to 5: 4.0 ms on the device, 0.5 ms on the host"
    assert "| `gemm_kernel` | 2 | 3.000 | 75.0% | 0.000 | 0.0% |" in lines
    assert "| `aten::mm` | 2 | 3.000 | 75.0% | 0.500 | 100.0% |" in lines
