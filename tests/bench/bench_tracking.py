"""The cost of tracking: steps/s of a trainer-like writer alone, with a follower, and with tracking at work.

    python -m tests.bench.bench_tracking [--steps N] [--step-ms MS]

The writer is a process of its own that computes for a while and writes a line of metrics.jsonl, as a trainer does. The
follower and the sending thread are in this process, as in a flow. Prints a markdown table.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from flows.tracking.sender import sender_of
from flows.tracking.tracker import Opening, Tracker, open_run
from stages.train.run_trainer import MetricsFollower
from tests.helpers.fake_trainer import metrics_row
from trainer.contract.names import METRICS_JSONL
from trainer.loop.metrics import MetricsWriter

POLL_SECONDS = 0.2


def write_rows(directory: Path, steps: int, step_ms: float, answer) -> None:
    """Run the writer: matrix products for this many milliseconds of its own CPU time per step, then a synced line."""
    writer, matrix = MetricsWriter(directory, 0), np.ones((64, 64), dtype=np.float32)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        busy = time.process_time() + step_ms / 1e3
        while time.process_time() < busy:
            matrix @ matrix
        writer.write(metrics_row(step))
    answer.put(steps / (time.perf_counter() - started))


def measure(how: str, steps: int, step_ms: float) -> float:
    """Return the writer's steps/s."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        tracker = None
        if how == "tracked":
            key = open_run(root, Opening(experiment="bench", name="bench", identity="b" * 16, params={}, tags={}))
            tracker = Tracker(root, key)
            sender_of(root).wait(key)  # the schema is made only once per root
            stack.enter_context(tracker.follow(root / METRICS_JSONL))
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        writer = context.Process(target=write_rows, args=(root, steps, step_ms, answer))
        follower = MetricsFollower(root / METRICS_JSONL, lambda rows: None)
        writer.start()
        while writer.is_alive():
            if how != "alone":
                follower.poll()
            time.sleep(POLL_SECONDS)
        if tracker:
            tracker.finish("FINISHED")
        return answer.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=50, help="CPU time of a step; 50 is the embedded recipe's")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {"alone": [], "followed": [], "tracked": []}
    for _ in range(args.rounds):  # in rotation, so that a drift of the machine affects all
        for how, found in speeds.items():
            found.append(measure(how, args.steps, args.step_ms))
    print(f"{args.steps} steps of {args.step_ms:g} ms, {args.rounds} rounds, medians\n")
    print("| | steps/s | against alone |\n| --- | ---: | ---: |")
    alone = statistics.median(speeds["alone"])
    for how, found in speeds.items():
        speed = statistics.median(found)
        print(f"| {how} | {speed:.2f} | {speed / alone - 1:+.2%} |")


if __name__ == "__main__":
    main()
