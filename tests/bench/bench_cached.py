"""A training with a frozen vision encoder: features computed at every use, and read.

    python -m tests.bench.bench_cached --model qwen3_vl_2b --gpus 1
    python -m tests.bench.bench_cached --tiny                   # on a CPU: shows that it works, no more

Random weights of a published size, the mix of bench_train_step, the trainer as it is. Between the two trainings the
stage encodes the images once; its time is that of a whole job, with the start of its process.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stages.encode_images.config import EncodingConfig
from stages.encode_images.stage import STAGE
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from tests.bench.command import TINY_TRAINING, add_training, bench_folder, make_parser, table_head, table_row
from tests.bench.host import apart
from tests.bench.mix import MODELS, write_data, write_model_and_look
from tests.bench.trainer_job import Execution, endless_training, train_steps
from trainer.contract.result import MetricsRow
from trainer.contract.run import PartConfig

WARMUP = 2  # steps before the counted ones


def encode(root: Path, precision: str) -> tuple[Artifact, float]:
    """Return the features of the data's images in the training's precision, and the seconds that it took to
    make them."""
    inputs = {"model": External(root / "hf", "hf_dir", "b" * 16), "tokenized": Artifact.load(root / "data")}
    config = EncodingConfig(dtype=precision, precision=precision)
    result = run_stage(STAGE, config, inputs, root / "features", StageResources())
    return result.artifact, result.seconds


def medians(name: str, rows: Sequence[MetricsRow]) -> str:
    """Return a row of the table: medians over the counted steps."""
    counted = rows[WARMUP:]
    tokens, seconds, data = (
        statistics.median(getattr(row, field) for row in counted)
        for field in ("tokens_per_second", "step_seconds", "data_seconds")
    )
    return table_row([name, f"{tokens:,.0f}", f"{seconds:.3f}", f"{data:.4f}", f"{counted[-1].memory_gb:.1f}"])


def report(root: Path, args: argparse.Namespace) -> str:
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
        table_head(["features", "useful tokens/s", "seconds a step", "of them waiting for data", "memory, GB"]),
        medians("computed", computed),
        medians("read", read),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3_vl_2b")
    parser.add_argument("--tiny", action="store_true", help="other defaults, for a CPU")
    add_training(parser, ["float32", "bfloat16"])
    if "--tiny" in argv:
        parser.set_defaults(**TINY_TRAINING)
    args = parser.parse_args(argv)
    with bench_folder() as folder:
        print(report(folder, args))


if __name__ == "__main__":
    main(sys.argv[1:])
