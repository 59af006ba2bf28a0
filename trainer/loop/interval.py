"""The steps between two lines of metrics.jsonl: their sums, and the line that ends them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from trainer.contract.answer import MetricsRow
from trainer.data.micro_batch import MicroBatch
from trainer.layers.measures.late_numbers import LateNumbers
from trainer.layers.measures.part_clock import PartClock, Span
from trainer.loop.heldout import heldout_loss
from trainer.loop.metrics import peak_flops, peak_memory_gb
from trainer.loop.optim import ParamNorm, set_learning_rate, trained_parts
from trainer.loop.set_up import Trainer, log
from trainer.loop.step import run_micro_batches, train_step
from trainer.objectives.sft import Totals


class NotFinite(Exception):
    """The error that the loss or a gradient is not a finite number."""

    def __init__(self, step: int, grad_norm: float, keys: list[str]) -> None:
        self.step, self.keys = step, keys
        super().__init__(
            f"step {step}: gradient norm is {grad_norm}; nothing of this step was saved. Lower train.optim.lr, or look "
            f"at its {len(keys)} samples, from {keys[0]} on (all are in result.json)"
        )


def is_heldout_step(trainer: Trainer, step: int) -> bool:
    train_config = trainer.run.train
    return step % train_config.heldout_interval == 0 or step == train_config.num_steps


def is_logged(trainer: Trainer, step: int) -> bool:
    """Whether a line of metrics.jsonl ends with this step."""
    return step % trainer.run.execution.log_interval == 0 or is_heldout_step(trainer, step)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step whose numbers are on their way to the host, and the interval that ends with it."""

    step: int  # number of updates, with this one
    # the squared gradient norms; of an interval also the squared norm of the parameters, `Totals.over_ranks` and the
    # sums of the layers' reports
    numbers: LateNumbers
    interval: "_Host | None"  # what the host knows of the interval; None: no line ends with this step


@dataclass(slots=True)
class _Host:
    """The part of a line that the host knows: sums and times of the steps between two lines."""

    totals: Totals  # sums over micro batches
    spans: list[Span]  # the time of the steps, without saves
    parts: list[Span]  # the time of their parts
    steps: int = 0
    lr: float = 0.0


class Interval:
    """The steps between two lines of metrics.jsonl.

    The numbers of a step are read after the next step is launched, so that the device always has work. They are read at
    once before a checkpoint is saved, before the held-out loss is measured and where they are not late.
    """

    def __init__(self, trainer: Trainer, write: Callable[[MetricsRow], None]) -> None:
        self.trainer, self._write = trainer, write
        self._clock: PartClock = trainer.chunks[0].module.clock
        self._param_norm = ParamNorm(trainer.chunks, trainer.optimizer, trainer.mesh)
        self._parts = trained_parts(trainer.optimizer)
        self._ended: _Ended | None = None
        self._squares: torch.Tensor | None = None
        self._started = self._clock.now()
        self._begin()

    def _begin(self) -> None:
        has_mtp = self.trainer.run.train.mtp_loss_scaling_factor > 0
        totals = Totals.zero(self.trainer.mesh.device, self.trainer.cost, has_mtp=has_mtp)
        self._host = _Host(totals, [], [])

    def _pause(self) -> None:
        self._host.spans.append(("steps", self._started, self._clock.now()))

    def resume(self) -> None:
        """Start the clock again, which `end_step` has stopped so that the time of a save does not count for a step."""
        self._started = self._clock.now()

    def add_step(self, batches: Iterator[MicroBatch], per_step: int) -> None:
        """Launch one optimizer update, then read the numbers of the update before it.

        Raises:
            NotFinite: the gradient norm of the update before is not a finite number.
        """
        trainer, host = self.trainer, self._host
        config = trainer.run.train
        host.lr = set_learning_rate(trainer.optimizer, trainer.step, config.optim, config.num_steps)
        for chunk in trainer.chunks:
            chunk.train()
        self._squares = train_step(
            trainer.chunks,
            trainer.optimizer,
            lambda: run_micro_batches(trainer.chunks, batches, per_step, trainer.mesh, host.totals),
        )
        trainer.step += 1
        host.steps += 1
        self._settle()

    def end_step(self, *, is_logged: bool, waits: bool) -> None:
        """Send the numbers of the last update to the host, with those of the interval if it ends here; stop the clock.

        Args:
            waits: read the numbers now.
        """
        host, trainer = self._host, self.trainer
        numbers = [self._squares]
        if is_logged:
            reports = trainer.chunks[0].module.reports
            numbers += [self._param_norm.squared(), host.totals.over_ranks(trainer.mesh), *reports.sums()]
            host.parts = self._clock.take()
        self._ended = _Ended(trainer.step, LateNumbers(torch.cat(numbers)), host if is_logged else None)
        self._pause()
        if is_logged:
            reports.forget()
            self._begin()
        if waits or not self._ended.numbers.are_late:
            self._settle()

    def _settle(self) -> None:
        """Read the numbers of the update that was ended last, if they were not read yet, and write its line."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        trainer, numbers = self.trainer, ended.numbers.tolist()
        grad_norm = numbers[0] ** 0.5
        if not math.isfinite(grad_norm):
            keys = trainer.order.reader.keys(trainer.order.global_batch(ended.step - 1))
            raise NotFinite(ended.step - 1, grad_norm, keys)
        if ended.interval:
            self._write(self._row(ended.step, ended.interval, grad_norm, numbers[1:]))

    def _row(self, step: int, host: _Host, grad_norm: float, numbers: list[float]) -> MetricsRow:
        trainer, module = self.trainer, self.trainer.chunks[0].module
        values, totals = iter(numbers), host.totals
        part_norms = {name: math.sqrt(next(values)) for name in self._parts}
        squared_norm, loss_sum, loss_tokens = islice(values, 3)
        of_mtp = list(islice(values, len(totals.loss_and_tokens) - 2))
        tokens, slots = islice(values, 2)
        flops = {name: next(values) for name in totals.flops}
        seconds = self._clock.seconds(host.spans)["steps"]
        parts = {name: value / host.steps for name, value in self._clock.seconds(host.parts).items()}
        trainer.tokens += int(tokens)
        trainer.loss_tokens += int(loss_tokens)
        trainer.last["loss"] = loss_sum / max(1, loss_tokens)
        heldout = None
        if is_heldout_step(trainer, step):
            heldout = heldout_loss(trainer.chunks, trainer.heldout, trainer.mesh, trainer.run)
        trainer.last["heldout_loss"] = heldout if heldout is not None else trainer.last["heldout_loss"]
        peak = peak_flops()
        row = MetricsRow(
            step=step,
            epoch=trainer.order.epoch(step),
            loss=trainer.last["loss"],
            heldout_loss=heldout,
            mtp_loss=of_mtp[0] / max(1, of_mtp[1]) if of_mtp else None,
            grad_norm=grad_norm,
            **{f"{part}_grad_norm": part_norms.get(part) for part in trainer.family.parts},
            param_norm=math.sqrt(squared_norm),
            lr=host.lr,
            tokens=trainer.tokens,
            loss_tokens=trainer.loss_tokens,
            padding_fraction=1 - tokens / slots,
            tokens_per_second=tokens / seconds,
            step_seconds=seconds / host.steps,
            **{f"{part}_seconds": spent for part, spent in parts.items()},
            **{f"{part}_tflops": value / seconds / 1e12 for part, value in flops.items()},
            **module.reported_metrics(list(values)),
            mfu=sum(flops.values()) / seconds / (peak * trainer.num_devices) if peak else None,
            memory_gb=peak_memory_gb(),
        )
        log.info("step %d loss %.4f%s", row.step, row.loss, "" if heldout is None else f" held-out {heldout:.4f}")
        return row
