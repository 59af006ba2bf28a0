"""The training of a model: its steps, in the order of the README."""

import contextlib
import signal
from collections.abc import Iterator

import torch

from trainer.checkpoint.directory import checkpoint_name, list_checkpoints
from trainer.checkpoint.saver import Checkpointer
from trainer.contract.answer import TrainResult
from trainer.contract.names import CHECKPOINTS, HELDOUT_BASE_JSONL
from trainer.contract.run import RunConfig
from trainer.data.micro_batch import MicroBatch
from trainer.data.reader import PREFETCH_DEPTH, prefetch
from trainer.loop.garbage import collect_after, collected_by_steps
from trainer.loop.heldout import heldout_loss
from trainer.loop.interval import Interval, NotFinite, is_heldout_step, is_logged
from trainer.loop.metrics import MetricsWriter
from trainer.loop.set_up import Trainer, set_up
from trainer.loop.step_trace import StepTrace
from trainer.parallel.mesh import Mesh
from trainer.parallel.vision.exchange import Message


def captures(run: RunConfig, device: torch.device) -> bool:
    """Whether the language layers run as CUDA graphs: the config asks for it, and it is possible."""
    p, train = run.execution.parallel, run.train
    # The auxiliary loss of experts depends on numbers that the host has only when a bin is read.
    fits = p.vpp == 1 and p.sharding != "fsdp" and p.recompute != "full" and not train.experts.coefficient
    return run.execution.cuda_graphs and device.type == "cuda" and train.precision == "bfloat16" and fits


@contextlib.contextmanager
def _graphs(trainer: Trainer) -> Iterator[None]:
    model = trainer.chunks[0].module
    if not (model.has_graphs and captures(trainer.run, trainer.mesh.device)):
        yield
        return
    try:
        model.capture_graphs(trainer.run.num_micro_batches(trainer.mesh.dp))
        yield
    finally:
        # Before the process groups end, because NCCL waits at the end of a group for every graph that uses the group.
        model.release_graphs()


def train(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Train to `num_steps` or until SIGTERM, save a checkpoint in both cases, and return the result.

    Raises:
        NotFinite: the gradient norm is not a finite number.
    """
    trainer = set_up(run, mesh)
    with _graphs(trainer):
        result = _train(trainer)
    trainer.tell_encoders(Message.END, int(result.status == "stopped"))
    return result


def _train(trainer: Trainer) -> TrainResult:
    run, mesh = trainer.run, trainer.mesh
    signal.signal(signal.SIGTERM, trainer.stop)
    writer = MetricsWriter(run.output_dir, trainer.step) if mesh.is_main else None
    numbers = trainer.order(trainer.step, run.train.num_steps)
    pin = mesh.device.type == "cuda"
    batches = prefetch(trainer.order.reader, numbers, PREFETCH_DEPTH, pin, run.execution.loader_workers)
    if trainer.step == 0:  # the held-out loss before training, to be compared with the one after it
        heldout_loss(trainer.chunks, trainer.heldout, mesh, run, HELDOUT_BASE_JSONL)
    saver = Checkpointer(trainer.chunks, trainer.optimizer, run, mesh, trainer.step)
    with contextlib.closing(batches), saver, collected_by_steps():
        return _steps(trainer, batches, saver, writer)


def _steps(
    trainer: Trainer, batches: Iterator[MicroBatch], saver: Checkpointer, writer: MetricsWriter | None
) -> TrainResult:
    run, mesh = trainer.run, trainer.mesh
    per_step = run.num_micro_batches(mesh.dp)
    interval = Interval(trainer, writer.write if writer else lambda row: None)
    trace = _trace(trainer)
    while trainer.step < run.train.num_steps:
        if trace:
            trace.before(trainer.step + 1)
        try:
            interval.add_step(batches, per_step)
            step, is_last = trainer.step, trainer.step == run.train.num_steps
            # One reduction a step tells every rank of a signal and of an unfinished write, so that all ranks act at the
            # same step.
            stop, is_writing = mesh.any(trainer.is_told_to_stop(), saver.is_writing)
            saves = is_last or stop or step % run.execution.checkpoint.save_interval == 0
            collect_after(step)
            interval.end_step(is_logged=stop or is_logged(trainer, step), waits=saves or is_heldout_step(trainer, step))
        # A save under way is of an earlier step, whose numbers were read before it began.
        except NotFinite:
            saver.finish()
            raise
        if trace:
            trace.after(is_last or stop)
        if saves:
            saver.save(step)
        elif not is_writing:
            saver.finish()
        if is_last or stop:
            saver.finish()
        interval.resume()
        if stop and not is_last:
            name = checkpoint_name(trainer.step)
            return _result(trainer, "stopped", name, "stopped by SIGTERM; run again to go on from here")
    newest = list_checkpoints(run.output_dir / CHECKPOINTS)[-1]
    return _result(trainer, "finished", newest.name, "")


def _trace(trainer: Trainer) -> StepTrace | None:
    config, steps = trainer.run.execution.profile, range(trainer.step + 1, trainer.run.train.num_steps + 1)
    if config is None or config.rank != trainer.mesh.rank:
        return None
    return StepTrace(config, trainer.run.output_dir, trainer.chunks[0].module.clock, steps)


def _result(trainer: Trainer, status: str, name: str, message: str) -> TrainResult:
    return TrainResult(
        status=status, step=trainer.step, checkpoint=f"{CHECKPOINTS}/{name}", message=message, **trainer.last
    )
