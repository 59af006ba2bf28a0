"""The training loop: steps, lines of metrics, held-out losses and checkpoints, until the last step or SIGTERM."""

import contextlib
import dataclasses
import gc
import logging
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist

from dataset_builders.storage.files import write_text
from trainer.checkpoint.directory import checkpoint_name
from trainer.checkpoint.saver import Checkpointer
from trainer.contract.checkpoint import list_checkpoints
from trainer.contract.names import CHECKPOINTS, HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.result import LAYERS, HeldoutRow, MetricsRow, TrainResult
from trainer.contract.run import RunConfig
from trainer.data.micro_batch import MicroBatch
from trainer.data.order import heldout_bins
from trainer.data.reader import PREFETCH_DEPTH, prefetch
from trainer.layers.measures import AsyncNumbers, Span
from trainer.loop.loss import Totals
from trainer.loop.metrics import MetricsWriter, peak_flops, peak_memory_gb
from trainer.loop.optim import ParamNorm, set_learning_rate, trained_parts
from trainer.loop.set_up import Trainer, set_up
from trainer.loop.step import run_micro_batches, train_step
from trainer.loop.step_trace import StepTrace
from trainer.parallel.mesh import Mesh
from trainer.parallel.vision.exchange import Message

COLLECTION_INTERVAL = 50  # steps between two garbage collections; one then takes 0.4 to 1.0 ms
log = logging.getLogger("athanor.trainer")


class NotFinite(Exception):
    """The error that the loss or a gradient is not a finite number."""

    def __init__(self, step: int, grad_norm: float, keys: list[str]) -> None:
        self.step, self.keys = step, keys
        super().__init__(
            f"step {step}: gradient norm is {grad_norm}; nothing of this step was saved. Lower train.optim.lr, or look "
            f"at its {len(keys)} samples, from {keys[0]} on (all are in result.json)"
        )


def train(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Train to `num_steps` or until SIGTERM, save a checkpoint in both cases, and return the result.

    Raises:
        NotFinite: the gradient norm is not a finite number.
    """
    trainer = set_up(run, mesh)
    with cuda_graphs(trainer):
        signal.signal(signal.SIGTERM, trainer.stop)
        writer = MetricsWriter(run.output_dir, trainer.step) if mesh.is_main else None
        numbers = trainer.order(trainer.step, run.train.num_steps)
        pin = mesh.device.type == "cuda"
        batches = prefetch(trainer.order.reader, numbers, PREFETCH_DEPTH, pin, run.execution.loader_workers)
        if trainer.step == 0:  # the held-out loss before training, to be compared with the one after it
            heldout_loss(trainer, HELDOUT_BASE_JSONL)
        saver = Checkpointer(trainer.chunks, trainer.optimizer, run, mesh, trainer.step)
        with contextlib.closing(batches), saver, garbage_collected_by_steps():
            result = _run_steps(trainer, batches, saver, StepMetrics(trainer, writer))
    trainer.tell_encoders(Message.END, int(result.status == "stopped"))
    return result


def _run_steps(
    trainer: Trainer, batches: Iterator[MicroBatch], saver: Checkpointer, metrics: "StepMetrics"
) -> TrainResult:
    run, context = trainer.run, trainer.context
    per_step, num_steps = run.num_micro_batches(context.mesh.dp), run.train.num_steps
    trace: StepTrace | None = None
    if run.execution.profile is not None and run.execution.profile.rank == context.mesh.rank:
        to_come = range(trainer.step + 1, num_steps + 1)
        trace = StepTrace(run.execution.profile, run.output_dir, context.clock, to_come)
    while trainer.step < num_steps:
        if trace:
            trace.before(trainer.step + 1)
        try:
            lr = set_learning_rate(trainer.optimizer, trainer.step, run.train.optim, num_steps)
            for chunk in trainer.chunks:
                chunk.train()  # a measurement of the held-out loss may have come before
            squares = train_step(trainer.chunks, trainer.optimizer, batches, per_step, context)
            trainer.step += 1
            step, is_last = trainer.step, trainer.step == num_steps
            metrics.read_pending()  # of the step before, while the device computes this one
            # One reduction a step tells every rank of a signal and of an unfinished write, so that all ranks act at the
            # same step.
            stop, is_writing = context.mesh.any(trainer.is_told_to_stop(), saver.is_writing)
            saves = is_last or stop or step % run.execution.checkpoint.save_interval == 0
            if step % COLLECTION_INTERVAL == 0:
                gc.collect()
            ends_line = stop or step % run.execution.log_interval == 0 or is_heldout_step(trainer, step)
            # Before a save the numbers are read at once: a step whose gradient is NaN must never become a checkpoint.
            metrics.end_step(squares, lr, ends_line=ends_line, waits=saves or is_heldout_step(trainer, step))
        except NotFinite:
            # A save that is under way is of an earlier step, whose numbers were read before the save began: keep it.
            saver.finish()
            raise
        if trace:
            trace.after(is_last or stop)
        if saves:
            saver.save(step)
        elif not is_writing:
            saver.finish()  # a write that has ended on all ranks becomes a checkpoint
        if is_last or stop:
            saver.finish()
        metrics.resume_clock()
        if stop and not is_last:
            message = "stopped by SIGTERM; run again to go on from here"
            return _result(trainer, "stopped", checkpoint_name(trainer.step), message)
    # A run that is started again after its last step comes here at once.
    newest = list_checkpoints(run.output_dir / CHECKPOINTS)[-1]
    return _result(trainer, "finished", newest.name, "")


def _result(trainer: Trainer, status: str, name: str, message: str) -> TrainResult:
    return TrainResult(
        status=status, step=trainer.step, checkpoint=f"{CHECKPOINTS}/{name}", message=message, **trainer.last
    )


def is_heldout_step(trainer: Trainer, step: int) -> bool:
    config = trainer.run.train
    return step % config.heldout_interval == 0 or step == config.num_steps


def can_capture_graphs(run: RunConfig, device: torch.device) -> bool:
    """Whether the language layers run as CUDA graphs: the config asks for it, and it is possible."""
    p, config = run.execution.parallel, run.train
    # The auxiliary loss of experts depends on numbers that the host has only when a bin is read.
    fits = p.vpp == 1 and p.sharding != "fsdp" and p.recompute != "full" and not config.experts.coefficient
    return run.execution.cuda_graphs and device.type == "cuda" and config.precision == "bfloat16" and fits


@contextlib.contextmanager
def cuda_graphs(trainer: Trainer) -> Iterator[None]:
    """Run the language layers as CUDA graphs inside the context, if the config and the model allow it."""
    model = trainer.chunks[0].module
    if not can_capture_graphs(trainer.run, trainer.mesh.device):
        yield
        return
    try:
        model.capture_graphs(trainer.run.num_micro_batches(trainer.mesh.dp))
        trainer.context.reports.forget()  # the captures have reported too
        yield
    finally:
        # Before the process groups end, because NCCL waits at the end of a group for every graph that uses the group.
        model.release_graphs()


@contextlib.contextmanager
def garbage_collected_by_steps() -> Iterator[None]:
    """Disable automatic garbage collection inside the context, where the loop itself collects after some steps.

    By default a collection begins whenever enough objects were made: in the middle of a step, on each rank at a
    different time, while all ranks wait for that rank.
    """
    gc.collect()
    gc.freeze()  # model and optimizer are not examined again at every collection
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass(slots=True)
class _Interval:
    """The part of a line that the host knows: sums and times of the steps since the line before."""

    totals: Totals  # sums over micro batches; `StepContext` has the same object until the interval ends
    spans: list[Span] = field(default_factory=list)  # the time of the steps, without saves
    parts: list[Span] = field(default_factory=list)  # the time of their parts
    steps: int = 0
    lr: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose numbers are on their way to the host, and the interval that ends with it."""

    step: int  # number of updates, with this one
    # the squared gradient norms; of an interval also the squared norm of the parameters, `Totals.over_ranks` and the
    # sums of the layers' reports
    numbers: AsyncNumbers
    interval: _Interval | None  # None: no line ends with this step


class StepMetrics:
    """The lines of metrics.jsonl, each over the steps since the line before.

    The numbers of a step are read after the next step is launched, so that the device always has work. They are read at
    once before a checkpoint is saved, before the held-out loss is measured, and where the host computes them itself.

    All ranks go through the same collectives; only the main rank has a writer.
    """

    def __init__(self, trainer: Trainer, writer: MetricsWriter | None) -> None:
        self.trainer, self._context, self._writer = trainer, trainer.context, writer
        self._param_norm = ParamNorm(trainer.chunks, trainer.optimizer, trainer.mesh)
        self._parts = trained_parts(trainer.optimizer)
        self._pending: _Pending | None = None
        self._started = self._context.clock.now()
        self._begin_interval()

    def _begin_interval(self) -> None:
        has_mtp = self.trainer.run.train.mtp_loss_scaling_factor > 0
        self._context.totals = Totals.zero(self.trainer.mesh.device, self.trainer.cost, has_mtp=has_mtp)
        self._interval = _Interval(self._context.totals)

    def end_step(self, squared_norms: torch.Tensor, lr: float, *, ends_line: bool, waits: bool) -> None:
        """Send the numbers of the last update to the host, with those of the interval if it ends here; stop the clock.

        Args:
            squared_norms: `squared_grad_norms` of the update.
            waits: read the numbers now.

        Raises:
            NotFinite: the gradient norm is not a finite number, where it is read now.
        """
        interval, context = self._interval, self._context
        interval.steps += 1
        interval.lr = lr
        numbers = [squared_norms]
        if ends_line:
            numbers += [self._param_norm.squared(), context.totals.over_ranks(context.mesh), *context.reports.sums()]
            interval.parts = context.clock.take()
        self._pending = _Pending(self.trainer.step, AsyncNumbers(torch.cat(numbers)), interval if ends_line else None)
        # The mark of the end is an event after all that the step has launched, the copy of its numbers included.
        interval.spans.append(("steps", self._started, context.clock.now()))
        if ends_line:
            context.reports.forget()
            self._begin_interval()
        if waits or not self._pending.numbers.is_async:
            self.read_pending()

    def resume_clock(self) -> None:
        """Start the clock again, which `end_step` has stopped so that the time of a save does not count for a step."""
        self._started = self._context.clock.now()

    def read_pending(self) -> None:
        """Read the numbers of the update that was ended last, if they were not read yet, and write its line.

        Raises:
            NotFinite: the gradient norm of the update is not a finite number.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        trainer, numbers = self.trainer, pending.numbers.tolist()
        grad_norm = numbers[0] ** 0.5
        if not math.isfinite(grad_norm):
            keys = trainer.order.reader.keys(trainer.order.global_batch(pending.step - 1))
            raise NotFinite(pending.step - 1, grad_norm, keys)
        if pending.interval:
            row = self._row(pending.step, pending.interval, grad_norm, numbers[1:])
            if self._writer:
                self._writer.write(row)

    def _row(self, step: int, interval: _Interval, grad_norm: float, numbers: list[float]) -> MetricsRow:
        """Return the line of an interval; a collective, if the held-out loss is measured or layers report."""
        trainer, context, totals = self.trainer, self._context, interval.totals
        # In the order of `end_step` and, inside it, of `Totals.over_ranks`.
        values = iter(numbers)
        part_norms = {name: math.sqrt(next(values)) for name in self._parts}
        squared_norm, loss_sum, loss_tokens = islice(values, 3)
        of_mtp = list(islice(values, len(totals.loss_and_tokens) - 2))
        tokens, slots = islice(values, 2)
        flops = {name: next(values) for name in totals.flops}
        of_layers = list(values)
        seconds = context.clock.seconds(interval.spans)["steps"]
        parts = {name: value / interval.steps for name, value in context.clock.seconds(interval.parts).items()}
        trainer.tokens += int(tokens)
        trainer.loss_tokens += int(loss_tokens)
        trainer.last["loss"] = loss_sum / max(1, loss_tokens)
        heldout = None
        if is_heldout_step(trainer, step):
            heldout = heldout_loss(trainer)
        trainer.last["heldout_loss"] = heldout if heldout is not None else trainer.last["heldout_loss"]
        reported = {}
        if trainer.shape.language.routes_tokens:  # the same on all ranks, also on those whose layers route none
            reported = context.reports.metrics(of_layers, context.mesh.hosts)
        # Ranks that only encode images are devices of the job, too.
        devices = context.mesh.world_size + trainer.run.execution.parallel.vision_ranks
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
            lr=interval.lr,
            tokens=trainer.tokens,
            loss_tokens=trainer.loss_tokens,
            padding_fraction=1 - tokens / slots,
            tokens_per_second=tokens / seconds,
            step_seconds=seconds / interval.steps,
            **{f"{part}_seconds": spent for part, spent in parts.items()},
            **{f"{part}_tflops": value / seconds / 1e12 for part, value in flops.items()},
            **{f"{LAYERS}{name}": value for name, value in reported.items()},
            mfu=sum(flops.values()) / seconds / (peak * devices) if peak else None,
            memory_gb=peak_memory_gb(),
        )
        log.info("step %d loss %.4f%s", row.step, row.loss, "" if heldout is None else f" held-out {heldout:.4f}")
        return row


def heldout_loss(trainer: Trainer, name: str = HELDOUT_JSONL) -> float | None:
    """Return the mean loss over the loss tokens of all held-out bins; None if there are no bins. Rank 0 writes the mean
    loss of every held-out sample into the file `name`, in order of their keys. A collective."""
    run, chunks, reader, mesh = trainer.run, trainer.chunks, trainer.heldout, trainer.mesh
    if not reader.bins:
        return None
    # The interleaved schedule of virtual stages needs a multiple of the pipeline's ranks.
    multiple = mesh.groups.pp.size() if len(chunks) > 1 else 1
    numbers = heldout_bins(len(reader.bins), mesh.dp_rank, mesh.dp, multiple)
    context = dataclasses.replace(trainer.context, totals=Totals.zero(mesh.device))  # the training's sums stay as is
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        pin = mesh.device.type == "cuda"
        batches = prefetch(reader, iter(numbers), PREFETCH_DEPTH, pin, run.execution.loader_workers)
        losses = run_micro_batches(
            chunks, batches, len(numbers), context, forward_only=True, return_per_token_outputs=True
        )
    # The parts of a measurement are no parts of a step.
    context.clock.switch(None)
    context.clock.take()
    # Context-parallel ranks each have some tokens of a sample, tensor-parallel ranks all of this rank's.
    mine: list[tuple[str, float, int]] = []
    if mesh.groups.tp.rank() == 0:
        for number, of_bin in zip(numbers, losses):  # only the last pipeline rank has losses
            if number is not None:
                parts = of_bin["losses"].cpu().split(of_bin["loss_lengths"])
                mine += [(r.key, float(part.double().sum()), len(part)) for r, part in zip(reader.bins[number], parts)]
    everybody = [mine]
    if mesh.world_size > 1:
        everybody = [[] for _ in range(mesh.world_size)]
        dist.all_gather_object(everybody, mine)
    sums: dict[str, tuple[float, int]] = {}
    for key, loss, count in (row for rows in everybody for row in rows):
        before = sums.get(key, (0.0, 0))
        sums[key] = before[0] + loss, before[1] + count
    if mesh.is_main:
        rows = [HeldoutRow(key=k, loss=loss / n if n else None, loss_tokens=n) for k, (loss, n) in sorted(sums.items())]
        write_text(run.output_dir / name, "".join(row.model_dump_json() + "\n" for row in rows))
    loss_sum, loss_tokens = context.totals.over_ranks(mesh)[:2].tolist()
    return loss_sum / max(1, loss_tokens)
