"""encode_images: the features of each distinct image, which a training with a frozen vision encoder reads.

features/00000.tar               the features of images, one record each
index/00000.arrow                the byte ranges of a shard's records
images/00000.parquet             the images of a shard
samples/train/shard-00000.arrow  the records of the images of each sample of a tokenized shard
report.json, report.html         images, bytes, the error of the stored type

The features depend only on the weights and the tokenized samples, so trainings with other bins, rates or steps reuse
them.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builders.contracts.features import (
    IMAGE_FILES,
    INDEX_FILES,
    SAMPLE_FILES,
    index_name,
    read_table,
    shard_name,
)
from dataset_builders.contracts.manifest import FeatureStore
from dataset_builders.contracts.shard_io import finished_shard
from dataset_builders.storage.store import absolute
from stages.encode_images.config import EncodingConfig
from stages.encode_images.images import ImagePlan, plan_images, scan_images
from stages.shared.artifacts.artifact import Artifact, Input, Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.model_directory import opened_model
from stages.shared.pages.report import write_report
from stages.train.run_trainer import run_trainer
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import EncodeRun

VERSION = 1
JOB_DIR = "job"  # output directory of the trainer's run, in the work directory
SCAN_DIR = "scan"


def encode_images(
    config: EncodingConfig, inputs: Mapping[str, Input], work_dir: Path, resources: StageResources
) -> StageOutput:
    """Run the stage. Inputs: "model" (HF directory), "tokenized"."""
    tokenized, model = inputs["tokenized"], opened_model(inputs["model"])
    assert isinstance(tokenized, Artifact)
    shape = model.shape
    store = FeatureStore(dtype=config.dtype, width=shape.feature_width)
    merged = shape.vision.spatial_merge_size**2
    limit = merged * max(1, int(config.shard_size_mb * 1e6) // store.token_bytes)
    tasks = scan_images(tokenized, work_dir / SCAN_DIR, resources)
    plan = plan_images(tasks, work_dir, limit)
    names = [shard_name(number) for number in range(plan.num_shards)]
    if any(finished_shard(work_dir, name) is None for name in names):
        run = EncodeRun(
            hf_dir=model.path.resolve(),
            tokenized_dir=absolute(tokenized.dir),
            features_dir=work_dir.resolve(),
            output_dir=work_dir.resolve() / JOB_DIR,
            num_shards=plan.num_shards,
            precision=config.precision,
            dtype=config.dtype,
            # Every rank has the whole encoder, whatever the layout of the training.
            execution=resources.trainer.model_copy(update={"parallel": ParallelConfig()}),
            num_threads=resources.cluster.num_threads,
        )
        run.output_dir.mkdir(exist_ok=True)
        run_trainer(run, resources, STAGE.name)
    for directory in (JOB_DIR, SCAN_DIR):  # their paths and times would make every artifact different
        shutil.rmtree(work_dir / directory, ignore_errors=True)
    shards = [finished_shard(work_dir, name) for name in names]
    stats = {"features": store.model_dump(mode="json"), **_stats(work_dir, plan, store)}
    summary = {name.replace("_", " "): value for name, value in stats.items() if name != "features"}
    summary["numbers of an image token"] = stats["features"]["width"]
    write_report(work_dir, title="Encoded images", summary=summary, sections=[])
    return StageOutput(shards=shards, stats=stats)


def _stats(work: Path, plan: ImagePlan, store: FeatureStore) -> dict[str, Any]:
    tokens, largest_error = 0, 0.0
    for number in range(plan.num_shards):
        table = read_table(work / index_name(number))
        tokens += int(table["tokens"].to_numpy().sum())
        largest_error = max(largest_error, float(table["largest_error"].to_numpy().max()))
    return {
        "images": plan.uses,
        "distinct_images": len(plan.places),
        "image_tokens": tokens,
        "bytes_per_image_token": store.token_bytes,
        "bytes": tokens * store.token_bytes,
        "largest_error": largest_error,
    }


STAGE = Stage("encode_images", VERSION, encode_images, on_disk=True, digested=(INDEX_FILES, SAMPLE_FILES, IMAGE_FILES))
