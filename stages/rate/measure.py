"""The measured training: its settings, its run.json, and the rates of its counted steps.

The trainer runs as in any training, by the launcher of this host. It is ended after the counted steps, before it saves.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from pydantic import Field

from dataset_builders.contracts.strict import StrictModel
from stages.launchers.config import ClusterConfig
from stages.launchers.job import JobFailed, run_job
from stages.launchers.torchrun import TorchrunLauncher
from stages.train.run_trainer import TrainerFailed, trainer_job
from trainer.contract.adapter import AdapterConfig
from trainer.contract.answer import MetricsRow, TrainResult, read_metrics
from trainer.contract.machine.modules import Wanted
from trainer.contract.names import RESULT_JSON
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import CheckpointConfig, OptimConfig, RunConfig, TrainConfig, TrainerExecution

NEVER = 10**6
_FINGERPRINT = "b" * 16
_GRACE_SECONDS = 0.1  # a training that is only measured is not to save


class RateConfig(StrictModel):
    """The settings of a measured training."""

    seq_len: int = Field(default=8192, ge=16, le=2**20, description="tokens of a bin")
    global_batch_size: int = Field(default=8, gt=0, le=10**5, description="bins a step, over all GPUs")
    warmup: int = Field(default=3, ge=1, le=10**5, description="steps before the counted ones")
    steps: int = Field(default=10, ge=1, le=10**5, description="counted steps")
    precision: str = Field(default="bfloat16", pattern="^(float32|bfloat16|float8)$", description="of the computation")
    moments: str = Field(default="float32", pattern="^(float32|bfloat16)$", description="AdamW's moments as kept")
    adapter: AdapterConfig | None = Field(default=None, description="trained adapter; null: all weights")
    parallel: ParallelConfig = ParallelConfig()
    modules: Wanted = Field(default="auto", description="what the trainer's layers are made of")
    loader_workers: int = Field(default=2, gt=0, le=256, description="threads of a process that read bins ahead")

    @property
    def train(self) -> TrainConfig:
        """The training: it never ends and never measures its held-out loss."""
        return endless_training(self.global_batch_size, self.precision, self.moments, self.adapter)

    @property
    def execution(self) -> TrainerExecution:
        return TrainerExecution(
            parallel=self.parallel,
            modules=self.modules,
            loader_workers=self.loader_workers,
            checkpoint=CheckpointConfig(save_interval=NEVER),
        )


def endless_training(
    global_batch: int, precision: str = "bfloat16", moments: str = "float32", adapter: AdapterConfig | None = None
) -> TrainConfig:
    """Return a training that never ends and never measures its held-out loss."""
    optim = OptimConfig(lr=1e-5, min_lr_fraction=0.1, warmup_steps=2, weight_decay=0.1, moments=moments)
    return TrainConfig(
        seed=0,
        num_steps=NEVER,
        global_batch_size=global_batch,
        precision=precision,
        heldout_interval=NEVER,
        optim=optim,
        adapter=adapter,
    )


def drawn_run(
    hf_dir: Path,
    data_dir: Path,
    out: Path,
    train: TrainConfig,
    seq_len: int,
    execution: TrainerExecution,
    features_dir: Path | None = None,
) -> RunConfig:
    """Return the run.json of a training on drawn bins."""
    return RunConfig(
        task="train",
        fingerprint=_FINGERPRINT,
        hf_dir=hf_dir,
        tokenized_dir=data_dir,
        bins_dir=data_dir,
        features_dir=features_dir,
        output_dir=out,
        seq_len=seq_len,
        train=train,
        execution=execution,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Sums over counted steps in wall-clock time, including the time between them, and medians per step.

    Attributes:
        tokens, loss_tokens: per second and GPU, without padding.
        slowest, fastest: tokens per second and GPU of single steps.
        tflops: model TFLOP per second and GPU, vision and language, without padding.
        mfu: model FLOP/s over the GPU's peak; None if that is unknown.
        padding: share of the bins.
        tokens_a_step: tokens of a step without padding, over all GPUs.
        step_seconds, wall_seconds: seconds of a step, median; and in wall-clock time, mean.
        data_seconds: median wait for data in a step.
        data_share: share of the wall-clock time that waits for data.
        memory_gb: peak of rank 0.
    """

    tokens: float
    loss_tokens: float
    slowest: float
    fastest: float
    tflops: float
    mfu: float | None
    padding: float
    tokens_a_step: float
    step_seconds: float
    wall_seconds: float
    data_seconds: float
    data_share: float
    memory_gb: float


def rates_of(rows: Sequence[MetricsRow], gpus: int) -> Rates:
    """Return the rates of counted steps.

    Args:
        rows: metrics of the counted steps, with the step before them first.
    """
    before, *counted = rows
    last, seconds = counted[-1], (counted[-1].time_ms - before.time_ms) / 1e3
    single = [row.tokens_per_second / gpus for row in counted]
    known = [row.mfu for row in counted if row.mfu is not None]
    return Rates(
        tokens=(last.tokens - before.tokens) / seconds / gpus,
        loss_tokens=(last.loss_tokens - before.loss_tokens) / seconds / gpus,
        slowest=min(single),
        fastest=max(single),
        tflops=sum(_tflops(row) * row.step_seconds for row in counted) / seconds / gpus,
        mfu=mean(known) if known else None,
        padding=mean(row.padding_fraction for row in counted),
        tokens_a_step=(last.tokens - before.tokens) / len(counted),
        step_seconds=median(row.step_seconds for row in counted),
        wall_seconds=seconds / len(counted),
        data_seconds=median(row.data_seconds for row in counted),
        data_share=sum(row.data_seconds for row in counted) / seconds,
        memory_gb=max(row.memory_gb for row in counted),
    )


def _tflops(row: MetricsRow) -> float:
    return sum(value or 0.0 for name, value in row.model_extra.items() if name.endswith("_tflops"))


class _Enough(Exception):
    """Raised when the counted steps are done."""


def measure_steps(
    run: RunConfig, processes: int, steps: int, on_rows: Callable[[int], None] = lambda number: None
) -> list[MetricsRow]:
    """Train on this host until so many steps are done, and return their metrics. No checkpoint is written.

    Args:
        run: its output directory is emptied first.
        on_rows: called with the number of finished steps when it changes.

    Raises:
        TrainerFailed: the trainer ended before; the text is its reason.
    """
    shutil.rmtree(run.output_dir, ignore_errors=True)
    run.output_dir.mkdir(parents=True)
    (run.output_dir / "run.json").write_text(run.model_dump_json(), encoding="utf-8")
    cluster = ClusterConfig(processes=processes, stop_grace_seconds=_GRACE_SECONDS)
    finished = 0

    def look() -> None:
        nonlocal finished
        if (number := min(steps, len(read_metrics(run.output_dir)))) != finished:
            finished = number
            on_rows(finished)
        if finished >= steps:
            raise _Enough

    job = trainer_job(run.output_dir)
    try:
        run_job(TorchrunLauncher(cluster), job, look)
    except _Enough:
        return read_metrics(run.output_dir)[:steps]
    except JobFailed as error:
        raise TrainerFailed(f"the trainer ended after {finished} of {steps} steps: {_why(run, error)}") from error
    raise TrainerFailed(f"the trainer ended after {finished} of {steps} steps; log: {job.log_path}")


def _why(run: RunConfig, error: JobFailed) -> str:
    result = run.output_dir / RESULT_JSON
    if result.is_file() and (why := TrainResult.model_validate_json(result.read_text(encoding="utf-8")).message):
        return why
    return (error.tail or [error.what])[-1]
