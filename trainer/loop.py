"""The jobs: train a model, or export a checkpoint. Every line of `train` can be told in README order."""

import logging
import math
import signal
import time
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer

from trainer import checkpoint
from trainer.contract import CHECKPOINTS, HF_EXPORT, MetricsRow, RunConfig, TrainResult
from trainer.data import BinReader, TrainingOrder, prefetch
from trainer.distributed import Mesh
from trainer.metrics import MetricsWriter, peak_flops, peak_memory_gb
from trainer.models import get_model_module, read_model_type
from trainer.models.hf_weights import load_hf_weights, save_hf_weights
from trainer.models.module_set import TorchModules, transformer_engine_modules
from trainer.optim import build_optimizer, learning_rate, set_learning_rate
from trainer.step import Totals, run_micro_batches, train_step

log = logging.getLogger("athanor.trainer")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PREFETCH_DEPTH = 4


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
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    order: TrainingOrder
    heldout: BinReader
    dtype: torch.dtype
    step: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    told_to_stop: bool = False
    last: dict[str, float | None] = field(default_factory=lambda: {"loss": None, "heldout_loss": None})


def build_model(run: RunConfig, mesh: Mesh, dtype: torch.dtype) -> torch.nn.Module:
    """The model of this rank with the weights of `run.hf_dir`, on its device."""
    module = get_model_module(read_model_type(run.hf_dir))
    sizes = module.read_config(run.hf_dir)
    modules = transformer_engine_modules() if mesh.device.type == "cuda" else TorchModules()
    model = module.build(sizes, run.parallel, dtype, modules, mesh.groups, run.seq_len)
    count = load_hf_weights(model, run.hf_dir)
    log.info("weights: %s (%d parameters' tensors on this rank, %s)", run.hf_dir, count, dtype)
    return model.to(mesh.device)


def set_up(run: RunConfig, mesh: Mesh) -> Trainer:
    """Everything before the first step; resumes from the newest checkpoint of this run if there is one."""
    dtype = DTYPES[run.train.precision]
    model = build_model(run, mesh, dtype)
    pad_multiple = run.parallel.pad_multiple
    readers = [
        BinReader(run.tokenized_dir, run.bins_dir, split, model.sizes.geometry, run.seq_len, pad_multiple)
        for split in ("train", "heldout")
    ]
    if model.pre_process:
        model.vision.patch_embed.set_normalisation(
            readers[0].patch_format.image_mean, readers[0].patch_format.image_std
        )
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    wrapped.broadcast_params()
    optimizer = build_optimizer([wrapped], run.train.optim, dtype)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.no_sync_func = wrapped.no_sync
    order = TrainingOrder(
        readers[0],
        seed=run.train.seed,
        global_batch_size=run.train.global_batch_size,
        dp_rank=mesh.dp_rank,
        dp=mesh.dp,
    )
    trainer = Trainer(run, mesh, wrapped, optimizer, order, readers[1], dtype)
    _resume(trainer)
    _say_arithmetic(trainer)
    return trainer


def _resume(trainer: Trainer) -> None:
    found = checkpoint.list_checkpoints(trainer.run.output_dir / CHECKPOINTS)
    if found:
        trainer.step = checkpoint.read_step(found[-1], trainer.run)
        checkpoint.load(trainer.model, trainer.optimizer, found[-1])
    log.info("data state: %s", f"resumed at step {trainer.step}" if found else "fresh")
    for step in range(trainer.step):
        for number in trainer.order.global_batch(step):
            refs = trainer.order.reader.bins[number]
            trainer.tokens += sum(ref.num_tokens for ref in refs)
            trainer.loss_tokens += sum(ref.num_loss_tokens for ref in refs)


def _say_arithmetic(trainer: Trainer) -> None:
    run, mesh, bins = trainer.run, trainer.mesh, trainer.order.reader.bins
    p = run.parallel
    samples = sum(map(len, bins))
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


def train(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Train to `num_steps`, or until told to stop; saves in both cases.

    Raises:
        NotFinite: the gradient norm is no number.
    """
    per_step = run.num_micro_batches(mesh.dp)
    trainer = set_up(run, mesh)
    signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "told_to_stop", True))
    writer = MetricsWriter(run.output_dir, trainer.step) if mesh.is_main else None
    numbers = trainer.order(trainer.step, run.train.num_steps)
    batches = prefetch(trainer.order.reader, numbers, PREFETCH_DEPTH, pin=mesh.device.type == "cuda")
    interval = _Interval(trainer)
    while trainer.step < run.train.num_steps:
        interval.add_step(batches, per_step)
        is_last = trainer.step == run.train.num_steps
        stop = mesh.any(trainer.told_to_stop)
        if is_last or stop or trainer.step % run.log_interval == 0 or _is_heldout_step(trainer):
            row = interval.close()
            if writer:
                writer.write(row)
        if is_last or stop or trainer.step % run.checkpoint.save_interval == 0:
            interval.pause()
            saved = checkpoint.save(trainer.model, trainer.optimizer, trainer.step, run, mesh)
            interval.go_on()
        if stop and not is_last:
            return _result(trainer, "stopped", saved.name, "told to stop by SIGTERM; run again to go on from here")
    newest = checkpoint.list_checkpoints(run.output_dir / CHECKPOINTS)[-1]
    return _result(trainer, "finished", newest.name, "")


def _result(trainer: Trainer, status: str, name: str, message: str) -> TrainResult:
    return TrainResult(
        status=status, step=trainer.step, checkpoint=f"{CHECKPOINTS}/{name}", message=message, **trainer.last
    )


def _is_heldout_step(trainer: Trainer) -> bool:
    train_config = trainer.run.train
    return trainer.step % train_config.heldout_interval == 0 or trainer.step == train_config.num_steps


class _Interval:
    """The steps between two lines of metrics.jsonl."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._begin()

    def _begin(self) -> None:
        self.totals = Totals.zero(self.trainer.mesh.device)
        self.steps = 0
        self.grad_norm = self.lr = 0.0
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
        self.lr = learning_rate(trainer.step, trainer.run.train.optim, trainer.run.train.num_steps)
        set_learning_rate(trainer.optimizer, self.lr)
        trainer.model.train()
        self.grad_norm = train_step(
            trainer.model,
            trainer.optimizer,
            lambda: run_micro_batches(trainer.model, batches, per_step, trainer.mesh, self.totals),
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
        parts = {name: value / self.steps for name, value in trainer.model.module.clock.read().items()}
        totals = self.totals.over_ranks(trainer.mesh)
        loss_sum, loss_tokens = totals.loss_and_tokens.tolist()
        trainer.tokens += totals.tokens
        trainer.loss_tokens += int(loss_tokens)
        trainer.last["loss"] = loss_sum / max(1, loss_tokens)
        heldout = heldout_loss(trainer) if _is_heldout_step(trainer) else None
        trainer.last["heldout_loss"] = heldout if heldout is not None else trainer.last["heldout_loss"]
        peak = peak_flops()
        flops = totals.vision_flops + totals.language_flops
        row = MetricsRow(
            step=trainer.step,
            epoch=trainer.order.epoch(trainer.step),
            loss=trainer.last["loss"],
            heldout_loss=heldout,
            grad_norm=self.grad_norm,
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


def heldout_loss(trainer: Trainer) -> float | None:
    """Mean loss over the loss tokens of all held-out bins; None where there are none."""
    mesh, reader = trainer.mesh, trainer.heldout
    if not reader.bins:
        return None
    numbers = range(mesh.dp_rank, len(reader.bins), mesh.dp)
    totals = Totals.zero(mesh.device)
    trainer.model.eval()
    with torch.no_grad():
        batches = prefetch(reader, iter(numbers), PREFETCH_DEPTH, pin=mesh.device.type == "cuda")
        if numbers:
            run_micro_batches(trainer.model, batches, len(numbers), mesh, totals, forward_only=True)
    trainer.model.module.clock.switch(None)
    trainer.model.module.clock.read()
    loss_sum, loss_tokens = totals.over_ranks(mesh).loss_and_tokens.tolist()
    return loss_sum / max(1, loss_tokens)


def export(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Write the weights of `run.checkpoint_dir` as HF safetensors into `output_dir/hf`."""
    step = checkpoint.read_step(run.checkpoint_dir, run)
    model = build_model(run, mesh, DTYPES[run.train.precision])
    checkpoint.load_model(model, run.checkpoint_dir)
    size = save_hf_weights(model, run.hf_dir, run.output_dir / HF_EXPORT)
    log.info("exported %s: %.1f MB", run.output_dir / HF_EXPORT, size / 1e6)
    return TrainResult(status="finished", step=step, checkpoint=str(run.checkpoint_dir.name))
