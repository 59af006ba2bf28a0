"""Train: RunConfig -> run.json -> launcher -> result.json; metrics.jsonl is followed while the trainer runs.

    checkpoints/step-000500/ ...   run.json  result.json  metrics.jsonl  report.json  report.html
    heldout.jsonl  heldout-base.jsonl   the loss of every held-out sample, newest and before the first step
    logs/trainer.log  logs/rank-0001.log ...   job.sbatch  slurm.json  slurm-end   the last three of a SLURM job
    profile/rank-0.json.gz  profile/rank-0.md   where steps are traced

A rerun in the same scratch directory starts the trainer again, which goes on from its newest checkpoint.
"""

import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_text
from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.contracts.store import absolute, local_dir
from stages.artifact import Artifact, Input, Stage, StageOutput, stage_identity
from stages.cluster_config import ClusterConfig
from stages.launch import EXIT_DEADLINE, Job, JobFailed, make_launcher, run_job
from stages.train_report import write_train_report
from trainer.contract import (
    HF_EXPORT,
    METRICS_JSONL,
    RESULT_JSON,
    RUN_JSON,
    CheckpointConfig,
    MetricsRow,
    ParallelConfig,
    ProfileConfig,
    RunConfig,
    TrainConfig,
    TrainResult,
    parse_metrics,
    read_metrics,
)
from trainer.contract.layout import check_run

VERSION = 2  # 2: heldout-base.jsonl
TRAINER_LOG = "logs/trainer.log"
log = logging.getLogger("athanor.train")


class StageStopped(RuntimeError):
    """The work was told to stop and has saved; the same command goes on from there."""


class TrainerFailed(RuntimeError):
    """The trainer gave up: its own message, the keys of the samples of that step, and where the log is."""


@dataclass(frozen=True, slots=True)
class TrainResources:
    """Execution: where and how the trainer runs, and who hears of its progress.

    `on_rows` gets every new line of metrics.jsonl, in order of steps; `on_line` every line of the trainer's log.
    """

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loader_workers: int = 2
    cuda_graphs: bool = True
    log_interval: int = 1
    profile: ProfileConfig | None = None
    on_rows: Callable[[list[MetricsRow]], None] = lambda rows: None
    on_line: Callable[[str], None] = lambda line: None


def hf_dir_of(model: Input) -> Path:
    """The HF directory of a model input: an external one itself, or `hf/` of the stage's artifact that made it.

    One in a store is copied to this machine first.
    """
    return local_dir(model.dir / HF_EXPORT if isinstance(model, Artifact) else model.dir)


class MetricsFollower:
    """Hands on the whole lines that metrics.jsonl has got since the last look, each step once.

    A trainer that resumes cuts the file back to its checkpoint; steps that were handed on are not handed on again.
    """

    def __init__(self, path: Path, on_rows: Callable[[list[MetricsRow]], None]) -> None:
        self.path, self.on_rows = path, on_rows
        self._offset = 0
        self._step = -1

    def poll(self) -> None:
        """Look once. Whatever `on_rows` raises is logged and forgotten: a listener never stops the training."""
        try:
            rows = [row for row in self._new_rows() if row.step > self._step]
            if rows:
                self._step = rows[-1].step
                self.on_rows(rows)
        except Exception:
            log.warning("a listener to the training's metrics failed; training goes on", exc_info=True)

    def _new_rows(self) -> list[MetricsRow]:
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self._offset:
            self._offset = 0
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return parse_metrics(whole)


def run_trainer(run: RunConfig, resources: TrainResources, name: str) -> TrainResult:
    """Write run.json into the run's output directory, launch the trainer there and wait for its answer.

    Args:
        name: of the job, in messages.

    Raises:
        StageStopped: the trainer was told to stop by somebody else, and saved.
        InputError: the trainer refused what it was given.
        TrainerFailed: the trainer gave up with a message.
        JobFailed: it ended without a word (killed, out of memory), or took too long.
    """
    directory = run.output_dir
    follower = MetricsFollower(directory / METRICS_JSONL, resources.on_rows)
    job = trainer_job(directory, resources.on_line)
    text = run.model_dump_json(indent=1) + "\n"
    if (done := _finished_before(run, text)) is not None:
        log.info("%s: the trainer finished while nobody waited for it", name)
        follower.poll()
        return done
    (directory / RESULT_JSON).unlink(missing_ok=True)
    write_text(directory / RUN_JSON, text)
    launcher = make_launcher(resources.cluster)
    log.info("%s: %s", name, launcher.plan(job))
    try:
        run_job(launcher, job, follower.poll)
    except JobFailed as error:
        result = _read_result(directory)
        if result is None or result.status == "finished":
            raise
        _raise_for(result, error, name)
    result = _read_result(directory)
    if result is None or result.status != "finished":
        raise TrainerFailed(f"{name} ended without a finished {directory / RESULT_JSON}; log: {job.log_path}")
    return result


def trainer_job(output_dir: Path, on_line: Callable[[str], None] = lambda line: None) -> Job:
    """What a launcher is asked: the trainer, with the run.json of a run's output directory."""
    arguments = ("-m", "trainer", str(output_dir / RUN_JSON))
    return Job(str(output_dir), arguments, output_dir / TRAINER_LOG, on_line)


def _finished_before(run: RunConfig, text: str) -> TrainResult | None:
    """The answer to this very run.json, of a job that outlived the flow that waited for it."""
    path, result = run.output_dir / RUN_JSON, _read_result(run.output_dir)
    is_same = path.is_file() and path.read_text(encoding="utf-8") == text
    is_there = result is not None and result.status == "finished" and run.task == "train"
    is_saved = is_there and (run.output_dir / (result.checkpoint or "")).is_dir()
    return result if is_same and is_saved else None


def _raise_for(result: TrainResult, error: JobFailed, name: str) -> None:
    if result.status == "stopped":
        told = f"{name} was stopped after step {result.step} and saved; run the same command again to go on"
        if error.exit_status == EXIT_DEADLINE:
            told = f"{name}: {error.what}; {told}, with a larger execution.cluster.timeout_seconds"
        raise StageStopped(told) from error
    if result.is_input_error:  # torchrun has an exit status of its own
        raise InputError(result.message) from error
    keys = f" Samples of that step: {', '.join(result.keys)}." if result.keys else ""
    message = result.message or f"{name} failed after step {result.step}"
    if error.exit_status < 0:  # what the others say of it is that they lost it
        how = f"killed by signal {error.exit_status} ({signal.Signals(-error.exit_status).name})"
        message = f"{name}: rank {error.rank} was {how}; {message}"
    raise TrainerFailed("\n".join([f"{message}{keys} Log: {error.log_path}", *error.tail])) from error


def _read_result(directory: Path) -> TrainResult | None:
    path = directory / RESULT_JSON
    return TrainResult.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def make_run_config(
    config: TrainConfig, inputs: Mapping[str, Input], output_dir: Path, resources: TrainResources
) -> RunConfig:
    """run.json of a training."""
    return RunConfig(
        task="train",
        fingerprint=fingerprint(stage_identity(STAGE, config, inputs)),
        hf_dir=hf_dir_of(inputs["model"]).resolve(),
        tokenized_dir=absolute(inputs["tokenized"].dir),
        bins_dir=absolute(inputs["bins"].dir),
        output_dir=output_dir.resolve(),
        seq_len=inputs["bins"].manifest.config["seq_len"],
        train=config,
        parallel=resources.parallel,
        checkpoint=resources.checkpoint,
        loader_workers=resources.loader_workers,
        cuda_graphs=resources.cuda_graphs,
        log_interval=resources.log_interval,
        profile=resources.profile,
        num_threads=resources.cluster.num_threads,
    )


def train(config: TrainConfig, inputs: Mapping[str, Input], work_dir: Path, resources: TrainResources) -> StageOutput:
    """Inputs: "model" (HF directory), "tokenized", "bins"."""
    run = make_run_config(config, inputs, work_dir, resources)
    check_run(run, resources.cluster.processes)
    result = run_trainer(run, resources, STAGE.name)
    rows = read_metrics(work_dir)
    stats = {
        "steps": result.step,
        "loss": result.loss,
        "heldout_loss": result.heldout_loss,
        "checkpoint": result.checkpoint,
        "tokens": rows[-1].tokens if rows else None,
        "loss_tokens": rows[-1].loss_tokens if rows else None,
        "epochs": rows[-1].epoch if rows else None,
    }
    write_train_report(work_dir, config, rows, stats)
    return StageOutput(stats=stats)


STAGE = Stage("train", VERSION, train, on_disk=True)
