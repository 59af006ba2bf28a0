"""The host launches a step before it reads the numbers of the step before, and reads no other number of the device."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers.run_dir import changed, make_bins, metrics_of, write_job
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import full
from trainer.checkpoint.directory import list_checkpoints
from trainer.contract.run import RunConfig
from trainer.data.order import bins_for_step
from trainer.layers.measures import AsyncNumbers
from trainer.loop import set_up, step
from trainer.loop import train as loop

STEPS = 6
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
NUMBERS = ("step", "loss", "heldout_loss", "grad_norm", "language_grad_norm", "param_norm", "tokens", "loss_tokens")


class Late(AsyncNumbers):
    """Numbers of a CPU that behave as those of a GPU."""

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__(numbers)
        self.is_async, self._arrival = True, SimpleNamespace(synchronize=lambda: None)


class Reads(TorchFunctionMode):
    """A mode that notes the calls that need a tensor's value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        masks = name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype is torch.bool
        if name in READS or masks:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def job(
    tmp_path, name: str = "run", save_interval: int = 1000, shape: str = "first", **train_settings: object
) -> RunConfig:
    run = write_job(tmp_path, num_steps=STEPS, name=name, save_interval=save_interval, shape=shape)
    return changed(run, train=run.train.model_copy(update=train_settings))


def test_nothing_is_read_from_the_end_of_backward_to_the_next_step(tmp_path, monkeypatch):
    reads = Reads()

    def watched(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def watching(*args, **kwargs):
            with reads:
                return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watching)

    def left_out(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def alone(*args, **kwargs):
            noted = len(reads.names)
            result = function(*args, **kwargs)
            del reads.names[noted:]
            return result

        monkeypatch.setattr(owner, name, alone)

    watched(set_up, "finalize_gradients")
    watched(step, "clip_and_update")
    watched(loop.StepMetrics, "end_step")
    left_out(torch.optim.AdamW, "step")  # on a GPU Adam is another one
    left_out(loop.StepMetrics, "read_pending")  # at the last step
    monkeypatch.setattr(loop, "AsyncNumbers", Late)
    with single_rank() as mesh:
        loop.train(job(tmp_path, heldout_interval=1000), mesh)
    assert reads.names == []


def test_a_line_is_written_after_the_next_launch_and_has_the_same_numbers(tmp_path, monkeypatch):
    order: list[tuple[str, int]] = []

    def trained(name: str) -> list[tuple]:
        run = job(tmp_path, name, save_interval=4, shape="text-first")
        order.clear()
        with single_rank() as mesh:
            loop.train(run, mesh)
        return [tuple(getattr(row, name) for name in NUMBERS) for row in metrics_of(run)]

    train_step, row = loop.train_step, loop.StepMetrics._row

    def launching(*args):
        order.append(("launched", sum(kind == "launched" for kind, _ in order) + 1))
        return train_step(*args)

    def writing(self, number, *args):
        order.append(("written", number))
        return row(self, number, *args)

    monkeypatch.setattr(loop, "train_step", launching)
    monkeypatch.setattr(loop.StepMetrics, "_row", writing)
    at_once = trained("at-once")
    assert [number for _, number in order] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    monkeypatch.setattr(loop, "AsyncNumbers", Late)
    assert trained("late") == at_once
    # Steps 3 and 6 measure the held-out loss, steps 4 and 6 save.
    assert [number for kind, number in order if kind == "launched"] == [1, 2, 3, 4, 5, 6]
    assert "".join(f"{kind[0]}{number}" for kind, number in order) == "l1l2w1l3w2w3l4w4l5l6w5w6"


@pytest.mark.parametrize(("save_interval", "launched"), [(3, 3), full(1000, 4)])
def test_a_gradient_that_is_not_finite_is_seen_before_its_step_is_saved(save_interval, launched, tmp_path, monkeypatch):
    updates, update = [], step.clip_and_update

    def poisoned(*args):
        updates.append(1)
        return update(*args) * (math.nan if len(updates) == 3 else 1)

    monkeypatch.setattr(step, "clip_and_update", poisoned)
    monkeypatch.setattr(loop, "AsyncNumbers", Late)
    run, earlier = job(tmp_path, save_interval=save_interval, heldout_interval=1000), set(threading.enumerate())
    with single_rank() as mesh, pytest.raises(loop.NotFinite, match="step 2: gradient norm is nan") as raised:
        loop.train(run, mesh)
    assert raised.value.step == 2 and len(updates) == launched
    bins = bins_for_step([len(make_bins())], seed=run.train.seed, step=2, global_batch_size=2)
    assert {int(key.removeprefix("train/")[:4]) for key in raised.value.keys} == set(bins)
    assert [row.step for row in metrics_of(run)] == [1, 2]
    assert not list_checkpoints(run.output_dir / "checkpoints")
    assert not [thread for thread in set(threading.enumerate()) - earlier if thread.name.startswith("bins")]
