"""The speed of packing samples into bins, the fill of the bins, and the cost of a whole plan of a million samples.

    python -m tests.bench.bench_bins            a million lengths of each kind, packed
    python -m tests.bench.bench_bins --plan     the stage plan_bins over an index of a million rows, with a mixture too

Seconds are of the processor, one core, so that other work beside it does not count.
Peak memory is of a process of its own for each line, Python and libraries included.
"""

import argparse
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.tokenized import INDEX_SCHEMA, index_partitions
from stages.artifacts.artifact import Artifact
from stages.artifacts.run_stage import run_stage
from stages.plan_bins.mixture import SubsetMix
from stages.plan_bins.pack import pack
from stages.plan_bins.stage import STAGE, PlanBinsConfig
from tests.bench.memory import alone
from tests.helpers.index import write_index

KINDS = ("log-normal", "text", "one image", "mixed")
SEQ_LEN = 8192


def lengths(kind: str, num: int, seq_len: int, pad_multiple: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, patches) of `num` samples.

    log-normal: tokens with mean 900 and sigma 0.9, cut at seq_len; a random part of them are image tokens in four
    of five samples. Other kinds: log-normal text (median 120) and images as the name says.
    """
    rng = np.random.default_rng(seed)
    if kind == "log-normal":
        tokens = np.exp(rng.normal(np.log(900) - 0.9**2 / 2, 0.9, num)).astype(np.int64).clip(1, seq_len)
        images = (tokens * rng.uniform(0, 1, num)).astype(np.int64) * (rng.random(num) < 0.8)
        return (-(-tokens // pad_multiple) * pad_multiple).clip(max=seq_len), 4 * images
    text = np.exp(rng.normal(np.log(120), 0.9, num)).astype(np.int64) + 16
    per_image = np.exp(rng.normal(np.log(480), 0.6, num)).astype(np.int64)
    images = {"text": 0, "one image": 1, "mixed": rng.integers(0, 4, num)}[kind] * per_image
    room = seq_len - text.clip(max=seq_len // 2)
    images = np.minimum(images, room)
    tokens = text.clip(max=seq_len // 2) + images
    return -(-tokens // pad_multiple) * pad_multiple, 4 * images


def pack_once(kind: str, num: int, seq_len: int, max_patches: int, pad: int) -> tuple[int, int, float, float, float]:
    """Return (bins, lower bound, fill of the scarcer dimension, fill of the other, CPU seconds)."""
    tokens, patches = lengths(kind, num, seq_len, pad, seed=0)
    patches = patches.clip(max=max_patches)
    started = time.process_time()
    bins = pack(tokens, patches, seq_len, max_patches)
    seconds = time.process_time() - started
    count = int(bins.max()) + 1
    assert np.bincount(bins, tokens).max() <= seq_len and np.bincount(bins, patches).max() <= max_patches
    bound = max(-(-int(tokens.sum()) // seq_len), -(-int(patches.sum()) // max_patches))
    fills = sorted((tokens.sum() / (count * seq_len), patches.sum() / (count * max_patches)), reverse=True)
    return count, bound, *fills, seconds


def print_packing(num: int) -> None:
    print("| lengths | samples | seq_len | max_patches | pad | bins | lower bound | fill | other | CPU s | peak MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    shapes = [(num, SEQ_LEN, 32_768, 1), (num, SEQ_LEN, 32_768, 16), (num, SEQ_LEN, 16_384, 1)]
    shapes += [(num // 10, 2048, 8192, 1), (num // 10, 131_072, 524_288, 1)]
    for kind in KINDS:
        for shape in shapes:
            (count, bound, fill, other, seconds), _, peak = alone(pack_once, kind, *shape)
            cells = " | ".join(f"{n:,}" for n in (*shape, count, bound))
            print(f"| {kind} | {cells} | {fill:.4f} | {other:.4f} | {seconds:.2f} | {peak / 1e6:.0f} |", flush=True)


def write_rows(directory: Path, num: int) -> Artifact:
    """Write an index of `num` rows in five subsets, of which a tenth of a percent is held out."""
    tokens, patches = lengths("log-normal", num, SEQ_LEN, 1, seed=0)
    rng = np.random.default_rng(1)
    rows = np.arange(num)
    subset = rng.choice(["ai2d", "chartqa", "docvqa", "llava", "text"], num, p=[0.1, 0.2, 0.3, 0.3, 0.1])
    table = pa.table(
        {
            "key": [f"{name}/{row:08d}" for name, row in zip(subset, rows.tolist())],
            "subset": subset,
            "split": np.where(rows % 1000 == 999, "heldout", "train"),
            "shard": [f"train/shard-{row // 5000:05d}.tar" for row in rows.tolist()],
            "offset": rows * 1_000_000 % 5_000_000_000,
            "size": np.full(num, 1_000_000),
            "checksum": rng.integers(0, 2**63, num).astype(np.uint64),
            "num_tokens": tokens.astype(np.int32),
            "num_loss_tokens": (tokens // 4).astype(np.int32),
            "num_patches": patches.astype(np.int32),
            "num_images": (patches > 0).astype(np.int32),
        },
        schema=INDEX_SCHEMA,
    )
    directory.mkdir(parents=True)
    write_index(directory, table)
    Manifest(stage="tokenize", version=2, fingerprint="0" * 16, config={}, parents={}).write(directory)
    return Artifact.load(directory)


def plan_once(tokenized: Path, root: Path, config: PlanBinsConfig) -> tuple[dict, float, float]:
    """Return (stats, CPU seconds, bytes of the plan per sample)."""
    started = time.process_time()
    result = run_stage(STAGE, config, {"tokenized": Artifact.load(tokenized)}, root)
    seconds = time.process_time() - started
    files = (result.artifact.dir / "bins").iterdir()
    stats = result.artifact.manifest.stats
    rows = sum(stats["num_samples"][split] * stats["num_epochs"][split] for split in ("train", "heldout"))
    return stats, seconds, sum(file.stat().st_size for file in files) / rows


def print_plans(num: int) -> None:
    mixture = {"ai2d": SubsetMix(weight=1, repeats=2.5), "docvqa": SubsetMix(weight=2), "text": SubsetMix(fraction=0.5)}
    configs = {
        "everything once": PlanBinsConfig(seq_len=SEQ_LEN, max_patches=4 * SEQ_LEN, pad_multiple=16),
        "mixture, 2 epochs": PlanBinsConfig(
            seq_len=SEQ_LEN, max_patches=4 * SEQ_LEN, pad_multiple=16, mixture=mixture, epochs=2
        ),
    }
    with tempfile.TemporaryDirectory(prefix="athanor-bench-") as folder:
        tokenized = write_rows(Path(folder) / "tokenized", num).dir
        size = sum(path.stat().st_size for path in index_partitions(tokenized)) / num
        print(f"Index: {size:.1f} bytes a row (parquet).\n")
        print("| plan | rows of the index | samples an epoch | bins | padding | bytes a sample | CPU s | peak MB |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for name, config in configs.items():
            (stats, seconds, each), _, peak = alone(plan_once, tokenized, Path(folder) / name.split(",")[0], config)
            train = [stats[key]["train"] for key in ("num_samples", "num_bins", "padding_fraction")]
            print(
                f"| {name} | {num:,} | {train[0]:,} | {train[1]:,} | {train[2]:.4f} | {each:.1f} | {seconds:.2f} "
                f"| {peak / 1e6:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--plan", action="store_true", help="the whole stage instead of packing alone")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, pyarrow {pa.__version__}, one process.\n")
    (print_plans if args.plan else print_packing)(args.samples)


if __name__ == "__main__":
    main()
