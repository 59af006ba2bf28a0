"""Adapters over one base: trained by one process that loads the base once, and each by a process of its own.

    python -m tests.bench.bench_sweep                      # 510 MB in float32
    python -m tests.bench.bench_sweep --model qwen3_vl_2b --precision bfloat16     # on a GPU

Random weights and drawn bins. Seconds are those of whole processes, from start to end: median and range of the rounds.
Memory is the largest resident memory of a process, and on a GPU also what torch reserved. The losses must be equal, or
the bench fails.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stages.launchers.processes import JOB_VARIABLE
from stages.rate.drawn import Ids, Mix, drawing, write_drawn_bins
from stages.rate.measure import drawn_run, endless_training
from tests.bench.host import apart
from tests.bench.mix import CONTROL_TOKENS, MODELS, image_token, write_model_and_look
from trainer.contract.adapter import AdapterConfig
from trainer.contract.answer import MetricsRow, read_metrics
from trainer.contract.names import RUN_JSON, TOGETHER_JSON
from trainer.contract.run import SharedBaseRun, TrainerExecution

RANKS = (8, 16, 32, 64)


class Cost(NamedTuple):
    """The cost of one process."""

    seconds: float
    cpu_seconds: float
    resident_gb: float


def write_bins(directory: Path, model: str, num_bins: int, seq_len: int) -> Mix:
    """Write bins of small samples, for a model of any vocabulary."""
    ids = Ids(image_token(model))
    vocabulary = range(1, ids.image_token_id - len(CONTROL_TOKENS))
    return write_drawn_bins(directory, num_bins, seq_len, vocabulary, ids, drawing(ids, True))


def write_runs(root: Path, name: str, args: argparse.Namespace) -> list[Path]:
    """Write the run.json of each adapter and return the runs' directories. Ranks and rates differ."""
    directories = []
    for number in range(args.adapters):
        adapter = AdapterConfig(rank=RANKS[number], alpha=2 * RANKS[number], base=args.base)
        train = endless_training(args.global_batch, args.precision, adapter=adapter)
        optim = train.optim.model_copy(update={"lr": 1e-4 * (number + 1)})
        train = train.model_copy(update={"num_steps": args.steps, "optim": optim})
        out = root / f"{name}-{number}"
        out.mkdir()
        run = drawn_run(root / "hf", root / "data", out, train, args.seq_len, TrainerExecution())
        (out / RUN_JSON).write_text(run.model_copy(update={"num_threads": args.threads}).model_dump_json())
        directories.append(out)
    return directories


def train(directories: Sequence[Path]) -> Cost:
    """Train these runs by one process."""
    path = directories[0] / RUN_JSON
    if len(directories) > 1:
        path = directories[0] / TOGETHER_JSON
        path.write_text(SharedBaseRun(runs=[each / RUN_JSON for each in directories]).model_dump_json())
    command = [sys.executable, "-W", "ignore", "-m", "trainer", str(path)]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", JOB_VARIABLE: "bench"}
    begun = time.perf_counter()
    with (directories[0] / "trainer.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **place})
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit((directories[0] / "trainer.log").read_text()[-3000:])
    return Cost(time.perf_counter() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9)


def numbers(rows: Sequence[MetricsRow]) -> list[tuple[float, float]]:
    return [(row.loss, row.grad_norm) for row in rows]


def report(root: Path, args: argparse.Namespace) -> str:
    """Measure, and return the report in Markdown."""
    host = apart(write_model_and_look, root / "hf", args.model)
    write_bins(root / "data", args.model, args.bins, args.seq_len)
    size = sum(path.stat().st_size for path in (root / "hf").glob("*.safetensors"))
    rounds = []
    for number in range(args.rounds):
        apart_runs, shared = write_runs(root, f"apart{number}", args), write_runs(root, f"shared{number}", args)
        alone, together = [train([each]) for each in apart_runs], train(shared)
        for own, ours in zip(apart_runs, shared, strict=True):
            if numbers(read_metrics(own)) != numbers(read_metrics(ours)):
                raise SystemExit(f"{own.name} and {ours.name} have other losses")
        reserved = [max(read_metrics(each)[-1].memory_gb for each in runs) for runs in (apart_runs, shared)]
        rounds.append((alone, together, reserved))
    reserved = [max(pair) for pair in zip(*(reserved for _, _, reserved in rounds), strict=True)]

    def line(name: str, costs: list[list[Cost]], gb: float) -> str:
        seconds, cpu = (
            [sum(getattr(cost, of) for cost in each) for each in costs] for of in ("seconds", "cpu_seconds")
        )
        spread = [f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in (seconds, cpu)]
        return (
            f"| {name} | {' | '.join(spread)} | {max(c.resident_gb for each in costs for c in each):.2f} | {gb:.2f} |"
        )

    lines = [
        f"{args.model}, {args.precision}, base {args.base}, {host.device}; {host.versions}",
        f"{size / 1e6:,.0f} MB of weights; {args.adapters} adapters, {args.steps} steps of {args.global_batch} bins of "
        f"{args.seq_len} tokens each; {args.rounds} rounds",
        "",
        f"| {args.adapters} adapters | seconds | seconds of a core | resident memory, GB | memory_gb of metrics |",
        "| --- | ---: | ---: | ---: | ---: |",
        line("a process each, one after the other", [alone for alone, _, _ in rounds], reserved[0]),
        line("one process over one base", [[together] for _, together, _ in rounds], reserved[1]),
        "",
        "Losses and gradient norms of every step are equal in both.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3_vl_100m")
    parser.add_argument("--adapters", type=int, choices=range(2, len(RANKS) + 1), default=2)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--base", choices=["train_precision", "float8"], default="train_precision")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=1)
    parser.add_argument("--bins", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the trainer; 0: one for each core")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="athanor-bench-") as folder:
        print(report(Path(folder), args))


if __name__ == "__main__":
    main(sys.argv[1:])
