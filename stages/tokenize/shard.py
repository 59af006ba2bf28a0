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
from dataset_builders.contracts.sample import (
    IMAGE_SLOT,
    VIDEO_SLOT,
    Message,
    Sample,
    SkipSample,
    from_fields,
    named_files,
    turn_key,
    video_records,
    whole_key,
)
from dataset_builders.contracts.shard_io import RecordRange, ShardWriter, finished_shard, iter_records
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import PixelStore, TokenizedSample
from dataset_builders.pictures.images import read_rgb
from dataset_builders.pictures.pixels import count_patches, encode_frames, encode_rgb, image_grid
from dataset_builders.records.pixel_codecs import decode_sample, encode_sample
from dataset_builders.storage.files import read_sealed, write_sealed
from dataset_builders.storage.store import StorePath, local_dir
from dataset_builders.videos.decode import iter_frames
from dataset_builders.videos.sampling import FramePlan, VideoConfig
from stages.shared.artifacts.left_out import LeftOut, count_reasons
from stages.shared.chat_format.boxes import with_boxes_written
from stages.shared.chat_format.chat import ChatEncoder, TokenizedText, split_turns, trained_answers
from stages.shared.chat_format.images import plans_of
from stages.shared.chat_format.reasoning import Conversation
from stages.shared.chat_format.text import slots_of
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
    videos: VideoConfig | None  # the settings of the frames of videos; None: the model reads none
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
    num_videos: int = 0  # in the kept samples
    num_checked: int  # samples that were compared with transformers
    pixels_against: str  # the reference that their pixels were compared with


def tokenize_shard(task: ShardTask) -> None:
    """Write the tokenized shard and, just before its commit, its notes; do nothing if both exist."""
    notes_file = notes_path(task.directory, task.shard.name)
    if finished_shard(task.directory, task.shard.name) is not None and read_sealed(notes_file) is not None:
        return
    config = task.config
    chat = encoder_of(task.hf_dir, task.processor_digest, config)
    reference = ProcessorCheck(task.pixels.config, chat, task.videos)
    rows: list[dict[str, object]] = []
    left_out: list[LeftOut] = []
    shortened: list[Shortened] = []
    parts: Counter[str] = Counter()  # number of samples of each cut conversation
    num_reasoned = num_videos = 0
    boxed: set[str] = set()  # keys of conversations with boxes
    with _one_thread(), ShardWriter(task.directory, task.shard.name) as writer:
        for sample, text in _read_ahead(task, chat, boxed):
            if (whole := whole_key(sample.key)) != sample.key:
                parts[whole] += 1
            try:
                kept, tokenized, plans = tokenize_sample(sample, text, chat, task.pixels, config, task.videos)
            except SkipSample as skip:
                left_out.append(LeftOut(sample.key, skip.reason, skip.detail))
                continue
            if len(kept.messages) < len(sample.messages):
                turns = (len(split_turns(s.messages)) for s in (kept, sample))
                shortened.append(Shortened(sample.key, *turns))
            record = encode_sample(tokenized, task.pixels.codec, *_originals(task, kept, plans))
            if len(rows) % _CHECK_EVERY == 0:
                stored = decode_sample(sample.key, record, task.pixels)
                verify(kept, stored, chat)
                reference.check(kept, stored, plans)
            num_reasoned += _count_reasoned(kept, chat)
            num_videos += len(kept.videos)
            rows.append(_index_row(task, kept, tokenized, writer.write(sample.key, record)))
        notes = ShardNotes(
            rows=rows,
            left_out=left_out,
            shortened=shortened,
            num_cut=len(parts),
            num_parts=parts.total(),
            num_reasoned=num_reasoned,
            num_boxed=len(boxed),
            num_videos=num_videos,
            num_checked=-(-len(rows) // _CHECK_EVERY),
            pixels_against=reference.pixels_against,
        )
        write_sealed(notes_file, notes.model_dump_json())
        writer.commit(task.shard.split, count_reasons(left_out))


def tokenize_sample(
    sample: Sample,
    text: TokenizedText | SkipSample,
    chat: ChatEncoder,
    pixels: PixelStore,
    config: TokenizeConfig,
    videos: VideoConfig | None = None,
) -> tuple[Sample, TokenizedSample, list[FramePlan]]:
    """Return the sample without the turns that do not fit, its tokenized form, and the frames of each video; SkipSample
    if it cannot be used.

    With codec original, the tokenized sample has no patches, because the record has the files.
    """
    if isinstance(text, SkipSample):
        raise text
    # From the images' headers and the videos' times, so that nothing is decoded for a sample or a turn that is left out
    patches = np.array([count_patches(image, pixels.config) for image in sample.images], np.int64)
    plans = plans_of(sample.videos, videos, chat.model)
    input_ids, loss_mask = chat.splice(text, patches, plans)
    if len(input_ids) > config.max_seq_len:
        if config.over_length == "skip" or whole_key(sample.key) != sample.key:  # an earlier part has the earlier turns
            raise SkipSample("over_length", f"{len(input_ids)} tokens, max_seq_len is {config.max_seq_len}")
        sample, text = drop_turns(sample, patches, plans, chat, config.max_seq_len)
        patches, plans = patches[: len(sample.images)], plans[: len(sample.videos)]
        input_ids, loss_mask = chat.splice(text, patches, plans)
        assert len(input_ids) <= config.max_seq_len, sample.key
    none = np.zeros((0, pixels.config.patch_format.patch_bytes), np.uint8)
    blocks, later_blocks, grids, is_video = [none], [none], [], []
    images, clips = iter(sample.images), iter(zip(sample.videos, plans, strict=True))
    # With codec original all is decoded too, so that no stored file fails in training; its patches are computed when
    # the record is read.
    is_stored = pixels.codec != "original"
    for slot in slots_of(sample.messages):
        if slot == IMAGE_SLOT:
            rgb = read_rgb(next(images), whole=True)
            if is_stored:
                block, grid = encode_rgb(rgb, pixels.config)
                blocks.append(block)
            else:
                grid = image_grid(*rgb.shape[:2], pixels.config)
            grids.append(grid)
            is_video.append(False)
        else:
            video, plan = next(clips)
            frames = iter_frames(video, plan.indices, plan.seconds)
            for first, later in encode_frames(frames, plan.height, plan.width, pixels.config.patch_format):
                blocks += [first] * is_stored
                later_blocks += [later] * is_stored
            grids += [*plan.grids]
            is_video += [True] * len(plan.grids)
    grids, is_video = np.array(grids, np.int32).reshape(-1, 3), np.array(is_video, bool)
    assert grids[~is_video].prod(-1).tolist() == patches.tolist(), f"{sample.key}: the headers promise other sizes"
    tokenized = TokenizedSample(
        key=sample.key,
        input_ids=input_ids,
        loss_mask=loss_mask,
        image_grid_thw=grids,
        is_video=is_video,
        patches=blocks[1] if len(blocks) == 2 else np.concatenate(blocks),  # one image, the common case, is not copied
        later_patches=np.concatenate(later_blocks),
    )
    return sample, tokenized, plans


def _originals(
    task: ShardTask, sample: Sample, plans: Sequence[FramePlan]
) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Return what `encode_sample` takes for codec original: the sample's files, and the record of each video."""
    if task.pixels.codec != "original":
        return {}, []
    files = named_files(sample)
    videos = video_records(sample, [{"name": name} for name in files])
    return files, [video | {"indices": plan.indices} for video, plan in zip(videos, plans, strict=True)]


def drop_turns(
    sample: Sample, patches: np.ndarray, plans: Sequence[FramePlan], chat: ChatEncoder, max_seq_len: int
) -> tuple[Sample, TokenizedText]:
    """Return the sample with as many of its first turns as fit, and its tokenized conversation. `patches` are (images,)
    integers: the number of patches of each image; `plans` are the frames of each video. SkipSample: not even the first
    turn fits, or what fits has nothing to train on."""
    turns = split_turns(sample.messages)
    of_videos = [chat.count_video_tokens(plan) for plan in plans]

    def count_tokens(num_turns: int) -> int:
        messages = _first(turns, num_turns)
        slots = slots_of(messages)
        images, videos = slots.count(IMAGE_SLOT), slots.count(VIDEO_SLOT)
        inserted = int(patches[:images].sum()) // chat.merge_size**2 + sum(of_videos[:videos])
        return chat.count_tokens(messages) - len(slots) + inserted  # it has one placeholder per image or video

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
    """Return the sample with only `messages`, its first ones, and the images and videos that they show."""
    slots = slots_of(messages)
    images, videos = sample.images[: slots.count(IMAGE_SLOT)], sample.videos[: slots.count(VIDEO_SLOT)]
    return dataclasses.replace(sample, messages=messages, images=images, videos=videos)


def _first(turns: Sequence[tuple[Message, ...]], number: int) -> tuple[Message, ...]:
    return tuple(message for turn in turns[:number] for message in turn)


def _read_ahead(
    task: ShardTask, chat: ChatEncoder, boxed: set[str]
) -> Iterator[tuple[Sample, TokenizedText | SkipSample]]:
    """Yield the shard's samples and their conversations, tokenized in batches. The samples have their boxes in their
    texts; keys of those with boxes are added to `boxed`."""
    for batch in _batches(task, boxed):
        parts = batch
        if not chat.format.is_fixed:
            cut = zip(batch, chat.cut([sample.messages for sample in batch]))
            parts = [part for sample, conversations in cut for part in _parts(sample, conversations)]
        yield from zip(parts, chat.tokenize([part.messages for part in parts]))


def _batches(task: ShardTask, boxed: set[str]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    size = 0
    for key, fields in iter_records(task.samples / task.shard.name, task.shard):
        sample = from_fields(key, fields)
        if any([message.boxes for message in sample.messages]):
            boxed.add(key)
            # Here, before anything measures or cuts the texts.
            sample = with_boxes_written(sample, task.config.boxes, task.pixels.config)
        batch.append(sample)
        size += sum(map(len, sample.files))
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
    kinds = {"image": (chat.image_token_id, ~stored.is_video), "video": (chat.video_token_id, stored.is_video)}
    for kind, (token, rows) in kinds.items():
        tokens = int((stored.input_ids == token).sum())
        expected = int(stored.image_grid_thw[rows].prod(-1).sum()) // chat.merge_size**2
        assert tokens == expected, f"{sample.key}: {tokens} {kind} tokens for grids that make {expected}"
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
