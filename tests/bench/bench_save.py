"""The cost of saves: the seconds for which they stop a training, and until they are on disk, compared with plain
writes.

    python -m tests.bench.bench_save --dir /scratch --out tests/bench/results/save_h200_DATE.md
    python -m tests.bench.bench_save --model qwen3_vl_tiny --steps 60 --save-interval 10      on a CPU, in a minute
    python -m tests.bench.bench_save --dir /scratch --steps 500 --save-interval 25   does anything grow?

The real trainer does the same steps three times: with only the last save, with asynchronous saves, with blocking saves.
The figures of each save are read from its log. A disk's rate depends on the number of bytes, so plain writes with fsync
have as many bytes as a checkpoint, before and after the trainings. The last save is left out everywhere, because the
training waits for it.
"""

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.host import apart, describe
from tests.bench.mix import MODELS, is_tiny, write_data, write_model
from tests.bench.trainer_job import LOG, NEVER, Execution, endless_training, start, why, write_run
from trainer.contract.answer import MetricsRow, read_metrics
from trainer.contract.run import CheckpointConfig

_SAVED = re.compile(r"checkpoint: step-\d+, ([\d.]+) GB in ([\d.]+) s; training waited ([\d.]+) s")
_MADE = re.compile(r"([\d.]+) GB of host memory for saves made in ([\d.]+) s")
PIECE = 64 << 20


@dataclass(frozen=True, slots=True)
class Save:
    """The trainer's report of a save: GB, seconds until it was on disk, seconds that the training waited."""

    size: float
    seconds: float
    waited: float


@dataclass(frozen=True, slots=True)
class Training:
    """One of the three trainings. `memory` holds resident GB of its processes, sampled with the step at that time."""

    rows: list[MetricsRow]
    saves: list[Save]
    made: tuple[float, float]
    memory: list[tuple[int, float]]


def seq_len_of(model: str) -> int:
    """Return the tokens of a bin."""
    return 256 if is_tiny(model) else 8192


def train(root: Path, args: argparse.Namespace, *, interval: int, asynchronous: bool) -> Training:
    """Train the steps on the data in the directory."""
    seq_len = seq_len_of(args.model)
    precision = "float32" if is_tiny(args.model) else "bfloat16"
    config = endless_training(args.gpus, precision).model_copy(update={"num_steps": args.steps})
    checkpoint = CheckpointConfig(save_interval=interval, keep_last=1, asynchronous=asynchronous)
    out = write_run(root, config, seq_len, Execution(gpus=args.gpus, checkpoint=checkpoint))
    job, memory = start(out, args.gpus), []
    while job.poll() is None:
        time.sleep(0.5)
        rows = read_metrics(out)
        memory.append((rows[-1].step if rows else 0, _resident(job.pid)))
    assert job.returncode == 0, why(out)
    log = (out / LOG).read_text()
    saves = [Save(*map(float, found)) for found in _SAVED.findall(log)]
    made = [tuple(map(float, found)) for found in _MADE.findall(log)]
    return Training(read_metrics(out), saves, made[0] if made else (0.0, 0.0), memory)


def _resident(pid: int) -> float:
    total = 0
    try:
        for process in psutil.Process(pid).children(recursive=True):
            total += process.memory_info().rss
    except psutil.Error:  # the process has ended in the meantime
        pass
    return total / 1e9


def disk_rate(directory: Path, size: float) -> float:
    """Return the GB/s of plain writes of this number of GB, with fsync."""
    piece, path = os.urandom(PIECE), directory / "plain"
    count = max(1, round(size * 1e9 / PIECE))
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return count * PIECE / 1e9 / seconds


def report(without: Training, late: Training, blocking: Training, disk: Sequence[float]) -> str:
    """Return the tables in Markdown."""
    size = late.saves[0].size
    lines = [f"A checkpoint has {size:,.3f} GB. The disk takes {', '.join(f'{rate:.2f}' for rate in disk)} GB/s.", ""]
    lines += [
        "| saves | first: training waits, s | later | until it is there, s | GB/s | median step, s | rows equal |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for name, training in (("none", without), ("asynchronous", late), ("blocking", blocking)):
        saves = training.saves[:-1]
        step = statistics.median(row.step_seconds for row in training.rows[3:])
        cells = ["-"] * 4
        if saves:
            later = [save.waited for save in saves[1:]] or [saves[0].waited]
            seconds = statistics.median(save.seconds for save in saves)
            cells = [f"{saves[0].waited:.2f}", f"{min(later):.2f} to {max(later):.2f}", f"{seconds:.1f}"]
            cells += [f"{size / max(seconds, 1e-3):.2f}"]
        lines += [f"| {name} | {' | '.join(cells)} | {step:.4f} | {_equal(training, without)} |"]
    begun = [gb for step, gb in late.memory if step >= len(late.rows) // 4]
    grown = (
        f"resident {begun[0]:.2f} GB a quarter through, {max(begun):.2f} at most after it, {begun[-2]:.2f} at the end"
    )
    made, seconds = late.made
    return "\n".join([*lines, "", f"Host memory for the copy: {made:,.3f} GB, made in {seconds:.1f} s; {grown}.", ""])


def _equal(training: Training, other: Training) -> str:
    """Return the number of steps with equal loss, and with equal gradient norm too. A GPU adds some gradients in no
    fixed order."""
    pairs = list(zip(training.rows, other.rows, strict=True))
    losses = sum(a.loss == b.loss for a, b in pairs)
    both = sum((a.loss, a.grad_norm, a.param_norm) == (b.loss, b.grad_norm, b.param_norm) for a, b in pairs)
    return f"{losses} losses, {both} with norms, of {len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_vl_2b", choices=MODELS)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-interval", type=int, default=25)
    parser.add_argument("--dir", help="where everything is written: the disk that is measured")
    parser.add_argument("--out", type=Path, help="also write the report there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="athanor-save-", dir=args.dir) as folder:
        root = Path(folder)
        apart(write_model, root / "hf", args.model)
        write_data(root / "data", 32, seq_len_of(args.model), model=args.model)
        without = train(root, args, interval=NEVER, asynchronous=True)
        size = without.saves[0].size
        disk = [disk_rate(root, size)]
        late = train(root, args, interval=args.save_interval, asynchronous=True)
        blocking = train(root, args, interval=args.save_interval, asynchronous=False)
        disk.append(disk_rate(root, size))
        text = "\n".join(["# The cost of a save", "", *describe(), "", report(without, late, blocking, disk)])
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
