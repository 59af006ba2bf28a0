"""The conversion of one sample shard to one tokenized shard, in a worker process."""

import bisect
import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample, from_fields, turn_key, whole_key
from dataset_builders.contracts.shard_io import RecordRange, ShardWriter, finished_shard, iter_records
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import PixelStore, TokenizedSample
from dataset_builders.pictures.images import read_rgb
from dataset_builders.pictures.pixels import count_patches, decode_sample, encode_rgb, encode_sample, image_grid
from dataset_builders.storage.files import read_sealed, write_sealed
from dataset_builders.storage.store import StorePath, local_dir
from stages.shared.artifacts.left_out import LeftOut, count_reasons
from stages.shared.chat_format.boxes import with_boxes_written
from stages.shared.chat_format.chat import ChatEncoder, TokenizedText, split_turns, trained_answers
from stages.shared.chat_format.reasoning import Conversation
from stages.shared.inputs.model_directory import ModelDirectory
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.processor_check import ProcessorCheck

_CHECK_EVERY = 256  # every 256th sample of a shard is checked, starting with the first
_BATCH_SAMPLES, _BATCH_BYTES = 256, 32 << 20  # limits of a tokenizer call: conversations, image bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """One shard to tokenize."""

    samples: StorePath  # directory of the sample shard
    shard: ShardEntry
    directory: StorePath  # output directory of the tokenized shard, which has the same name
    hf_dir: StorePath
    processor_digest: str  # digest of hf_dir, so that a worker never reuses an encoder of other files
    pixels: PixelStore  # the settings and the codec of pixels
    config: TokenizeConfig


@dataclass(frozen=True, slots=True)
class Shortened:
    """A sample that lost its last turns."""

    key: str
    turns_kept: int  # a turn is a question with its answer
    turns_before: int


class ShardNotes(StrictModel):
    """Facts about a tokenized shard that are not in the shard."""

    rows: list[dict[str, Any]]  # the shard's rows of the index, with the columns of INDEX_SCHEMA
    left_out: list[LeftOut]
    shortened: list[Shortened]
    num_cut: int = 0  # conversations that were cut, because one text is not exact for every answer
    num_parts: int = 0  # samples made from them
    num_reasoned: int = 0  # trained answers with reasoning, in the kept samples
    num_boxed: int = 0  # conversations with boxes
    num_checked: int  # samples that were compared with transformers
    pixels_against: str  # the reference that their pixels were compared with


def tokenize_shard(task: ShardTask) -> None:
    """Write the tokenized shard and, just before its commit, its notes; do nothing if both exist."""
    notes_file = notes_path(task.directory, task.shard.name)
    if finished_shard(task.directory, task.shard.name) is not None and read_sealed(notes_file) is not None:
        return
    config = task.config
    chat = encoder_of(task.hf_dir, task.processor_digest, config)
    reference = ProcessorCheck(task.pixels.config, chat)
    rows: list[dict[str, object]] = []
    left_out: list[LeftOut] = []
    shortened: list[Shortened] = []
    parts: Counter[str] = Counter()  # number of samples of each cut conversation
    num_reasoned = 0
    boxed: set[str] = set()  # keys of conversations with boxes
    with _one_thread(), ShardWriter(task.directory, task.shard.name) as writer:
        for sample, names, text in _read_ahead(task, chat, boxed):
            if (whole := whole_key(sample.key)) != sample.key:
                parts[whole] += 1
            try:
                kept, tokenized = tokenize_sample(sample, text, chat, task.pixels, config)
            except SkipSample as skip:
                left_out.append(LeftOut(sample.key, skip.reason, skip.detail))
                continue
            if len(kept.messages) < len(sample.messages):
                turns = (len(split_turns(s.messages)) for s in (kept, sample))
                shortened.append(Shortened(sample.key, *turns))
            record = encode_sample(tokenized, task.pixels.codec, dict(zip(names, kept.images)))
            if len(rows) % _CHECK_EVERY == 0:
                stored = decode_sample(sample.key, record, task.pixels)
                verify(kept, stored, chat)
                reference.check(kept, stored)
            num_reasoned += _count_reasoned(kept, chat)
            rows.append(_index_row(task, kept, tokenized, writer.write(sample.key, record)))
        notes = ShardNotes(
            rows=rows,
            left_out=left_out,
            shortened=shortened,
            num_cut=len(parts),
            num_parts=parts.total(),
            num_reasoned=num_reasoned,
            num_boxed=len(boxed),
            num_checked=-(-len(rows) // _CHECK_EVERY),
            pixels_against=reference.pixels_against,
        )
        write_sealed(notes_file, notes.model_dump_json())
        writer.commit(task.shard.split, count_reasons(left_out))


def tokenize_sample(
    sample: Sample, text: TokenizedText | SkipSample, chat: ChatEncoder, pixels: PixelStore, config: TokenizeConfig
) -> tuple[Sample, TokenizedSample]:
    """Return the sample without the turns that do not fit, and its tokenized form; SkipSample if it cannot be used.

    With codec original, the tokenized sample has no patches, because the record has the images.
    """
    if isinstance(text, SkipSample):
        raise text
    # From the images' headers, so that no image is decoded for a sample or a turn that is left out.
    patches = np.array([count_patches(image, pixels.config) for image in sample.images], np.int64)
    input_ids, loss_mask = chat.splice(text, patches)
    if len(input_ids) > config.max_seq_len:
        if config.over_length == "skip" or whole_key(sample.key) != sample.key:  # an earlier part has the earlier turns
            raise SkipSample("over_length", f"{len(input_ids)} tokens, max_seq_len is {config.max_seq_len}")
        sample, text = drop_turns(sample, patches, chat, config.max_seq_len)
        patches = patches[: len(sample.images)]
        input_ids, loss_mask = chat.splice(text, patches)
        assert len(input_ids) <= config.max_seq_len, sample.key
    blocks, grids = [np.zeros((0, pixels.config.patch_format.patch_bytes), np.uint8)], []
    for image in sample.images:
        rgb = read_rgb(image, whole=True)  # even with codec original, so that no stored image fails in training
        if pixels.codec == "original":  # the patches are computed when the record is read
            grids.append(image_grid(*rgb.shape[:2], pixels.config))
        else:
            block, grid = encode_rgb(rgb, pixels.config)
            blocks.append(block)
            grids.append(grid)
    grids = np.array(grids, np.int32).reshape(-1, 3)
    assert grids.prod(-1).tolist() == patches.tolist(), f"{sample.key}: the headers promise other sizes"
    return sample, TokenizedSample(
        key=sample.key,
        input_ids=input_ids,
        loss_mask=loss_mask,
        image_grid_thw=grids,
        is_video=np.zeros(len(grids), bool),
        later_patches=blocks[0],
        patches=blocks[1] if len(blocks) == 2 else np.concatenate(blocks),  # one image, the common case, is not copied
    )


def drop_turns(
    sample: Sample, patches: np.ndarray, chat: ChatEncoder, max_seq_len: int
) -> tuple[Sample, TokenizedText]:
    """Return the sample with as many of its first turns as fit, and its tokenized conversation. `patches` are (images,)
    integers: the number of patches of each image. SkipSample: not even the first turn fits, or what fits has nothing to
    train on."""
    turns = split_turns(sample.messages)

    def count_tokens(num_turns: int) -> int:
        messages = _first(turns, num_turns)
        images = _count_images(messages)
        # `count_tokens` has one placeholder per image.
        return chat.count_tokens(messages) - images + int(patches[:images].sum()) // chat.merge_size**2

    def is_exact(num_turns: int) -> bool:
        messages = _first(turns, num_turns)
        return count_tokens(num_turns) <= max_seq_len and chat.cut([messages]) == [[messages]]

    # It is known that all turns together do not fit.
    if chat.format.is_fixed:  # then a further turn never makes a conversation shorter
        num_fit = bisect.bisect_right(range(1, len(turns)), max_seq_len, key=count_tokens)
    else:
        num_fit = next(filter(is_exact, range(len(turns) - 1, 0, -1)), 0)
    if not num_fit:
        detail = f"the first of {len(turns)} turns alone has more than max_seq_len={max_seq_len} tokens"
        raise SkipSample("over_length", detail)
    messages = _first(turns, num_fit)
    (text,) = chat.tokenize([messages])
    if isinstance(text, SkipSample):
        raise text
    return with_first(sample, messages), text


def with_first(sample: Sample, messages: tuple[Message, ...]) -> Sample:
    """Return the sample with only `messages`, its first ones, and the images that they show."""
    return dataclasses.replace(sample, messages=messages, images=sample.images[: _count_images(messages)])


def _first(turns: Sequence[tuple[Message, ...]], number: int) -> tuple[Message, ...]:
    return tuple(message for turn in turns[:number] for message in turn)


def _count_images(messages: Sequence[Message]) -> int:
    return sum(message.text.count(IMAGE_SLOT) for message in messages)


def _read_ahead(
    task: ShardTask, chat: ChatEncoder, boxed: set[str]
) -> Iterator[tuple[Sample, list[str], TokenizedText | SkipSample]]:
    """Yield the shard's samples, the names of their image files, and their conversations, tokenized in batches. The
    samples have their boxes in their texts; keys of those with boxes are added to `boxed`."""
    for batch in _batches(task, boxed):
        parts = batch
        if not chat.format.is_fixed:
            cut = zip(batch, chat.cut([sample.messages for sample, _ in batch]))
            parts = [(part, names) for (sample, names), conversations in cut for part in _parts(sample, conversations)]
        texts = chat.tokenize([part.messages for part, _ in parts])
        for (part, names), text in zip(parts, texts):
            yield part, names, text


def _batches(task: ShardTask, boxed: set[str]) -> Iterator[list[tuple[Sample, list[str]]]]:
    batch: list[tuple[Sample, list[str]]] = []
    size = 0
    for key, fields in iter_records(task.samples / task.shard.name, task.shard):
        names = sorted((name for name in fields if name[:1].isdigit()), key=lambda name: int(name.partition(".")[0]))
        sample = from_fields(key, fields)
        if any([message.boxes for message in sample.messages]):
            boxed.add(key)
            # Here, before anything measures or cuts the texts.
            sample = with_boxes_written(sample, task.config.boxes, task.pixels.config)
        batch.append((sample, names))
        size += sum(len(image) for image in sample.images)
        if len(batch) == _BATCH_SAMPLES or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts(sample: Sample, conversations: Sequence[Conversation]) -> list[Sample]:
    """Return the sample; if its conversation is cut, one sample for each part, with the images that the part shows."""
    if len(conversations) == 1:
        (messages,) = conversations
        return [sample if messages is sample.messages else with_first(sample, messages)]
    parts = [with_first(sample, messages) for messages in conversations]
    answers = [sum(message.role == "assistant" for message in part.messages) for part in parts]
    return [dataclasses.replace(part, key=turn_key(sample.key, n - 1)) for n, part in zip(answers, parts)]


def _count_reasoned(sample: Sample, chat: ChatEncoder) -> int:
    if not any([message.reasoning for message in sample.messages]):
        return 0
    answers = [message for message in sample.messages if message.role == "assistant"]
    return sum(bool(m.reasoning) for m, is_learnt in zip(answers, trained_answers(answers, chat.learn)) if is_learnt)


def notes_path(directory: StorePath, name: str) -> StorePath:
    """Return the path of a shard's notes, until the index and the stage's other files contain them."""
    return directory / f"{name}.notes.json"


def verify(sample: Sample, stored: TokenizedSample, chat: ChatEncoder) -> None:
    """Check, only from the stored bytes, that all images and answers are present, and that nothing else is trained on.
    An AssertionError is a bug in this code, and stops the stage."""
    stored.check()
    image_tokens = int((stored.input_ids == chat.image_token_id).sum())
    expected = int(stored.image_grid_thw.prod(-1).sum()) // chat.merge_size**2
    assert image_tokens == expected, f"{sample.key}: {image_tokens} image tokens for grids that make {expected}"
    edges = np.flatnonzero(np.diff(stored.loss_mask, prepend=0, append=0))
    trained_on = [chat.decode(stored.input_ids[start:end]) for start, end in edges.reshape(-1, 2)]
    answers = [message for message in sample.messages if message.role == "assistant"]
    chosen = [
        chat.trained_text(a) for a, is_learnt in zip(answers, trained_answers(sample.messages, chat.learn)) if is_learnt
    ]
    assert trained_on == chosen, f"{sample.key}: the mask decodes to {trained_on}, the answers to learn are {chosen}"


def _index_row(task: ShardTask, sample: Sample, tokenized: TokenizedSample, at: RecordRange) -> dict[str, object]:
    return {
        "key": sample.key,
        "subset": sample.subset,
        "split": task.shard.split,
        "shard": task.shard.name,
        "offset": at.offset,
        "size": at.size,
        "checksum": at.checksum,
        "num_tokens": len(tokenized.input_ids),
        "num_loss_tokens": int(tokenized.loss_mask[1:].sum()),  # no token predicts the first one
        "num_patches": int(tokenized.image_grid_thw.prod(-1).sum()),
        "num_images": len(tokenized.image_grid_thw),
    }


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: a worker has one core, and a small image gains little from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_encoders: dict[tuple, ChatEncoder] = {}  # at most one


def encoder_of(
    hf_dir: StorePath, digest: str, config: TokenizeConfig, model: ModelDirectory | None = None
) -> ChatEncoder:
    """Return the encoder of a processor with this digest, which is made once in each process.

    Args:
        model: the directory, if it is open; None: it is opened where this process has no encoder yet.
    """
    # By process, since a forked child must not write into the pipe of its parent's template.
    key = (os.getpid(), f"{hf_dir} {digest}", repr(config.learn), config.system_prompt)
    if key not in _encoders:
        _encoders.clear()
        _encoders[key] = ChatEncoder(model or ModelDirectory(local_dir(hf_dir)), config.learn, config.system_prompt)
    return _encoders[key]
