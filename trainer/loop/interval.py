"""The steps between two lines of metrics.jsonl: their sums, and the line that ends them."""

import math
import time

import torch

from trainer.contract.answer import MetricsRow
from trainer.loop.heldout import heldout_loss
from trainer.loop.metrics import peak_flops, peak_memory_gb
from trainer.loop.optim import set_learning_rate, squared_param_norm
from trainer.loop.set_up import Trainer, log
from trainer.loop.step import run_micro_batches, train_step
from trainer.objectives.totals import Totals


class NotFinite(Exception):
    """The error that the loss or a gradient is not a finite number."""

    def __init__(self, step: int, grad_norm: float, keys: list[str]) -> None:
        self.step, self.keys = step, keys
        super().__init__(
            f"step {step}: gradient norm is {grad_norm}; nothing of this step was saved. Lower train.optim.lr, or look "
            f"at its {len(keys)} samples, from {keys[0]} on (all are in result.json)"
        )


def is_heldout_step(trainer: Trainer, step: int) -> bool:
    """Whether the held-out loss is measured after this step."""
    train_config = trainer.run.train
    return step % train_config.heldout_interval == 0 or step == train_config.num_steps


def is_logged(trainer: Trainer, step: int) -> bool:
    """Whether a line of metrics.jsonl ends with this step."""
    return step % trainer.run.execution.log_interval == 0 or is_heldout_step(trainer, step)


class Interval:
    """The steps between two lines of metrics.jsonl."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._begin()

    def _begin(self) -> None:
        has_mtp = self.trainer.run.train.mtp_loss_scaling_factor > 0
        self.totals = Totals.zero(self.trainer.mesh.device, self.trainer.cost, has_mtp=has_mtp)
        self.steps = 0
        self.grad_norm = self.lr = 0.0
        self.part_norms: dict[str, float] = {}
        self.seconds = 0.0
        self.started = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock, so that the time of a save does not count for a step."""
        self.seconds += time.perf_counter() - self.started

    def resume(self) -> None:
        """Start the clock again."""
        self.started = time.perf_counter()

    def add_step(self, batches, per_step: int) -> None:
        """Run one optimizer update.

        Raises:
            NotFinite: the gradient norm is not a finite number.
        """
        trainer = self.trainer
        config = trainer.run.train
        self.lr = set_learning_rate(trainer.optimizer, trainer.step, config.optim, config.num_steps)
        for chunk in trainer.chunks:
            chunk.train()
        self.grad_norm, self.part_norms = train_step(
            trainer.chunks,
            trainer.optimizer,
            lambda: run_micro_batches(trainer.chunks, batches, per_step, trainer.mesh, self.totals),
            by_part=is_logged(trainer, trainer.step + 1),
        )
        if not math.isfinite(self.grad_norm):
            keys = trainer.order.reader.keys(trainer.order.global_batch(trainer.step))
            raise NotFinite(trainer.step, self.grad_norm, keys)
        trainer.step += 1
        self.steps += 1

    def close(self) -> MetricsRow:
        """Return the line of this interval, reduced over ranks, and begin the next interval."""
        trainer = self.trainer
        squared_norm = squared_param_norm(trainer.chunks, trainer.optimizer, trainer.mesh)
        self.pause()
        seconds = self.seconds
        parts = {name: value / self.steps for name, value in trainer.chunks[0].module.clock.read().items()}
        totals = self.totals.over_ranks(trainer.mesh)
        loss_sum, loss_tokens, *of_mtp, squared_norm = torch.cat([totals.loss_and_tokens, squared_norm]).tolist()
        trainer.tokens += totals.tokens
        trainer.loss_tokens += int(loss_tokens)
        trainer.last["loss"] = loss_sum / max(1, loss_tokens)
        heldout = None
        if is_heldout_step(trainer, trainer.step):
            heldout = heldout_loss(trainer.chunks, trainer.heldout, trainer.mesh, trainer.run)
        trainer.last["heldout_loss"] = heldout if heldout is not None else trainer.last["heldout_loss"]
        peak = peak_flops()
        row = MetricsRow(
            step=trainer.step,
            epoch=trainer.order.epoch(trainer.step),
            loss=trainer.last["loss"],
            heldout_loss=heldout,
            mtp_loss=of_mtp[0] / max(1, of_mtp[1]) if of_mtp else None,
            grad_norm=self.grad_norm,
            **{f"{part}_grad_norm": self.part_norms.get(part) for part in trainer.family.parts},
            param_norm=math.sqrt(squared_norm),
            lr=self.lr,
            tokens=trainer.tokens,
            loss_tokens=trainer.loss_tokens,
            padding_fraction=1 - totals.tokens / totals.slots,
            tokens_per_second=totals.tokens / seconds,
            step_seconds=seconds / self.steps,
            **{f"{part}_seconds": spent for part, spent in parts.items()},
            **{f"{part}_tflops": flops / seconds / 1e12 for part, flops in totals.flops.items()},
            **trainer.chunks[0].module.reported_metrics(),
            mfu=totals.flops.total() / seconds / (peak * trainer.num_devices) if peak else None,
            memory_gb=peak_memory_gb(),
        )
        log.info("step %d loss %.4f%s", row.step, row.loss, "" if heldout is None else f" held-out {heldout:.4f}")
        self._begin()
        return row
