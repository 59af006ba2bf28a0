"""A training step on a GPU does not wait for the device, however many bins it has."""

import contextlib
import warnings
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from tests.equivalence.test_layouts import KINDS
from tests.helpers.hardware import requires_gpus
from tests.helpers.run_dir import make_bins, write_job
from tests.helpers.world import train_rank
from trainer.loop import train as loop
from trainer.loop.train import StepMetrics

SETTLED = 3  # steps before it compile kernels and plan attention
WAITED = "synchronizing CUDA operation"


@contextlib.contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """Collect torch's warnings, which include waits for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")


def places(caught: list[warnings.WarningMessage]) -> list[str]:
    return [f"{w.filename}:{w.lineno}" for w in caught if WAITED in str(w.message)]


def places_of_waits(root, global_batch_size: int, steps: int) -> list[list[str]]:
    """Return for each step where the host waited: in its launch, and while numbers of steps are sent and read."""
    run = write_job(root, num_steps=steps, bins=make_bins("first", KINDS), global_batch_size=global_batch_size)
    settings = {"precision": "bfloat16", "heldout_interval": 1000}
    run = run.model_copy(update={"train": run.train.model_copy(update=settings)})
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    waits: list[list[str]] = []
    train_step, read_pending, end_step = loop.train_step, StepMetrics.read_pending, StepMetrics.end_step

    def training(*args: object) -> torch.Tensor:
        with recorded() as caught:
            squared_norms = train_step(*args)
        waits.append(places(caught))
        return squared_norms

    def reading(self: StepMetrics) -> None:
        with recorded() as caught:
            read_pending(self)
        waits[-1] += places(caught)

    def ending(self: StepMetrics, *args: object, **kwargs: object) -> None:
        with recorded() as caught:
            end_step(self, *args, **kwargs)
        waits[-1] += places(caught)

    with (
        patch.object(loop, "train_step", training),
        patch.object(StepMetrics, "read_pending", reading),
        patch.object(StepMetrics, "end_step", ending),
    ):
        train_rank(run.output_dir, 0, save=False)
    return waits[SETTLED:-1]  # the last measures the held-out loss


@requires_gpus(1)
@pytest.mark.parametrize("bins", [2, 8])
def test_no_step_waits(tmp_path, bins):
    assert places_of_waits(tmp_path, bins, SETTLED + 5) == [[]] * 4


@requires_gpus(1)
def test_a_wait_is_seen():
    with recorded() as caught:
        torch.ones(2, device="cuda").sum().item()
    assert places(caught)
