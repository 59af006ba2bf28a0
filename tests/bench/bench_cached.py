"""A training with a frozen vision encoder: features computed at every use, and read.

    python -m tests.bench.bench_cached --model qwen3_vl_2b --gpus 1
    python -m tests.bench.bench_cached --tiny                   # on a CPU: shows that it works, no more

Random weights of a published size, the mix of bench_train_step, the trainer as it is. Between the two trainings the
stage encodes the images once; its time is that of a whole job, with the start of its process.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stages.encode_images.config import EncodingConfig
from stages.encode_images.stage import STAGE
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from tests.bench.host import apart
from tests.bench.mix import MODELS, write_data, write_model_and_look
from tests.bench.trainer_job import Execution, endless_training, train_steps
from trainer.contract.result import MetricsRow
from trainer.contract.run import PartConfig

TINY = {"model": "qwen3_vl_tiny", "seq_len": 256, "global_batch": 4, "bins": 12, "steps": 3, "precision": "float32"}
WARMUP = 2  # steps before the counted ones


def encode(root: Path, precision: str) -> tuple[Artifact, float]:
    """Return the features of the data's images in the training's precision, and the seconds that it took to
    make them."""
    inputs = {"model": External(root / "hf", "hf_dir", "b" * 16), "tokenized": Artifact.load(root / "data")}
    config = EncodingConfig(dtype=precision, precision=precision)
    result = run_stage(STAGE, config, inputs, root / "features", StageResources())
    return result.artifact, result.seconds


def line(name: str, rows: Sequence[MetricsRow]) -> str:
    """Return a row of the table: medians over the counted steps."""
    counted = rows[WARMUP:]
    values = [
        statistics.median(getattr(row, field) for row in counted) for field in ("tokens_per_second", "step_seconds")
    ]
    data = statistics.median(row.data_seconds for row in counted)
    return f"| {name} | {values[0]:,.0f} | {values[1]:.3f} | {data:.4f} | {counted[-1].memory_gb:.1f} |"


def report(root: Path, args: argparse.Namespace) -> str:
    """Measure, and return the report in Markdown."""
    host = apart(write_model_and_look, root / "hf", args.model)
    mix = apart(partial(write_data, model=args.model), root, args.bins, args.seq_len)
    frozen = {"vision": PartConfig(frozen=True), "merger": PartConfig(frozen=True)}
    train = endless_training(args.global_batch, args.precision).model_copy(update=frozen)
    execution = Execution(gpus=args.gpus)
    computed = train_steps(root, train, args.seq_len, WARMUP + args.steps, execution)
    features, seconds = encode(root, args.precision)
    stats = features.manifest.stats
    read = train_steps(root, train, args.seq_len, WARMUP + args.steps, execution, features.dir)
    lines = [
        f"{args.model}, {args.precision}, {host.device}; {host.versions}",
        f"{mix.samples:,} samples with {mix.images:,} images in {args.bins} bins of {args.seq_len:,} tokens",
        f"{stats['distinct_images']:,} images encoded once in {seconds:.1f} s: {stats['image_tokens']:,} tokens of "
        f"{stats['bytes_per_image_token']:,} bytes, {stats['bytes'] / 1e9:.3f} GB",
        "",
        "| features | useful tokens/s | seconds a step | of them waiting for data | memory, GB |",
        "| --- | --- | --- | --- | --- |",
        line("computed", computed),
        line("read", read),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3_vl_2b")
    parser.add_argument("--tiny", action="store_true", help="other defaults, for a CPU")
    parser.add_argument("--gpus", type=int, default=1, help="the images are encoded by one of them")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--bins", type=int, default=48)
    parser.add_argument("--steps", type=int, default=10, help="steps that count")
    if "--tiny" in argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="athanor-bench-") as folder:
        print(report(Path(folder), args))


if __name__ == "__main__":
    main(sys.argv[1:])
