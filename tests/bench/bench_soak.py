"""Some hundred steps with saves between them: does memory grow, do steps become slower?

    python -m tests.bench.bench_soak --model qwen3_vl_2b --steps 500 --save-interval 100 --dir /dev/shm

The trainer as it is (shards on disk, one bin a step), watched from outside: resident memory of its processes (what they
share counted once: proportional set size) and the device's memory in use, every two seconds. Checkpoints are whole
ones, about 14 bytes a parameter, two on disk at times.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.host import apart, describe
from tests.bench.mix import write_data, write_model
from tests.bench.trainer_job import Execution, bench_train_config, start, why, write_run
from trainer.contract.answer import MetricsRow, read_metrics
from trainer.contract.run import CheckpointConfig, OptimConfig

SEQ_LEN = 8192


@dataclass(frozen=True, slots=True)
class Look:
    """One sample: the steps done, host memory in GB, device memory in GB."""

    step: int
    host: float
    device: float


def watch(out: Path) -> list[Look]:
    """Run the trainer to its end, and return the samples."""
    looks = []
    job = start(out, gpus=1)
    while job.poll() is None:
        time.sleep(2)
        rows = read_metrics(out)
        if rows:
            looks.append(Look(rows[-1].step, _host_memory(job.pid), _device_memory()))
    assert job.returncode == 0, why(out)
    return looks


def _host_memory(pid: int) -> float:
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 1e9


def _device_memory() -> float:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1000


def table(rows: list[MetricsRow], looks: list[Look], every: int) -> str:
    """Return one line for each window of steps between two saves."""
    lines = [
        "| steps | median step, s | slowest tenth, s | host memory, GB, between saves (highest) | device in use, GB | "
        "peak allocated, GB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for first in range(0, rows[-1].step, every):
        mine = [row for row in rows if first < row.step <= first + every]
        seconds = sorted(row.step_seconds for row in mine)
        slow = seconds[-len(seconds) // 10]
        seen = [look for look in looks if first < look.step <= first + every]
        host = [look.host for look in seen]
        between = [look.host for look in seen if look.step % every and look.step > first + 5] or host
        lines.append(
            f"| {first + 1} to {first + every} | {statistics.median(seconds):.3f} | {slow:.3f} | "
            f"{statistics.median(between):.2f} ({max(host):.2f}) | {max(look.device for look in seen):.1f} | "
            f"{mine[-1].memory_gb:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_vl_2b")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-interval", type=int, default=100)
    parser.add_argument("--bins", type=int, default=96)
    parser.add_argument("--dir", help="where everything is written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="athanor-soak-", dir=args.dir) as folder:
        root = Path(folder)
        write_model(root / "hf", args.model)
        write_data(root / "data", args.bins, SEQ_LEN)
        optim = OptimConfig(lr=1e-5, min_lr_fraction=0.1, warmup_steps=10, weight_decay=0.1)
        train = bench_train_config(global_batch=1).model_copy(update={"num_steps": args.steps, "optim": optim})
        checkpoint = CheckpointConfig(save_interval=args.save_interval, keep_last=1)
        out = write_run(root, train, SEQ_LEN, Execution(checkpoint=checkpoint))
        looks = watch(out)
        print(*apart(describe), sep=", ")
        print(table(read_metrics(out), looks, args.save_interval))


if __name__ == "__main__":
    main()
