"""The unchanged trainer with a few of its steps under torch.profiler, for benchmarks.

    torchrun -m tests.bench.traced_trainer run.json FIRST COUNT RANKS

Steps FIRST (from 1) to FIRST + COUNT - 1 are traced on the ranks of the comma-separated list, into trace-<rank>.json
beside run.json; the step before runs under the profiler uncounted. Until then nothing differs from `-m trainer`: what
marks the parts of a step in the trace is put in when the profiler starts. The host waits for the device only before the
first traced step and after the last.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from tests.bench.trace_parts import MARK, STEP_BEGINS, STEP_ENDS
from trainer.layers.decoder import LanguageModel
from trainer.layers.measures import PartClock
from trainer.layers.packed_model import PackedModel
from trainer.loop import job, set_up
from trainer.loop import train as loop
from trainer.parallel.mesh import place_in_world


def mark(part: str) -> None:
    """Mark that everything that the host launches from here on belongs to `part`."""
    with record_function(MARK + part):
        pass


class TracedSteps:
    """A replacement of trainer.loop.step.train_step."""

    def __init__(self, train_step: Callable, directory: Path, first: int, count: int) -> None:
        self._train_step, self._directory = train_step, directory
        self._first, self._stop = first, first + count
        self._step = 0
        self._profiler: profile | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        self._step += 1
        if self._step == self._first - 1:
            self._start()
        if self._profiler is None or self._step >= self._stop:
            return self._train_step(*args, **kwargs)
        if self._step == self._first:
            torch.cuda.synchronize()
        mark(STEP_BEGINS)
        mark("optimizer")  # gradients are set to zero
        result = self._train_step(*args, **kwargs)
        if self._step == self._stop - 1:
            torch.cuda.synchronize()
        mark(STEP_ENDS)
        self._profiler.step()
        return result

    def _start(self) -> None:
        mark_parts()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        plan = schedule(wait=0, warmup=1, active=self._stop - self._first, repeat=1)
        self._profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def _write(self, profiler: profile) -> None:
        path = self._directory / f"trace-{place_in_world()[0]}.json"
        partial = path.with_name("partial-" + path.name)
        profiler.export_chrome_trace(str(partial))
        os.replace(partial, path)


def mark_parts() -> None:
    """Set marks where the trainer's clock changes its part, around the loss, and where a backward pass starts."""
    switch, losses, forward = PartClock.switch, LanguageModel.losses, PackedModel.forward

    def marked_switch(self: PartClock, part: str | None) -> None:
        if part is not None:
            mark(part)
        switch(self, part)

    def marked_losses(self: LanguageModel, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        mark("loss")
        _mark_on_gradient(hidden, "language")
        return losses(self, hidden, *args, **kwargs)

    def marked_forward(self: PackedModel, *args: object, **kwargs: object) -> torch.Tensor:
        out = forward(self, *args, **kwargs)
        _mark_on_gradient(out, "loss" if self.post_process else "language")
        return out

    PartClock.switch, LanguageModel.losses, PackedModel.forward = marked_switch, marked_losses, marked_forward


def _mark_on_gradient(tensor: torch.Tensor, part: str) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda _: mark(part))


def main() -> int:
    run_json, first, count, ranks = sys.argv[1:]
    if place_in_world()[0] in map(int, ranks.split(",")):
        finalize = set_up.finalize_gradients

        def marked_finalize(*args: object, **kwargs: object) -> None:
            mark("optimizer")  # gradients are reduced and scaled in the time that the clock counts for the last part
            finalize(*args, **kwargs)

        set_up.finalize_gradients = marked_finalize
        loop.train_step = TracedSteps(loop.train_step, Path(run_json).parent, int(first), int(count))
    return job.run_file(Path(run_json))


if __name__ == "__main__":
    sys.exit(main())
