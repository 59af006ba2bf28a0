"""The jobs: train a model, or export a checkpoint. Every line of `train` can be told in README order."""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from megatron.core.optimizer import MegatronOptimizer

from trainer import checkpoint
from trainer.contract import CHECKPOINTS, HELDOUT_BASE_JSONL, HF_EXPORT, MetricsRow, RunConfig, TrainResult
from trainer.data import PREFETCH_DEPTH, BinReader, TrainingOrder, prefetch
from trainer.distributed import Mesh
from trainer.heldout import heldout_loss
from trainer.metrics import MetricsWriter, peak_flops, peak_memory_gb
from trainer.models import get_model_module, read_model_type
from trainer.models.hf_export import save_hf_weights
from trainer.models.hf_weights import load_hf_weights
from trainer.models.module_set import TorchModules, check_float8, transformer_engine_modules
from trainer.optim import set_learning_rate
from trainer.parts import freeze
from trainer.sharding import Chunk, share_model, weights_dtype
from trainer.step import Totals, finalize_gradients, run_micro_batches, train_step
from trainer.step_trace import StepTrace

log = logging.getLogger("athanor.trainer")


class NotFinite(Exception):
    """Loss or gradient is no number any more."""

    def __init__(self, step: int, grad_norm: float, keys: list[str]) -> None:
        self.step, self.keys = step, keys
        super().__init__(
            f"step {step}: gradient norm is {grad_norm}; nothing of this step was saved. Lower train.optim.lr, or look "
            f"at its {len(keys)} samples, from {keys[0]} on (all are in result.json)"
        )


@dataclass(slots=True)
class Trainer:
    """What the loop holds."""

    run: RunConfig
    mesh: Mesh
    chunks: list[Chunk]
    optimizer: MegatronOptimizer
    order: TrainingOrder
    heldout: BinReader
    step: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    told_to_stop: bool = False
    last: dict[str, float | None] = field(default_factory=lambda: {"loss": None, "heldout_loss": None})


def build_chunks(run: RunConfig, mesh: Mesh, dtype: torch.dtype) -> list[torch.nn.Module]:
    """The chunks of the model that this rank holds, with the weights of `run.hf_dir`, on its device."""
    module = get_model_module(read_model_type(run.hf_dir))
    sizes = module.read_config(run.hf_dir)
    modules = transformer_engine_modules() if mesh.device.type == "cuda" else TorchModules()
    stages = range(run.parallel.vpp) if run.parallel.vpp > 1 else [None]
    chunks = [module.build(sizes, run.parallel, dtype, modules, mesh, run.seq_len, stage) for stage in stages]
    count = sum(load_hf_weights(chunk, run.hf_dir) for chunk in chunks)
    if run.train.precision == "float8":
        check_float8(run, mesh.device)
        for chunk in chunks:
            chunk.language.use_float8()
    log.info("weights: %s (%d parameters' tensors on this rank, %s)", run.hf_dir, count, dtype)
    for chunk in chunks:
        chunk.clock = chunks[0].clock
    return [chunk.to(mesh.device) for chunk in chunks]


def set_up(run: RunConfig, mesh: Mesh) -> Trainer:
    """Everything before the first step; resumes from the newest checkpoint of this run if there is one."""
    models = build_chunks(run, mesh, weights_dtype(run))
    part = mesh.slice_of_bin(run.parallel)
    readers = [
        BinReader(run.tokenized_dir, run.bins_dir, split, models[0].sizes.geometry, run.seq_len, part)
        for split in ("train", "heldout")
    ]
    if models[0].pre_process:
        models[0].vision.patch_embed.set_normalisation(
            readers[0].patch_format.image_mean, readers[0].patch_format.image_std
        )
    for model in models:
        freeze(model, run.train)
    chunks, optimizer = share_model(models, run, mesh)
    for model, chunk in zip(models, chunks):
        model.config.finalize_model_grads_func = finalize_gradients
        model.config.grad_scale_func = optimizer.scale_loss
        model.config.no_sync_func = chunk.no_sync if len(chunks) == 1 else [c.no_sync for c in chunks]
    order = TrainingOrder(
        readers[0],
        seed=run.train.seed,
        global_batch_size=run.train.global_batch_size,
        dp_rank=mesh.dp_rank,
        dp=mesh.dp,
        bin_cost=partial(models[0].cost_model().planned_cost, seq_len=run.seq_len) if run.parallel.balance else None,
    )
    trainer = Trainer(run, mesh, chunks, optimizer, order, readers[1])
    _resume(trainer)
    _say_arithmetic(trainer)
    return trainer


def _resume(trainer: Trainer) -> None:
    found = checkpoint.list_checkpoints(trainer.run.output_dir / CHECKPOINTS)
    if found:
        trainer.step = checkpoint.read_step(found[-1], trainer.run)
        checkpoint.load(trainer.chunks, trainer.optimizer, found[-1], trainer.mesh)
    log.info("data state: %s", f"resumed at step {trainer.step}" if found else "fresh")
    trainer.tokens, trainer.loss_tokens = trainer.order.tokens_before(trainer.step)


def _say_arithmetic(trainer: Trainer) -> None:
    run, mesh, bins = trainer.run, trainer.mesh, trainer.order.reader.bins
    p = run.parallel
    samples = sum(part.num_rows for part in bins.partitions)
    log.info("world %d = dp %d x cp %d x tp %d x pp %d on %s", mesh.world_size, mesh.dp, p.cp, p.tp, p.pp, mesh.device)
    log.info(
        "global batch %d bins = %d micro batches x dp %d",
        run.train.global_batch_size,
        run.num_micro_batches(mesh.dp),
        mesh.dp,
    )
    log.info(
        "bins: %d of %d tokens, %.2f samples a bin; %d steps = %.1f epochs",
        len(bins),
        run.seq_len,
        samples / len(bins),
        run.train.num_steps,
        trainer.order.epoch(run.train.num_steps),
    )


def captures(run: RunConfig, device: torch.device) -> bool:
    """Whether the language layers run as CUDA graphs: where it is asked for, and possible."""
    p = run.parallel
    fits = run.train.precision == "bfloat16" and p.pp == 1 and p.sharding != "fsdp" and p.recompute != "full"
    return run.cuda_graphs and device.type == "cuda" and fits


@contextlib.contextmanager
def _graphs(trainer: Trainer) -> Iterator[None]:
    """Language layers as CUDA graphs meanwhile. They are given up before the process groups that they communicate by:
    NCCL waits at the end of a group for every graph that uses it."""
    model = trainer.chunks[0].module
    if not captures(trainer.run, trainer.mesh.device):
        yield
        return
    try:
        model.capture_graphs()
        yield
    finally:
        model.release_graphs()


def train(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Train to `num_steps`, or until told to stop; saves in both cases.

    Raises:
        NotFinite: the gradient norm is no number.
    """
    trainer = set_up(run, mesh)
    with _graphs(trainer):
        return _train(trainer)


def _train(trainer: Trainer) -> TrainResult:
    run, mesh = trainer.run, trainer.mesh
    per_step = run.num_micro_batches(mesh.dp)
    signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "told_to_stop", True))
    writer = MetricsWriter(run.output_dir, trainer.step) if mesh.is_main else None
    numbers = trainer.order(trainer.step, run.train.num_steps)
    pin = mesh.device.type == "cuda"
    batches = prefetch(trainer.order.reader, numbers, PREFETCH_DEPTH, pin, run.loader_workers)
    if trainer.step == 0:  # what the weights know before training, beside what they know after it
        heldout_loss(trainer.chunks, trainer.heldout, mesh, run, HELDOUT_BASE_JSONL)
    interval = _Interval(trainer)
    saver = checkpoint.Checkpointer(trainer.chunks, trainer.optimizer, run, mesh)
    trace = _trace(trainer)
    while trainer.step < run.train.num_steps:
        if trace:
            trace.before(trainer.step + 1)
        try:
            interval.add_step(batches, per_step)
        except NotFinite:
            saver.finish()
            raise
        is_last = trainer.step == run.train.num_steps
        stop = mesh.any(trainer.told_to_stop)
        if stop or _is_logged(trainer, trainer.step):
            row = interval.close()
            if writer:
                writer.write(row)
        interval.pause()
        if trace:
            trace.after(is_last or stop)
        if is_last or stop or trainer.step % run.checkpoint.save_interval == 0:
            saver.save(trainer.step)
        else:
            saver.poll()
        if is_last or stop:
            saver.finish()
        interval.go_on()
        if stop and not is_last:
            name = checkpoint.checkpoint_name(trainer.step)
            return _result(trainer, "stopped", name, "told to stop by SIGTERM; run again to go on from here")
    newest = checkpoint.list_checkpoints(run.output_dir / CHECKPOINTS)[-1]
    return _result(trainer, "finished", newest.name, "")


def _trace(trainer: Trainer) -> StepTrace | None:
    config, steps = trainer.run.profile, range(trainer.step + 1, trainer.run.train.num_steps + 1)
    if config is None or config.rank != trainer.mesh.rank:
        return None
    return StepTrace(config, trainer.run.output_dir, trainer.chunks[0].module.clock, steps)


def _result(trainer: Trainer, status: str, name: str, message: str) -> TrainResult:
    return TrainResult(
        status=status, step=trainer.step, checkpoint=f"{CHECKPOINTS}/{name}", message=message, **trainer.last
    )


def _is_heldout_step(trainer: Trainer, step: int) -> bool:
    train_config = trainer.run.train
    return step % train_config.heldout_interval == 0 or step == train_config.num_steps


def _is_logged(trainer: Trainer, step: int) -> bool:
    return step % trainer.run.log_interval == 0 or _is_heldout_step(trainer, step)


class _Interval:
    """The steps between two lines of metrics.jsonl."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._begin()

    def _begin(self) -> None:
        self.totals = Totals.zero(self.trainer.mesh.device)
        self.steps = 0
        self.grad_norm = self.lr = 0.0
        self.part_norms: dict[str, float] = {}
        self.seconds = 0.0
        self.started = time.perf_counter()

    def pause(self) -> None:
        """Stop the time: a save is no part of a step."""
        self.seconds += time.perf_counter() - self.started

    def go_on(self) -> None:
        self.started = time.perf_counter()

    def add_step(self, batches, per_step: int) -> None:
        """One optimizer update."""
        trainer = self.trainer
        config = trainer.run.train
        self.lr = set_learning_rate(trainer.optimizer, trainer.step, config.optim, config.num_steps)
        for chunk in trainer.chunks:
            chunk.train()
        self.grad_norm, self.part_norms = train_step(
            trainer.chunks,
            trainer.optimizer,
            lambda: run_micro_batches(trainer.chunks, batches, per_step, trainer.mesh, self.totals),
            by_part=_is_logged(trainer, trainer.step + 1),
        )
        if not math.isfinite(self.grad_norm):
            keys = trainer.order.reader.keys(trainer.order.global_batch(trainer.step))
            raise NotFinite(trainer.step, self.grad_norm, keys)
        trainer.step += 1
        self.steps += 1

    def close(self) -> MetricsRow:
        """The line of this interval, reduced over ranks; begins the next one."""
        self.pause()
        trainer, seconds = self.trainer, self.seconds
        parts = {name: value / self.steps for name, value in trainer.chunks[0].module.clock.read().items()}
        totals = self.totals.over_ranks(trainer.mesh)
        loss_sum, loss_tokens = totals.loss_and_tokens.tolist()
        trainer.tokens += totals.tokens
        trainer.loss_tokens += int(loss_tokens)
        trainer.last["loss"] = loss_sum / max(1, loss_tokens)
        heldout = None
        if _is_heldout_step(trainer, trainer.step):
            heldout = heldout_loss(trainer.chunks, trainer.heldout, trainer.mesh, trainer.run)
        trainer.last["heldout_loss"] = heldout if heldout is not None else trainer.last["heldout_loss"]
        peak = peak_flops()
        flops = totals.vision_flops + totals.language_flops
        row = MetricsRow(
            step=trainer.step,
            epoch=trainer.order.epoch(trainer.step),
            loss=trainer.last["loss"],
            heldout_loss=heldout,
            grad_norm=self.grad_norm,
            **{f"{part}_grad_norm": norm for part, norm in self.part_norms.items()},
            lr=self.lr,
            tokens=trainer.tokens,
            loss_tokens=trainer.loss_tokens,
            padding_fraction=1 - totals.tokens / totals.slots,
            tokens_per_second=totals.tokens / seconds,
            step_seconds=seconds / self.steps,
            **{f"{part}_seconds": parts.get(part, 0.0) for part in ("data", "vision", "language", "optimizer")},
            vision_tflops=totals.vision_flops / seconds / 1e12,
            language_tflops=totals.language_flops / seconds / 1e12,
            mfu=flops / seconds / (peak * trainer.mesh.world_size) if peak else None,
            memory_gb=peak_memory_gb(),
        )
        log.info("step %d loss %.4f%s", row.step, row.loss, "" if heldout is None else f" held-out {heldout:.4f}")
        self._begin()
        return row


def export(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Write the weights of `run.checkpoint_dir` as HF safetensors into `output_dir/hf`."""
    step = checkpoint.read_step(run.checkpoint_dir, run)
    chunks = build_chunks(run, mesh, weights_dtype(run))
    checkpoint.load_model(chunks, run.checkpoint_dir)
    size = save_hf_weights(chunks, mesh, run.hf_dir, run.output_dir / HF_EXPORT)
    log.info("exported %s: %.1f MB", run.output_dir / HF_EXPORT, size / 1e6)
    return TrainResult(status="finished", step=step, checkpoint=str(run.checkpoint_dir.name))
