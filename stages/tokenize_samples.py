"""Sample shards -> tokenized shards: what the trainer reads, one output shard for each input shard.

train/shard-00000.tar    input_ids, loss_mask, image_grid_thw and uint8 patches of each sample
index.parquet            where each sample lies and how long it is
quarantine.jsonl         samples that were left out: key, reason, detail
report.json, report.html the text with the learnt tokens in colour, distributions
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.shard_io import finished_shard
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import INDEX_SCHEMA, read_index, write_index
from stages.artifact import Artifact, External, Input, Stage, StageOutput
from stages.encode_chat import ChatEncoder
from stages.encode_image import ImageConfig, load_image_config
from stages.quarantine import QUARANTINE, LeftOut, count_reasons, write_quarantine
from stages.tokenize_report import write_tokenize_report
from stages.tokenize_shard import ShardTask, read_rows, rows_path, tokenize_shard
from stages.workers import StageResources, run_tasks

VERSION = 1
_PROCESS_WORTH = 10.0  # seconds of work: a process imports torch and transformers first, which takes up to five
_JUDGED_FROM = 200  # samples seen before max_skip_fraction is held against them


class TokenizeConfig(StrictModel):
    """Identity of tokenized samples, beside the samples and the processor's files."""

    max_seq_len: int = Field(gt=0, description="samples with more tokens are left out, never cut")
    max_pixels: int | None = Field(
        gt=0, description="larger images are scaled down to this area; null: the model's own"
    )
    min_pixels: int | None = Field(
        default=None, gt=0, description="smaller images are scaled up to this area; null: the model's own"
    )
    codec: Literal["u8"] = Field(default="u8", description="how pixels are stored: scaled uint8 patches")
    max_skip_fraction: float = Field(
        ge=0, le=1, description="more left out than this share is an error; from 200 samples on"
    )


def _run(
    config: TokenizeConfig, inputs: Mapping[str, Input], work: Path, resources: StageResources | None
) -> StageOutput:
    samples, processor = inputs["samples"], inputs["processor"]
    assert isinstance(samples, Artifact) and isinstance(processor, External)
    chat = ChatEncoder(processor.dir)  # says what is wrong with the directory before a worker starts
    images = load_image_config(processor.dir, config.min_pixels, config.max_pixels)
    names = [shard.name for shard in samples.manifest.shards]
    tasks = [
        ShardTask(
            source=samples.dir / shard.name,
            directory=work,
            name=shard.name,
            split=shard.split,
            hf_dir=processor.dir,
            processor_digest=processor.digest,
            image_config=images,
            max_seq_len=config.max_seq_len,
        )
        for shard in samples.manifest.shards
    ]
    _tokenize(tasks, resources or StageResources(), samples.manifest)
    left_out = _collect(work, names)
    index = read_index(work)
    _check_skips(index, left_out, config.max_skip_fraction, work)
    stats = _stats(index, chat, images)
    write_tokenize_report(work, index, left_out, stats, chat, images.patch_format)
    shards = [finished_shard(work, name) for name in names]
    for name in names:
        rows_path(work, name).unlink()
    return StageOutput(shards=shards, skips=count_reasons(left_out), stats=stats)


def _tokenize(tasks: Sequence[ShardTask], resources: StageResources, manifest: Manifest) -> None:
    done = 0
    for i, _ in run_tasks(tokenize_shard, tasks, min(resources.num_workers, _worthwhile_workers(manifest))):
        done += manifest.shards[i].num_samples
        resources.report(done, manifest.num_samples)


def _worthwhile_workers(manifest: Manifest) -> int:
    """Processes that are worth their start, by a guess at the work: 400 texts/s, 25 MB/s of images."""
    size = sum(shard.size_bytes for shard in manifest.shards)
    return max(int((manifest.num_samples / 400 + size / 25e6) / _PROCESS_WORTH), 1)


def _collect(work: Path, names: Sequence[str]) -> list[LeftOut]:
    """Write the index and the quarantine from the rows beside the shards; returns what was left out."""
    tables = [INDEX_SCHEMA.empty_table()]
    left_out: list[LeftOut] = []
    for name in names:
        table, shard_left_out = read_rows(work, name)
        tables.append(table)
        left_out += shard_left_out
    write_index(work, pa.concat_tables(tables).combine_chunks())
    write_quarantine(work, left_out)
    return left_out


def _check_skips(index: pa.Table, left_out: Sequence[LeftOut], max_fraction: float, work: Path) -> None:
    seen = index.num_rows + len(left_out)
    if index.num_rows and (seen < _JUDGED_FROM or len(left_out) <= max_fraction * seen):
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(i.reason for i in left_out).most_common())
    raise InputError(
        f"{len(left_out)} of {seen} samples were left out ({reasons or 'there were none'}), tokenize.max_skip_fraction="
        f"{max_fraction} allows fewer; look at {work / QUARANTINE}, mend the data or raise the limit"
    )


def _stats(index: pa.Table, chat: ChatEncoder, images: ImageConfig) -> dict[str, Any]:
    return {
        "patch_format": images.patch_format.model_dump(mode="json"),
        "min_pixels": images.min_pixels,
        "max_pixels": images.max_pixels,
        "vocab_size": chat.vocab_size,
        "image_token_id": chat.image_token_id,
        "video_token_id": chat.video_token_id,
        "vision_start_token_id": chat.vision_start_token_id,
        "vision_end_token_id": chat.vision_end_token_id,
        "end_of_turn_id": chat.end_of_turn_id,
        "total": _sums(index),
        "splits": {split: _sums(index.filter(pc.equal(index["split"], split))) for split in SPLITS},
        "subsets": {
            name: _sums(index.filter(pc.equal(index["subset"], name)))
            for name in sorted(set(index["subset"].to_pylist()))
        },
    }


def _sums(index: pa.Table) -> dict[str, Any]:
    columns = ("num_tokens", "num_loss_tokens", "num_patches", "num_images")
    return {"num_samples": index.num_rows, **{name: pc.sum(index[name]).as_py() or 0 for name in columns}}


STAGE = Stage("tokenize", VERSION, _run)
