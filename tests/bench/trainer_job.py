"""The trainer as separate jobs for benchmarks: run.json, torchrun, and a stop from outside.

All files are in one directory: `hf`, `data` and `bins` as tests/bench/mix.py writes them, and `run` for the job.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from trainer.contract.adapter import AdapterConfig
from trainer.contract.names import RESULT_JSON
from trainer.contract.result import MetricsRow, TrainResult, read_metrics
from trainer.contract.run import CheckpointConfig, OptimConfig, RunConfig, TrainConfig, TrainerExecution

NEVER = 10**6
LOG = "trainer.log"
WAIT_SECONDS = 0.5
STUCK_SECONDS = 240  # without a step; starts of the largest models take about half of it


class TrainerEnded(RuntimeError):
    """Raised if the trainer ended before it had done its steps."""


class Execution(TrainerExecution):
    """The settings of a job that change none of its numbers."""

    gpus: int = 1
    checkpoint: CheckpointConfig = CheckpointConfig(save_interval=NEVER)


def endless_training(
    global_batch: int, precision: str = "bfloat16", moments: str = "float32", adapter: AdapterConfig | None = None
) -> TrainConfig:
    """Return a training that never ends and never measures its held-out loss."""
    return TrainConfig(
        seed=0,
        num_steps=NEVER,
        global_batch_size=global_batch,
        precision=precision,
        heldout_interval=NEVER,
        optim=OptimConfig(lr=1e-5, min_lr_fraction=0.1, warmup_steps=2, weight_decay=0.1, moments=moments),
        adapter=adapter,
    )


def write_run(
    root: Path, train: TrainConfig, seq_len: int, execution: Execution, features_dir: Path | None = None
) -> Path:
    """Make the directory of a job with only its run.json. An earlier job's directory is deleted."""
    out = root / "run"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    run = RunConfig(
        task="train",
        fingerprint="b" * 16,
        hf_dir=root / "hf",
        tokenized_dir=root / "data",
        bins_dir=root / "bins",
        features_dir=features_dir,
        output_dir=out,
        seq_len=seq_len,
        train=train,
        execution=TrainerExecution(**execution.model_dump(exclude={"gpus"})),
    )
    (out / "run.json").write_text(run.model_dump_json())
    return out


def start(out: Path, gpus: int, module: str = "trainer", arguments: Sequence[str] = ()) -> subprocess.Popen:
    """Start a module on the job's run.json, one process per GPU, with the environment that the torchrun launcher gives.
    Its output goes to trainer.log."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={gpus}", "-m", module, str(out / "run.json"), *arguments]
    threads = max(1, len(os.sched_getaffinity(0)) // gpus)
    defaults = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (out / LOG).open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**defaults, **os.environ})


def stop(job: subprocess.Popen) -> None:
    """Kill a job and its processes, so that nobody waits for a checkpoint of many GB. Return when they have ended."""
    processes = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)] if _runs(job) else []
    for process in processes:
        process.kill()
    psutil.wait_procs(processes[:-1], timeout=60)
    job.wait()


def _abort(out: Path, job: subprocess.Popen) -> str:
    """Abort each rank, and return the places in the code where its threads were, which it writes to its log."""
    for process in psutil.Process(job.pid).children(recursive=True):
        process.send_signal(signal.SIGABRT)
    job.wait(60)
    lines = (out / LOG).read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if line.lstrip().startswith(("File ", "Thread ", "Current thread")))


def await_steps(out: Path, job: subprocess.Popen, steps: int, files: Sequence[str] = ()) -> list[MetricsRow]:
    """Return the metrics of a job's first steps once they are done and `files` exist, and stop the job. If a file is
    missing afterwards, the job has ended by itself after these steps.

    Raises:
        TrainerEnded: the job ended by itself before, or made no step for `STUCK_SECONDS`.
    """
    done, since = 0, time.monotonic()
    try:
        while _runs(job) and (len(read_metrics(out)) < steps or not all((out / name).exists() for name in files)):
            time.sleep(WAIT_SECONDS)
            if len(read_metrics(out)) > done:
                done, since = len(read_metrics(out)), time.monotonic()
            if time.monotonic() - since > STUCK_SECONDS:
                raise TrainerEnded(f"no step for {STUCK_SECONDS} s after {done} of {steps}: {_abort(out, job)}")
    finally:
        stop(job)
    rows = read_metrics(out)[:steps]
    if len(rows) < steps:
        raise TrainerEnded(f"the trainer ended after {len(rows)} of {steps} steps: {why(out)}")
    return rows


def train_steps(
    root: Path,
    train: TrainConfig,
    seq_len: int,
    steps: int,
    execution: Execution | None = None,
    features_dir: Path | None = None,
) -> list[MetricsRow]:
    """Train some steps on the output of `write_model` and `write_data`, in processes of their own. Return the metrics
    of each step."""
    execution = execution or Execution()
    out = write_run(root, train, seq_len, execution, features_dir)
    return await_steps(out, start(out, execution.gpus), steps)


def _runs(job: subprocess.Popen) -> bool:
    return job.poll() is None


def why(out: Path) -> str:
    """Return the reason that an ended job gives for its end."""
    result = out / RESULT_JSON
    if result.is_file():
        return TrainResult.model_validate_json(result.read_text()).message
    return (out / LOG).read_text(errors="replace")[-3000:]
