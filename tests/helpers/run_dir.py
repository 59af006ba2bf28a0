"""A whole training job on disk: tiny HF directory, tokenized shards and bins of made samples, run.json."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.shard_io import ShardWriter
from dataset_builders.contracts.tokenized import PixelConfig, PixelStore, TokenizedSample
from dataset_builders.records.pixel_codecs import encode_sample
from tests.helpers.bins import MIXED, TEXT_ONLY, Kind, make_samples, write_plan
from tests.helpers.index import write_index
from tests.helpers.reference import PIXELS, random_hf_dir
from tests.helpers.started import Started
from tests.helpers.tiny_experts_model import experts_hf_dir, mtp_experts_hf_dir
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir, mtp_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir
from tests.helpers.world import start
from trainer.contract.parallel import ParallelConfig
from trainer.contract.result import MetricsRow, TrainResult, read_metrics
from trainer.contract.run import CheckpointConfig, OptimConfig, RunConfig, TrainConfig, TrainerExecution
from trainer.data.micro_batch import geometry_of
from trainer.model.registry import read_model
from trainer.plan.checks import check_run

SEQ_LEN = 128
BIN_KINDS: list[list[Kind]] = [MIXED, [TEXT_ONLY] * 4, MIXED[::-1], MIXED[:3], [TEXT_ONLY, MIXED[0]], MIXED[1:]]
# Segments that end one before, at and one after the end of a chunk of the delta rule, or are one token; a bin of one
# segment.
CHUNK_KINDS: list[list[Kind]] = [
    [Kind(63, learnt=0.1), Kind(1, learnt=0), Kind(64, learnt=0.1)],
    [Kind(65, learnt=0.1), Kind(62, learnt=0.1)],
    [Kind(128, learnt=0.1)],
]
OPTIM = OptimConfig(lr=3e-3, min_lr_fraction=0.1, warmup_steps=2, weight_decay=0.1)


# Beginning of a shape's name -> function that returns the directory of the rest of the name: a tiny Qwen3, Qwen3.5 or
# model with experts, the last two also with multi-token prediction. Without one it is a shape of the tiny Qwen3-VL.
MODEL_DIRS: dict[str, Callable[[str], Path]] = {
    "text-": text_hf_dir,
    "hybrid-": hybrid_hf_dir,
    "experts-": experts_hf_dir,
    "mtp-experts-": mtp_experts_hf_dir,
    "mtp-": mtp_hf_dir,
    "": random_hf_dir,
}


def model_dir(shape: str) -> Path:
    """Return the model directory of a shape's name."""
    start = next(start for start in MODEL_DIRS if shape.startswith(start))
    return MODEL_DIRS[start](shape.removeprefix(start))


def check_job(run: RunConfig, world_size: int) -> None:
    """Check a job on disk as the train stage does."""
    check_run(run, world_size, *read_model(run.hf_dir, run.train))


def make_bins(shape: str = "first", kinds: list[list[Kind]] | None = None) -> list[list[TokenizedSample]]:
    """Make the same samples of every bin each time; without images for a text model.

    Args:
        kinds: kinds of the samples. None takes BIN_KINDS, and also CHUNK_KINDS for a model that computes segments in
            chunks.
    """
    geometry = geometry_of(read_model(model_dir(shape))[1])
    if kinds is None:
        kinds = BIN_KINDS + (CHUNK_KINDS if geometry.in_chunks else [])
    if geometry.image_token_id is None:
        kinds = [[dataclasses.replace(kind, grids=(), videos=()) for kind in of_bin] for of_bin in kinds]
    return [make_samples(k, geometry, range(20, 300), seed=i + 1) for i, k in enumerate(kinds)]


def write_job(
    root: Path,
    *,
    num_steps: int,
    shape: str = "first",
    bins: list[list[TokenizedSample]] | None = None,
    global_batch_size: int = 2,
    save_interval: int = 1000,
    parallel: ParallelConfig | None = None,
    optim: OptimConfig = OPTIM,
    name: str = "run",
) -> RunConfig:
    """Write data and run.json below `root`. The first two bins are also the held-out bins."""
    bins = bins or make_bins(shape)
    data, plan = root / "data", root / "bins"
    if not data.is_dir():
        _write_data(data, plan, bins)
    run = RunConfig(
        task="train",
        fingerprint="0123456789abcdef",
        hf_dir=model_dir(shape),
        tokenized_dir=data,
        bins_dir=plan,
        output_dir=root / name,
        seq_len=SEQ_LEN,
        train=TrainConfig(
            seed=5,
            num_steps=num_steps,
            global_batch_size=global_batch_size,
            precision="float32",
            heldout_interval=3,
            optim=optim,
            mtp_loss_scaling_factor=0.3 if shape.startswith("mtp-") else 0.0,
        ),
        execution=TrainerExecution(
            parallel=parallel or ParallelConfig(),
            checkpoint=CheckpointConfig(save_interval=save_interval, keep_last=2),
        ),
        num_threads=1,
    )
    run.output_dir.mkdir(parents=True, exist_ok=True)
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    return run


def changed(run: RunConfig, **changes: object) -> RunConfig:
    """Return the job with other fields. Fields of its execution are given by their own names."""
    execution = {name: value for name, value in changes.items() if name in TrainerExecution.model_fields}
    others = {name: value for name, value in changes.items() if name not in execution}
    return run.model_copy(update={**others, "execution": run.execution.model_copy(update=execution)})


def _write_data(directory: Path, plan: Path, bins: list[list[TokenizedSample]]) -> None:
    rows, numbers, entries = [], [], []
    for split, chosen in (("train", bins), ("heldout", bins[:2])):
        name = f"{split}/shard-00000.tar"
        with ShardWriter(directory, name) as writer:
            for number, samples in enumerate(chosen):
                for place, sample in enumerate(samples):
                    key = f"{split}/{number:04d}{place:04d}"
                    record = writer.write(key, encode_sample(sample, "u8", {}))
                    rows.append(_row(split, name, key, record, sample))
                    numbers.append(number)
            entries.append(writer.commit(split))
    write_index(directory, rows)
    pixels = PixelStore(codec="u8", config=PixelConfig(min_pixels=1, max_pixels=1 << 20, patch_format=PIXELS))
    stats = {"pixels": pixels.model_dump(mode="json")}
    Manifest(
        stage="tokenize", version=1, fingerprint="f" * 16, config={}, parents={}, shards=entries, stats=stats
    ).write(directory)
    write_plan(plan, rows, numbers, SEQ_LEN, pad_multiple=16)  # the bins of BIN_KINDS have room for 16


def _row(split: str, name: str, key: str, record, sample: TokenizedSample) -> dict[str, object]:
    return {
        "key": key,
        "subset": split,
        "split": split,
        "shard": name,
        "offset": record.offset,
        "size": record.size,
        "checksum": record.checksum,
        "num_tokens": len(sample.input_ids),
        "num_loss_tokens": int(sample.loss_mask[1:].sum()),
        "num_patches": len(sample.patches),
        "num_images": len(sample.image_grid_thw),
    }


def start_trainer(run: RunConfig, processes: int = 1) -> subprocess.Popen | Started:
    """Start the trainer as users do, by torchrun with one JSON file. With 0 processes it runs without torchrun.

    Without a GPU, a trainer without torchrun is forked, which saves its imports.
    """
    run.output_dir.mkdir(parents=True, exist_ok=True)
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    if not processes and not torch.cuda.is_available():
        return start("trainer", run.output_dir / "run.json", log=run.output_dir / "log.txt")
    command = [sys.executable, "-m"]
    if processes:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--max-restarts=0", "-m"]
    command += ["trainer", str(run.output_dir / "run.json")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (run.output_dir / "log.txt").open("a")
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def run_trainer(run: RunConfig, processes: int = 1, timeout: float = 240) -> int:
    return start_trainer(run, processes).wait(timeout)


def metrics_of(run: RunConfig) -> list[MetricsRow]:
    return read_metrics(run.output_dir)


def result_of(run: RunConfig) -> TrainResult:
    return TrainResult.model_validate(json.loads((run.output_dir / "result.json").read_text()))


def log_of(run: RunConfig) -> str:
    return (run.output_dir / "log.txt").read_text()
