"""The first rows of a source, looked at before a run: the samples, everything that looks wrong, and an estimate of the
rows that are left out, the lengths, the bins and the disk. `athanor init` and `athanor plan` print it.
"""

import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Sample, file_digests
from dataset_builders.contracts.tokenized import GROUP_FRAMES
from dataset_builders.errors import InputError, printable
from dataset_builders.pictures.images import ImageLimits, read_rgb
from dataset_builders.recognise.columns import CLASSIFY, CLASSIFY_SHOWN, CLASSIFY_VIDEO
from dataset_builders.recognise.layouts import unread
from dataset_builders.recognise.recognise import Reading, Recognised, Survey, Trial, survey, try_reading
from dataset_builders.storage.store import StorePath, free_bytes, is_local
from dataset_builders.videos.decode import read_frames
from dataset_builders.videos.sampling import FramePlan, plan_frames, time_text
from flows.cli.fit import FEW_STEPS, written
from flows.cli.terminal import bytes_text
from flows.pipeline.config import PipelineConfig
from stages.convert.config import ConvertConfig, SourceReading
from stages.shared.artifacts.left_out import MIN_LOST, check_lost, reason_words
from stages.shared.chat_format.images import embedded_video_config, load_image_config, load_video_config
from stages.shared.inputs.config import EmbeddedModelConfig
from stages.shared.inputs.model_directory import opened_model
from trainer.contract.run import TrainConfig
from trainer.model.shape import ModelShape

_CHARS_PER_TOKEN = 2.0  # for a tokenizer that is still to be trained on these texts
_TURN_TOKENS = 5  # <|im_start|>, the role, two line ends, <|im_end|>
_VISION_TOKENS = 2  # one before and one after an image or a group of frames
_SLOTS = re.compile(f"{IMAGE_SLOT}|{VIDEO_SLOT}")
# Names of columns of times: of the part that is shown, or times that are asked for.
_CUTS = re.compile(r"^((video|clip)[_ ])?(start|begin|end|stop)([_ ]?(time|s|sec|secs|seconds?|timestamp|ts))?$")
_FULL = 0.97  # share of a bin's tokens that packing fills

SHOWN = 3
_CHARS = 300  # longest text that is shown
_SIDE = 36  # columns of an image on the terminal
_FEW = 5  # largest number of names in a list


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """The first rows of a source, and an estimate of what a run would make of the whole source.

    Attributes:
        trial: the trial of the recipe's builder on the first rows.
        warnings: a line for each thing that a user should check before a run.
        tokens: approximate number of tokens of each usable sample.
        too_long: number of samples that are longer than `tokenize.max_seq_len`.
        bins: approximate number of training bins of the whole source.
        disk: "samples" and "tokenized" -> bytes of the shards.
    """

    trial: Trial
    warnings: Sequence[str]
    tokens: Sequence[float]
    too_long: int
    bins: float
    disk: Mapping[str, float]


def plan_rows(config: PipelineConfig, reading: SourceReading, source: StorePath, model: object) -> RowsPlan:
    """Read the first rows of a source of the recipe.

    Args:
        model: the external model; None means the embedded model, whose tokenizer is trained on these rows.

    Raises:
        InputError: the builder refuses the source, or all its rows were read and a run would refuse them.
    """
    convert = config.convert
    found, options = survey(source), str(reading.options)
    unused = [name for like in found.readings if like.builder == reading.builder for name in like.unused]
    tried = Reading(
        builder=reading.builder,
        options=reading.options,
        subsets=reading.subsets,
        heldout_files=reading.heldout_files,
        why="",
        unused=tuple(name for name in dict.fromkeys(unused) if not re.search(rf"\b{re.escape(name)}\b", options)),
    )
    limits = ImageLimits(max_pixels=convert.max_image_pixels, min_side=convert.min_image_side)
    trial = try_reading(source, tried, limits=limits)
    if trial.refused:
        raise InputError(trial.refused)
    if not trial.rows:
        raise InputError(f"the files below {source} hold no rows; give a source with some")
    _check(config, trial, source)
    if model is not None:
        check_images(trial, opened_model(model).shape, config.model, config.tokenize.max_skip_fraction)
    videos = _frames_read(config, trial, model)
    tokens = _lengths(config, trial.samples, trial.sizes, videos, model)
    kept = [number for number in tokens if number <= config.tokenize.max_seq_len]
    share = trial.rows / trial.tried
    train = 1 - (trial.heldout / trial.rows if trial.splits else convert.heldout_fraction)
    size = sum(len(file) for sample in trial.samples for file in sample.files) * share
    area = sum(_areas(config, trial.sizes, model))
    area += sum(GROUP_FRAMES * len(video.times) * video.height * video.width for video in videos)
    stored = size if config.tokenize.codec == "original" else 3 * area * share
    bins = sum(kept) * share * train / (config.plan_bins.seq_len * _FULL)
    warnings = [*anomalies(source, found, trial, convert), *_few_steps(config, bins)]
    disk = {"samples": size, "tokenized": stored}
    return RowsPlan(trial, warnings, tokens, len(tokens) - len(kept), bins, disk)


def rows_table(plan: RowsPlan, config: PipelineConfig, root: StorePath) -> list[tuple[str, str]]:
    """Return the (name, value) pairs of the table about the rows."""
    trial, samples = plan.trial, plan.trial.samples
    images = sum(len(sample.images) for sample in samples)
    rows = [("rows", f"{trial.rows:,}, of which {trial.tried:,} were read")]
    left_out = f"; left out: {reason_words(trial.reasons)}" if trial.reasons else ""
    rows.append(("usable", f"{len(samples):,}{left_out}"))
    rows += [(f"  {reason}", trial.details[reason]) for reason in trial.reasons]
    convert, usable = config.convert, trial.rows * trial.usable
    heldout = f"{trial.heldout:,} rows, by the names of their files, folders or splits"
    if not trial.splits:
        number = max(min(convert.min_heldout, usable // 2), convert.heldout_fraction * usable)
        share = f"convert.heldout_fraction={convert.heldout_fraction:g}"
        heldout = f"about {number:,.0f} rows, those of {share} of the images"
    rows.append(("held out", heldout))
    if samples:
        mean, longest = sum(plan.tokens) / len(plan.tokens), max(plan.tokens)
        rows.append(("images", f"{images / len(samples):.2g} a sample"))
        if trial.videos:
            rows.append(("videos", f"{len(trial.videos) / len(samples):.2g} a sample; {videos_words(trial)}"))
        rows.append(("tokens", f"about {mean:,.0f} a sample, {longest:,.0f} the longest"))
    if plan.too_long:
        cut = f"tokenize.max_seq_len={config.tokenize.max_seq_len}"
        rows.append(("too long", f"{plan.too_long} samples are longer than {cut} and would be left out"))
    rows.append(
        ("train bins", f"about {max(1, round(plan.bins)):,} of {config.plan_bins.seq_len:,} tokens to train on")
    )
    if len(config.sources) == 1:
        train, steps = config.train, _steps(config.train, plan.bins)
        counted = f"{steps:,} step{'s' if steps > 1 else ''}"
        epochs = f"{counted} are about {steps * train.global_batch_size / max(1.0, plan.bins):.2g} epochs"
        of_epochs = train.num_epochs is not None
        rows.append(("length", f"{train.num_epochs:g} epochs are about {counted}" if of_epochs else epochs))
    need = sum(plan.disk.values())
    disk = f"about {bytes_text(need)} ({', '.join(f'{name} {bytes_text(value)}' for name, value in plan.disk.items())})"
    if is_local(root):
        free = free_bytes(Path(root))
        disk += f"; {bytes_text(free)} are free{'' if need < free else ': TOO LITTLE'}"
    return [*rows, ("disk", disk)]


def summary(found: Recognised, trial: Trial) -> Iterator[str]:
    """Yield the lines that say what was recognised, and why."""
    reading = trial.reading
    options = ", ".join(f"{name}={value!r}" for name, value in reading.options.items())
    yield f"Recognised: builder {reading.builder}{f' with {options}' if options else ''}"
    yield f"  because {reading.why}"
    subsets = ", ".join(f"{name} ({rows:,})" for name, rows in trial.subsets.most_common(_FEW))
    more = f" and {len(trial.subsets) - _FEW} more" if len(trial.subsets) > _FEW else ""
    yield f"  {trial.rows:,} rows in {_counted(len(trial.subsets), 'subset')}: {subsets}{more}"
    if trial.heldout:
        yield f"  {trial.heldout:,} of these rows are held out by the names of their files, folders or splits"
    yield f"  {len(trial.samples):,} of the {trial.tried:,} rows that were read can be used"
    if trial.videos:
        yield f"  {_counted(len(trial.videos), 'video')} in the samples that were read: {videos_words(trial)}"
    places = [[place for m in sample.messages for place in m.boxes] for sample in trial.samples]
    if any(places):
        boxes = [box for own in places for place in own for box in place.boxes]
        labels = Counter(box.label for box in boxes if box.label)
        named = f" ({', '.join(label for label, _ in labels.most_common(_FEW))})" if labels else ""
        of_labels = f" of {_counted(len(labels), 'label')}{named}"
        yield f"  {_counted(len(boxes), 'box')}{of_labels} in {_counted(sum(map(bool, places)), 'sample')}"
    others = [other.reading for other in found.trials if other is not trial and other.samples]
    for other in others:
        yield f"  it could also be {other.builder}: {other.why}"


def videos_words(trial: Trial) -> str:
    """Return the lengths and sizes of a trial's videos, and what is not read of them, in words."""
    seconds = [video.times[-1] - video.times[0] for video in trial.videos]
    sides = [f"{video.width} x {video.height}" for video in trial.videos]
    words = f"{min(seconds):.1f} to {max(seconds):.1f} s, up to {max(len(v.times) for v in trial.videos):,} frames, "
    words += f"{Counter(sides).most_common(1)[0][0]} px{' and others' if len(set(sides)) > 1 else ''}"
    sound = sum(video.has_audio for video in trial.videos)
    return words + (f"; the sound of {sound:,} is not read" if sound else "")


def sample_lines(sample: Sample, is_terminal: bool) -> Iterator[str]:
    """Yield the lines of a sample: its images, if the terminal has colours, and its texts, which are printable. Of a
    video, the first frame is drawn."""
    named = [(sample.images, "image"), (sample.videos, "video")]
    named = [_counted(len(files), noun) for files, noun in named if files]
    yield f"{sample.key}: {', '.join(named) or 'no image'}"
    if is_terminal:
        for data in sample.images[:2]:
            yield from _blocks(read_rgb(data))
        for video in sample.videos[: 2 - len(sample.images[:2])]:
            yield from _blocks(read_frames(video, [0])[0])
    for message in written(sample).messages:
        text = _SLOTS.sub(r"\g<0> ", message.text)
        text = printable(" ".join(text.split()))
        yield f"  {message.role}: {text if len(text) <= _CHARS else text[:_CHARS] + ' ...'}"


def anomalies(source: StorePath, found: Survey, trial: Trial, convert: ConvertConfig) -> Iterator[str]:
    """Yield one line for each thing that a user should check before a run."""
    limit = convert.max_skip_fraction
    for reason, number in trial.reasons.most_common():
        yield f"{number} of {trial.tried} rows are left out as {reason}; the first: {trial.details[reason]}"
    lost = trial.tried - len(trial.samples)
    if lost > limit * trial.tried and lost >= MIN_LOST:
        yield (
            f"{lost} of {trial.tried} rows cannot be used, and a run stops above convert.max_skip_fraction={limit}; "
            "mend the data, or raise the limit in the recipe"
        )
    if trial.duplicates:
        yield f"{trial.duplicates} of {len(trial.samples)} samples repeat one before them, and will be left out"
    if convert.min_heldout < ConvertConfig.model_fields["min_heldout"].default and not trial.splits:
        yield f"convert.min_heldout={convert.min_heldout}: scores of so few held-out samples say little; add rows"
    if trial.reading.unused:
        what = "columns" if trial.reading.builder == "table" else "fields"
        yield f"{what} that are not used: {', '.join(trial.reading.unused)}"
    cuts = [name for name in trial.reading.unused if _CUTS.search(name.lower())]
    if cuts and any(sample.videos for sample in trial.samples):
        way_out = {
            "table": "set options.video_start and video_end",
            "webdataset_tars": "give the parts as files of their own",
        }.get(trial.reading.builder, 'write each video as {"path": ..., "start": ..., "end": ...}')
        yield f"whole videos are shown: if {' and '.join(map(repr, cuts))} cut them, {way_out}"
    if trial.reading.builder == "image_folder" and (clips := _folders_of_frames(found.images)):
        frames = '{"frames": [...], "fps": ...}'
        yield (
            f"{_counted(len(clips), 'folder')} of numbered images, as {clips[0]}: each image is a sample of its own; "
            f"if they are frames of videos, write a row for each folder with its video as {frames}"
        )
    if trial.not_read:
        yield f"not read within the rows: {', '.join(f'{number:,} {what}' for what, number in trial.not_read.items())}"
    if trial.turned:
        boxes_of = trial.reading.options.get("boxes_of") or "shown, unless a size beside them says otherwise"
        yield f"EXIF turns images of {trial.turned} samples with boxes, which are taken as of the image as {boxes_of}"
    yield from found.problems
    yield from unread(source, found.others)
    used = sum(len(sample.files) for sample in trial.samples)
    if found.images and not used:
        yield f"no row uses one of the {len(found.images):,} image or video files, for example {found.images[0]}"
    if found.others:
        names = ", ".join(found.others[:_FEW]) + (" ..." if len(found.others) > _FEW else "")
        yield f"files that are not read: {names}"
    answers = Counter(written(sample).messages[-1].text for sample in trial.samples)
    is_class = str(trial.reading.options.get("question")).endswith((CLASSIFY, CLASSIFY_SHOWN, CLASSIFY_VIDEO))
    if is_class and all(text.isdigit() for text in answers):
        yield "the answers are the numbers of classes; write the names in their place, or the model learns numbers"
    text, times = answers.most_common(1)[0]
    if len(trial.samples) >= 10 and times > 0.9 * len(trial.samples):
        yield f"{times} of {len(trial.samples)} answers are {text[:60]!r}: there is little to learn"


def is_colourful() -> bool:
    """Whether output goes to a terminal that is wide enough for an image."""
    return sys.stdout.isatty() and shutil.get_terminal_size().columns >= 2 * _SIDE


def _folders_of_frames(names: Sequence[str]) -> list[str]:
    """Return the folders within folders, class/clip, whose images are numbered without a gap, as frames are, if most
    images are in such folders."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if "/" in folder and (number := re.fullmatch(r"\D*(\d+)\.\w+", file)):
            numbers.setdefault(folder, []).append(int(number[1]))
    clips = {folder: own for folder, own in numbers.items() if len(own) > 3 and max(own) - min(own) == len({*own}) - 1}
    return list(clips) if sum(map(len, clips.values())) > len(names) / 2 else []


def check_images(trial: Trial, shape: ModelShape, model: object, limit: float) -> None:
    """Check that a model without a vision encoder gets no images.

    Args:
        model: the model's name, for the message.
        limit: the recipe's tokenize.max_skip_fraction: the share of samples that may be left out.

    Raises:
        InputError: more of the samples have images.
    """
    shown, samples = sum(bool(sample.files) for sample in trial.samples), len(trial.samples)
    if shape.images is not None or (shown < samples and (shown < MIN_LOST or shown <= limit * samples)):
        return
    raise InputError(
        f"{shown} of {samples} samples have images or videos, and {model} reads only text, so they would be left out; "
        "give a model that reads images, as Qwen/Qwen3-VL-2B-Instruct, or data without images"
    )


def check_apart(trial: Trial, data: str) -> None:
    """Raise InputError if samples could not be both trained on and held out: there is one, or all share pictures.

    Only checked if all rows were read, and the source does not say which rows are held out.
    """
    if trial.tried < trial.rows or trial.splits or not trial.samples:
        return
    groups: list[set[object]] = []  # digests of pictures of samples that stay together
    for sample in trial.samples:
        own = {*file_digests(sample)} or {sample.digest()}
        groups = [group for group in groups if not group & own] + [own.union(*(g for g in groups if g & own))]
    if len(groups) == 1:
        raise InputError(
            f"{data}: its {len(trial.samples)} usable rows are one sample, or share pictures and so stay together; "
            "none can be held out beside others to train on, so add rows with other pictures"
        )


def _check(config: PipelineConfig, trial: Trial, source: StorePath) -> None:
    """Raise InputError if a run would refuse the source. Only checked if all its rows were read."""
    if trial.tried < trial.rows:
        return
    limit = ("convert.max_skip_fraction", config.convert.max_skip_fraction)
    first = next(iter(trial.details.values()), "")
    check_lost(trial.reasons, trial.tried, limit, source, f"a run's quarantine.jsonl; the first is {first}")
    if not config.convert.heldout_fraction and not trial.splits and len(config.sources) == 1:
        raise InputError(
            f"convert.heldout_fraction=0 leaves nothing of {source} to evaluate on; try convert.heldout_fraction=0.1"
        )
    if len(config.sources) == 1:
        check_apart(trial, str(source))
    least, distinct = config.convert.min_heldout, len(trial.samples) - trial.duplicates
    if config.convert.heldout_fraction and not trial.splits and len(config.sources) == 1 and distinct < 2 * least:
        raise InputError(
            f"convert.min_heldout={least}: of {distinct} usable samples only {distinct // 2} can be held out if as "
            "many are to be trained on; add data, or lower convert.min_heldout"
        )


def _frames_read(config: PipelineConfig, trial: Trial, model: object) -> list[FramePlan]:
    """Return the frames that are read of each video of the samples, from the times and sizes in their containers."""
    settings = config.tokenize.videos
    if isinstance(config.model, EmbeddedModelConfig):
        found = embedded_video_config(config.model, settings)
    else:
        found = load_video_config(opened_model(model), settings)
    if found is None or not trial.videos:
        return []
    are_lists = [bool(video.frames) for sample in trial.samples for video in sample.videos]
    return [
        plan_frames(facts.times, facts.height, facts.width, found, is_chosen=is_list)
        for facts, is_list in zip(trial.videos, are_lists)
    ]


def _lengths(
    config: PipelineConfig,
    samples: Sequence[Sample],
    sizes: Sequence[tuple[int, int]],
    videos: Sequence[FramePlan],
    model: object,
) -> list[float]:
    """Return the tokens of each sample: of its texts by the model's tokenizer, of its images by their area, of its
    videos by their groups, and the tokens that the chat template adds to each message and image."""
    texts = [[m.reasoning + _SLOTS.sub("", m.text) for m in sample.messages] for sample in map(written, samples)]
    clips = iter(videos)
    shown = [[clip for _, clip in zip(sample.videos, clips)] for sample in samples]
    times = [[time_text(time) for clip in of for time in clip.times] for of in shown]
    file = None if model is None else opened_model(model).path / "tokenizer.json"
    if file is not None and file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
        counts = [sum(len(one.ids) for one in tokenizer.encode_batch(own + of)) for own, of in zip(texts, times)]
    else:  # it is trained on the texts alone, so each character of a time is a token
        counts = [sum(map(len, own)) / _CHARS_PER_TOKEN + sum(map(len, of)) for own, of in zip(texts, times)]
    areas, factor = iter(_areas(config, sizes, model)), _pixel_limits(config, model)[2]
    return [
        count
        + _TURN_TOKENS * len(sample.messages)
        + sum(next(areas) / factor**2 + _VISION_TOKENS for _ in sample.images)
        # Around a video, too, are the vision tokens of the template.
        + sum(_VISION_TOKENS + len(clip.times) * (clip.height * clip.width / factor**2 + _VISION_TOKENS) for clip in of)
        for count, sample, of in zip(counts, samples, shown)
    ]


def _areas(config: PipelineConfig, sizes: Sequence[tuple[int, int]], model: object) -> list[float]:
    """Return the number of pixels of each image after scaling."""
    low, high, _ = _pixel_limits(config, model)
    return [min(high, max(low, width * height)) for width, height in sizes]


def _pixel_limits(config: PipelineConfig, model: object) -> tuple[int, int, int]:
    """Return the least and largest area of a scaled image, in pixels, and the side of the square of one token."""
    low, high = config.tokenize.min_pixels, config.tokenize.max_pixels
    if isinstance(config.model, EmbeddedModelConfig):
        merge = config.model.shape.vision.spatial_merge_size if config.model.shape.vision else 1
        return low or config.model.min_pixels, high or config.model.max_pixels, config.model.patch_size * merge
    found = load_image_config(opened_model(model), low, high)
    return found.min_pixels, found.max_pixels, found.factor


def _steps(train: TrainConfig, bins: float) -> int:
    return train.num_steps or max(1, math.ceil(train.num_epochs * max(1, round(bins)) / train.global_batch_size))


def _few_steps(config: PipelineConfig, bins: float) -> Iterator[str]:
    """Yield a line if the epochs of a recipe with one source are too few steps to learn anything."""
    train, steps = config.train, _steps(config.train, bins)
    if train.num_epochs is not None and steps < FEW_STEPS and len(config.sources) == 1:
        epochs = math.ceil(FEW_STEPS * train.global_batch_size / max(1, round(bins)))
        yield (
            f"train.num_epochs={train.num_epochs:g} are about {steps} steps of global_batch_size="
            f"{train.global_batch_size} bins, too few to learn from; add --set train.num_epochs={epochs}, or rows"
        )


def _blocks(pixels: np.ndarray) -> Iterator[str]:
    """Yield (h, w, 3) uint8 as lines of half blocks in 24-bit colour (ECMA-48, SGR 38 and 48), two pixels per
    character."""
    scale = _SIDE / max(pixels.shape[:2])
    rows, columns = (max(2, round(side * scale)) for side in pixels.shape[:2])
    rows -= rows % 2
    small = pixels[np.arange(rows) * pixels.shape[0] // rows][:, np.arange(columns) * pixels.shape[1] // columns]
    for upper, lower in zip(small[::2], small[1::2]):
        yield "  " + "".join(f"{_colour(38, a)}{_colour(48, b)}\u2580" for a, b in zip(upper, lower)) + "\x1b[0m"


def _colour(ground: int, rgb: np.ndarray) -> str:
    return f"\x1b[{ground};2;{rgb[0]};{rgb[1]};{rgb[2]}m"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('x') else 's'}"
