"""Whole optimizer steps of the real trainer on Qwen3-VL's real shapes: random weights, real loader, shards on disk.

    python -m tests.bench.bench_train_step --model 2b --gpus 1 --steps 12
    python -m tests.bench.bench_train_step --gpus 4 --global-batch 32 --bins 64 --parallel '{}' --parallel '{"tp": 2}'

Several layouts are measured one after the other on the same files. Bins are padded for up to cp 2.

Samples of a Cauldron-like mix: image tokens log-normal around 500, one tenth text only, one tenth with several images,
a few dozen to a few hundred text tokens. Tokens are counted without padding; FLOPs are the model's, vision and
language, without padding (trainer/models/qwen3_vl/flops.py). The first steps, which plan kernels, are left out.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import transformers

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.shard_io import ShardWriter
from dataset_builders.contracts.tokenized import PixelConfig, PixelStore
from dataset_builders.pixel_codecs import encode_sample
from stages.pack import pack
from tests.helpers.bins import Kind, make_sample, write_plan
from tests.helpers.reference import PIXELS
from trainer.batch import Geometry
from trainer.contract import (
    CheckpointConfig,
    MetricsRow,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    read_metrics,
)

WARMUP_STEPS = 4
MAX_PATCHES_PER_TOKEN = 4
PAD_MULTIPLE = 4
SHAPES = {
    "2b": ({"hidden": 2048, "layers": 28, "heads": 16, "ffn": 6144, "tied": True}, "300m"),
    "4b": ({"hidden": 2560, "layers": 36, "heads": 32, "ffn": 9728, "tied": True}, "300m"),
    "8b": ({"hidden": 4096, "layers": 36, "heads": 32, "ffn": 12288, "tied": False}, "400m"),
}
VISION = {
    "300m": {"depth": 24, "hidden": 1024, "ffn": 4096, "deepstack": [5, 11, 17]},
    "400m": {"depth": 27, "hidden": 1152, "ffn": 4304, "deepstack": [8, 16, 24]},
}
IMAGE_TOKEN = 151655


def model_config(name: str) -> transformers.Qwen3VLConfig:
    """The published sizes of Qwen3-VL-2B, 4B and 8B."""
    text, vision_name = SHAPES[name]
    vision = VISION[vision_name]
    return transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": text["hidden"],
            "intermediate_size": text["ffn"],
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
            "tie_word_embeddings": text["tied"],
        },
        vision_config={
            "depth": vision["depth"],
            "hidden_size": vision["hidden"],
            "intermediate_size": vision["ffn"],
            "num_heads": 16,
            "out_hidden_size": text["hidden"],
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": vision["deepstack"],
        },
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=text["tied"],
    )


def write_model(directory: Path, name: str) -> None:
    """A random HF directory in bf16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.Qwen3VLForConditionalGeneration(model_config(name)).to(torch.bfloat16)
    model.save_pretrained(directory)


def draw_kind(rng: np.random.Generator) -> Kind:
    """One sample of the mix."""
    which = rng.random()
    images = 0 if which < 0.1 else int(rng.integers(2, 5)) if which < 0.2 else 1
    grids = []
    for _ in range(images):
        tokens = float(np.clip(rng.lognormal(np.log(500), 0.6), 16, 3000)) / max(1, images - 1)
        height = max(1, round(np.sqrt(tokens * rng.uniform(0.5, 2.0))))
        grids.append((1, 2 * height, 2 * max(1, round(tokens / height))))
    return Kind(int(rng.integers(40, 300)), tuple(grids), learnt=0.3)


def write_data(directory: Path, num_bins: int, seq_len: int, vocabulary: range = range(1000, 150000)) -> None:
    """Tokenized shards and bins; enough samples that `num_bins` bins are full. Text is drawn from `vocabulary`."""
    rng, geometry = np.random.default_rng(0), Geometry(IMAGE_TOKEN, 2, 48, 768)
    rows, total = [], 0
    name = "train/shard-00000.tar"
    with ShardWriter(directory, name) as writer:
        while total < num_bins * seq_len:
            key = f"mix/{len(rows):08d}"
            sample = make_sample(draw_kind(rng), geometry, vocabulary, len(rows), key)
            if len(sample.input_ids) > seq_len:
                continue
            record = writer.write(key, encode_sample(sample, "u8", {}))
            total += len(sample.input_ids)
            rows.append(
                {"key": key, "subset": "mix", "split": "train", "shard": name, "offset": record.offset}
                | {
                    "size": record.size,
                    "checksum": record.checksum,
                    "num_tokens": len(sample.input_ids),
                    "num_images": len(sample.image_grid_thw),
                }
                | {"num_loss_tokens": int(sample.loss_mask.sum()), "num_patches": len(sample.patches)}
            )
        entry = writer.commit("train")
    tokens, patches = (np.array([r[k] for r in rows]) for k in ("num_tokens", "num_patches"))
    padded = -(-tokens // PAD_MULTIPLE) * PAD_MULTIPLE
    bins = pack(padded, patches, seq_len, MAX_PATCHES_PER_TOKEN * seq_len)
    order = np.argsort(bins, kind="stable").tolist()
    write_plan(directory, [rows[i] for i in order], bins[order].tolist())
    pixels = PixelStore(codec="u8", config=PixelConfig(min_pixels=1, max_pixels=1 << 24, patch_format=PIXELS))
    stats = {"pixels": pixels.model_dump(mode="json")}
    config = {"pad_multiple": PAD_MULTIPLE}
    Manifest(
        stage="tokenize", version=1, fingerprint="b" * 16, config=config, parents={}, shards=[entry], stats=stats
    ).write(directory)


def run_steps(root: Path, args: argparse.Namespace, parallel: ParallelConfig) -> list[MetricsRow]:
    """The metrics of some steps of a layout."""
    optim = OptimConfig(lr=1e-5, min_lr_fraction=0.1, warmup_steps=2, weight_decay=0.1)
    train = TrainConfig(
        seed=0,
        num_steps=10**6,
        global_batch_size=args.global_batch,
        precision="bfloat16",
        heldout_interval=10**6,
        optim=optim,
    )
    return train_steps(root, train, args.seq_len, args.steps, gpus=args.gpus, parallel=parallel)


def train_steps(
    root: Path, train: TrainConfig, seq_len: int, steps: int, *, gpus: int = 1, parallel: ParallelConfig | None = None
) -> list[MetricsRow]:
    """Train some steps on what `write_model` and `write_data` wrote, in processes of their own; the metrics of each."""
    out = root / "run"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    run = RunConfig(
        task="train",
        fingerprint="b" * 16,
        hf_dir=root / "hf",
        tokenized_dir=root / "data",
        bins_dir=root / "data",
        output_dir=out,
        seq_len=seq_len,
        train=train,
        parallel=parallel or ParallelConfig(),
        checkpoint=CheckpointConfig(save_interval=10**6),
    )
    (out / "run.json").write_text(run.model_dump_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    job = subprocess.Popen([*command, "-m", "trainer", str(out / "run.json")])
    while job.poll() is None and len(read_metrics(out)) < steps:
        time.sleep(1)
    # Ended from outside, so that nobody waits for a checkpoint of many GB.
    for process in [*psutil.Process(job.pid).children(recursive=True), job] if job.poll() is None else []:
        process.kill()
    job.wait()
    rows = read_metrics(out)[:steps]
    assert len(rows) == steps, f"the trainer ended after {len(rows)} of {steps} steps"
    return rows


def table(measured: dict[str, list[MetricsRow]], gpus: int) -> str:
    """Medians over the steps after the warmup, a column for each layout."""
    lines = {
        "useful tokens/s/GPU": lambda r: r.tokens_per_second / gpus,
        "TFLOP/s/GPU, vision + language": lambda r: (r.vision_tflops + r.language_tflops) / gpus,
        "MFU": lambda r: r.mfu or 0.0,
        "step, s": lambda r: r.step_seconds,
        "data, s": lambda r: r.data_seconds,
        "vision, s": lambda r: r.vision_seconds,
        "language, s": lambda r: r.language_seconds,
        "optimizer, s": lambda r: r.optimizer_seconds,
        "padding": lambda r: r.padding_fraction,
        "peak memory, GB": lambda r: r.memory_gb,
    }
    head = f"| median of a step | {' | '.join(measured)} |\n| --- |{' --- |' * len(measured)}"
    body = []
    for name, get in lines.items():
        values = [statistics.median(map(get, rows[WARMUP_STEPS:])) for rows in measured.values()]
        body.append(f"| {name} | {' | '.join(f'{value:,.3f}' for value in values)} |")
    return "\n".join([head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="2b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--global-batch", type=int, default=8, help="bins a step")
    parser.add_argument("--bins", type=int, default=32, help="bins on disk")
    parser.add_argument("--parallel", action="append", help="ParallelConfig as JSON; may be given several times")
    args = parser.parse_args()
    layouts = {text: ParallelConfig.model_validate(json.loads(text)) for text in args.parallel or ["{}"]}
    with tempfile.TemporaryDirectory(prefix="athanor-bench-") as folder:
        root = Path(folder)
        write_model(root / "hf", args.model)
        write_data(root / "data", args.bins, args.seq_len)
        measured = {text: run_steps(root, args, parallel) for text, parallel in layouts.items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"\nQwen3-VL-{args.model}, {args.gpus} x {device}, torch {torch.__version__}, {vars(args)}\n")
    print(table(measured, args.gpus))


if __name__ == "__main__":
    main()
