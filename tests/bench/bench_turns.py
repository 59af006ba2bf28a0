"""Training steps of this code and of another checkout, in rotation, on the same model, shards and bins of one host.

    python -m tests.bench.bench_turns BEFORE [--model qwen3_vl_2b] [--turns 2] [--steps 10]

BEFORE is the directory of the other checkout. In each turn one job (`-m trainer`) of the other code runs, then one of
this code. Steps before the counted ones are left out. The first step's loss of both is printed, and they must agree.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from tests.bench.host import apart, describe
from tests.bench.mix import MODELS, write_data, write_model

TURN = """
import json, sys
from pathlib import Path
from tests.bench.trainer_job import bench_train_config, train_steps
from trainer.contract.adapter import AdapterConfig
root, global_batch, precision, seq_len, steps, adapter = sys.argv[1:]
adapter = AdapterConfig.model_validate_json(adapter) if adapter else None
config = bench_train_config(int(global_batch), precision, adapter=adapter)
rows = train_steps(Path(root), config, int(seq_len), int(steps))
print(json.dumps([row.model_dump() for row in rows]))
"""


def run_turn(checkout: Path, root: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl of one job of a checkout's trainer."""
    settings = [root, args.global_batch, args.precision, args.seq_len, args.warmup + args.steps, args.adapter]
    path = os.pathsep.join([str(checkout), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-c", TURN, *map(str, settings)]
    done = subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkout}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(rows: list[dict[str, float]], warmup: int) -> dict[str, float]:
    """Return sums over the counted steps, except the first step's loss and the parts, which are medians."""
    counted = rows[warmup:]
    seconds = sum(row["step_seconds"] for row in counted)
    return {
        "useful tokens/s": (rows[-1]["tokens"] - rows[warmup - 1]["tokens"]) / seconds,
        "step s": seconds / len(counted),
        "data wait %": 100 * sum(row["data_seconds"] for row in counted) / seconds,
        "vision s": median(row.get("vision_seconds", 0.0) for row in counted),
        "language s": median(row.get("language_seconds", 0.0) for row in counted),
        "memory GB": counted[-1]["memory_gb"],
        "first loss": rows[0]["loss"],
        "first norm": rows[0]["grad_norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--model", choices=MODELS, default="qwen3_vl_2b")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--adapter", default="", help='as JSON, {"rank": 16, "alpha": 32}')
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--global-batch", type=int, default=4, help="bins a step")
    parser.add_argument("--bins", type=int, default=48)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps that count")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve(), "now": Path(__file__).parents[2]}
    rates: dict[str, list[float]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="athanor-turns-") as folder:
        root = Path(folder)
        apart(partial(write_data, model=args.model), root / "data", args.bins, args.seq_len)
        apart(write_model, root / "hf", args.model)
        print(*apart(describe), sep=", ")
        for turn in range(args.turns):
            for name, checkout in checkouts.items():
                figures = summary(run_turn(checkout, root, args), args.warmup)
                rates[name].append(figures["useful tokens/s"])
                print(f"turn {turn + 1} {name:6}", *(f"{key} {value:.6g}" for key, value in figures.items()), sep="  ")
                sys.stdout.flush()
    ratios = [now / before for now, before in zip(rates["now"], rates["before"])]
    print("now / before:", *(f"{ratio:.3f}" for ratio in ratios))


if __name__ == "__main__":
    main()
