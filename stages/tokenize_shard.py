"""One sample shard -> one tokenized shard, in a process of its own."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataset_builders.contracts import sample_record
from dataset_builders.contracts.files import write_json
from dataset_builders.contracts.sample import Sample, SkipSample, Split
from dataset_builders.contracts.shard_io import RecordRange, ShardWriter, finished_shard, iter_records
from dataset_builders.contracts.tokenized import INDEX_SCHEMA, TokenizedSample, from_fields
from stages.encode_chat import ChatEncoder
from stages.encode_image import ImageConfig, encode_image
from stages.quarantine import LeftOut, count_reasons

_CHECK_EVERY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """What a worker needs to know.

    Attributes:
        source: the sample shard.
        directory, name: where the tokenized shard goes.
        processor_digest: of hf_dir, so that a worker never reuses an encoder of other files.
        max_seq_len: samples with more tokens are left out.
    """

    source: Path
    directory: Path
    name: str
    split: Split
    hf_dir: Path
    processor_digest: str
    image_config: ImageConfig
    max_seq_len: int


def tokenize_sample(sample: Sample, chat: ChatEncoder, images: ImageConfig) -> TokenizedSample:
    """Everything the trainer reads of one sample.

    Raises:
        SkipSample: an image cannot be used, or the conversation cannot be masked.
    """
    encoded = [encode_image(image, images) for image in sample.images]
    grids = np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3)
    no_patches = np.zeros((0, images.patch_format.patch_bytes), np.uint8)
    input_ids, loss_mask = chat.encode(sample.messages, grids)
    return TokenizedSample(
        key=sample.key,
        input_ids=input_ids,
        loss_mask=loss_mask,
        image_grid_thw=grids,
        patches=np.concatenate([no_patches, *(patches for patches, _ in encoded)]),
    )


def tokenize_shard(task: ShardTask) -> None:
    """Write the tokenized shard and, just before its commit, the rows beside it; nothing when both are there."""
    if is_finished(task.directory, task.name):
        return
    chat = _encoder(task.hf_dir, task.processor_digest)
    rows: list[dict[str, object]] = []
    left_out: list[LeftOut] = []
    with ShardWriter(task.directory, task.name) as writer:
        for key, fields in iter_records(task.source):
            sample = sample_record.from_fields(key, fields)
            try:
                tokenized = tokenize_sample(sample, chat, task.image_config)
                _check_length(tokenized, task.max_seq_len)
            except SkipSample as skip:
                left_out.append(LeftOut(key, skip.reason, skip.detail))
                continue
            record = tokenized.to_fields()
            if len(rows) % _CHECK_EVERY == 0:
                verify(sample, from_fields(key, record, task.image_config.patch_format), chat)
            rows.append(_index_row(task, sample, tokenized, writer.write(key, record)))
        write_json(
            rows_path(task.directory, task.name),
            {"rows": rows, "left_out": [dataclasses.asdict(item) for item in left_out]},
        )
        writer.commit(task.split, count_reasons(left_out))


def is_finished(directory: Path, name: str) -> bool:
    """Whether an earlier try committed the shard and left its rows."""
    return finished_shard(directory, name) is not None and rows_path(directory, name).is_file()


def read_rows(directory: Path, name: str) -> tuple[pa.Table, list[LeftOut]]:
    """The index rows (INDEX_SCHEMA) of a finished shard and what was left out of it."""
    data = json.loads(rows_path(directory, name).read_text(encoding="utf-8"))
    table = pa.Table.from_pylist(data["rows"], schema=INDEX_SCHEMA)
    return table, [LeftOut(**item) for item in data["left_out"]]


def rows_path(directory: Path, name: str) -> Path:
    """Rows of one shard, until index.parquet holds them all."""
    return directory / f"{name}.rows.json"


def verify(sample: Sample, stored: TokenizedSample, chat: ChatEncoder) -> None:
    """See from the stored bytes alone that images and answers are all there.

    Raises:
        AssertionError: they are not, which is a fault of this code and stops the stage.
    """
    stored.check()
    image_tokens = int((stored.input_ids == chat.image_token_id).sum())
    expected = int(stored.image_grid_thw.prod(-1).sum()) // chat.merge_size**2
    assert image_tokens == expected, f"{sample.key}: {image_tokens} image tokens for grids that make {expected}"
    edges = np.flatnonzero(np.diff(stored.loss_mask, prepend=0, append=0))
    learnt = [chat.decode(stored.input_ids[start:end]) for start, end in edges.reshape(-1, 2)]
    answers = [chat.learnt_text(message.text) for message in sample.messages if message.role == "assistant"]
    assert learnt == answers, f"{sample.key}: the mask decodes to {learnt}, the answers are {answers}"


def _check_length(tokenized: TokenizedSample, max_seq_len: int) -> None:
    if len(tokenized.input_ids) > max_seq_len:
        raise SkipSample("over_length", f"{len(tokenized.input_ids)} tokens, max_seq_len is {max_seq_len}")


def _index_row(task: ShardTask, sample: Sample, tokenized: TokenizedSample, at: RecordRange) -> dict[str, object]:
    return {
        "key": sample.key,
        "subset": sample.subset,
        "split": task.split,
        "shard": task.name,
        "offset": at.offset,
        "size": at.size,
        "num_tokens": len(tokenized.input_ids),
        "num_loss_tokens": int(tokenized.loss_mask.sum()),
        "num_patches": len(tokenized.patches),
        "num_images": len(tokenized.image_grid_thw),
    }


@functools.lru_cache(maxsize=1)
def _encoder(hf_dir: Path, processor_digest: str) -> ChatEncoder:
    return ChatEncoder(hf_dir)
