"""A torch.profiler trace of some steps, on request: `execution.profile` of a recipe.

    profile/rank-0.json.gz   Chrome trace, for chrome://tracing or https://ui.perfetto.dev
    profile/rank-0.md        the operators and kernels that took most time

The profiler changes no number. Each step is a range such as "step 12". A mark such as "athanor-part:vision", on any
thread, shows where the next part of the step (data, vision, language, optimizer) begins.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from dataset_builders.storage.files import write_text
from trainer.contract.names import PROFILE
from trainer.contract.run import ProfileConfig
from trainer.layers.measures import PartClock

MARK = "athanor-part:"
NUM_ROWS = 30
_DEVICE, _HOST = "self_device_time_total", "self_cpu_time_total"  # microseconds
log = logging.getLogger("athanor.trainer")


class StepTrace:
    """A trace of some steps of one rank; the loop calls it before and after each step.

    The profiler starts one step before the first traced step, if possible. That step absorbs the profiler's own start
    and is not part of the trace.
    """

    def __init__(self, config: ProfileConfig, directory: Path, clock: PartClock, steps: range) -> None:
        """Choose the steps to trace among the remaining `steps` of the training, counted from 1; warn if none
        remains."""
        self._path, self._clock = directory / PROFILE / f"rank-{config.rank}.json.gz", clock
        chosen = range(config.first_step, config.first_step + config.num_steps)
        self._steps = range(max(chosen.start, steps.start), min(chosen.stop, steps.stop))
        self._start = max(self._steps.start - 1, steps.start)
        self._step = 0
        self._profile: profile | None = None
        self._range: AbstractContextManager | None = None
        if not self._steps:
            log.warning(
                "execution.profile: nothing is traced; steps %d to %d are chosen, %d to %d are to come",
                *(chosen[0], chosen[-1], steps.start, steps.stop - 1),
            )

    def before(self, step: int) -> None:
        """Begin a step; the profiler runs from the step before the first traced one."""
        if self._steps and step == self._start:
            self._profile = self._begin()
        if self._profile is not None:
            if step == self._steps.start and torch.cuda.is_available():
                torch.cuda.synchronize()  # the host is ahead of the device; the trace begins with this step
            self._step, self._range = step, record_function(f"step {step}")
            self._range.__enter__()

    def after(self, is_last: bool) -> None:
        """End a step; write the trace after the last traced step, or at the end of the training."""
        if self._profile is None:
            return
        self._range.__exit__(None, None, None)
        if is_last or self._step == self._steps[-1]:
            self._profile.stop()
            self._profile, self._clock.on_switch = None, None
        else:
            self._profile.step()

    def _begin(self) -> profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        phases = schedule(wait=0, warmup=self._steps.start - self._start, active=len(self._steps), repeat=1)
        watching = profile(activities=activities, schedule=phases, on_trace_ready=self._write)
        watching.start()
        self._clock.on_switch = _mark
        return watching

    def _write(self, watched: profile) -> None:
        started = time.perf_counter()
        self._path.parent.mkdir(exist_ok=True)
        watched.export_chrome_trace(str(self._path))
        steps = f"Steps {self._steps.start} to {self._step}"
        write_text(self._path.parent / f"{self._path.name.partition('.')[0]}.md", table(steps, watched.key_averages()))
        log.warning("%s traced into %s in %.1f s", steps, self._path, time.perf_counter() - started)


def _mark(part: str | None) -> None:
    """Record a range of no length, because the backward pass begins a part on one thread and ends it on another."""
    with record_function(f"{MARK}{part}"):
        pass


def table(title: str, averages: Sequence[FunctionEventAvg]) -> str:
    """Return a Markdown table of the operators and kernels with most time of their own, on the device if there is
    one."""
    rows = [row for row in averages if not row.key.startswith((MARK, "ProfilerStep", "step "))]
    # An operator's device time is that of its kernels, which have their own rows, so only kernels count for the sum.
    device = sum(getattr(row, _DEVICE) for row in rows if row.device_type != DeviceType.CPU)
    host = sum(getattr(row, _HOST) for row in rows)
    first = _DEVICE if device else _HOST
    lines = [
        f"# {title}: {device / 1e3:,.1f} ms on the device, {host / 1e3:,.1f} ms on the host",
        "",
        "| operator or kernel | calls | device, ms | of all | host, ms | of all |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda row: -getattr(row, first))[:NUM_ROWS]:
        times = [(getattr(row, _DEVICE), device), (getattr(row, _HOST), host)]
        cells = [f"{time / 1e3:,.3f} | {time / (total or 1):.1%}" for time, total in times]
        lines.append(f"| `{row.key[:100].replace('|', '/')}` | {row.count:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
