"""A training step on a GPU waits for the device at its end alone, however many bins it has."""

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
from trainer.loop import interval, set_up

SETTLED = 3  # steps before it compile kernels and plan attention
AT_THE_END = 3  # the loss tokens of the step, the norms by part where they are logged, the norm that clips
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


def places_of_waits(root, global_batch_size: int, steps: int) -> list[tuple[list[str], list[str]]]:
    """Return for each step where the host waited during its micro batches, and after them."""
    run = write_job(root, num_steps=steps, bins=make_bins("first", KINDS), global_batch_size=global_batch_size)
    run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "bfloat16"})})
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    found: list[tuple[list[str], list[str]]] = []
    now: dict[str, list] = {}
    train_step, finalize = interval.train_step, set_up.finalize_gradients

    def stepping(*args, **kwargs):
        with recorded() as now["caught"]:
            result = train_step(*args, **kwargs)
        found.append((now["before"], places(now["caught"])[len(now["before"]) :]))
        return result

    def finalizing(*args, **kwargs):
        now["before"] = places(now["caught"])
        return finalize(*args, **kwargs)

    with patch.object(interval, "train_step", stepping), patch.object(set_up, "finalize_gradients", finalizing):
        train_rank(run.output_dir, 0, save=False)
    return found[SETTLED:]


@requires_gpus(1)
@pytest.mark.parametrize("bins", [2, 8])
def test_the_host_waits_after_the_last_bin_alone(tmp_path, bins):
    found = places_of_waits(tmp_path, bins, SETTLED + 4)
    print("\n", found[-1])
    assert [during for during, _ in found] == [[]] * 4
    assert all(1 <= len(after) <= AT_THE_END for _, after in found), found


@requires_gpus(1)
def test_a_wait_is_seen():
    with recorded() as caught:
        torch.ones(2, device="cuda").sum().item()
    assert places(caught)
