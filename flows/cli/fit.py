"""The choice of a new recipe's settings, from the trial of the data, the model and the memory of the GPU, and the
search for settings that fit a training into that memory, by the estimate of `athanor plan`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Sample
from dataset_builders.errors import InputError
from dataset_builders.recognise.recognise import Trial
from dataset_builders.videos.decode import VideoFacts
from stages.shared.chat_format.boxes import with_boxes_written
from stages.shared.chat_format.config import BoxFormat
from stages.shared.inputs.config import EmbeddedModelConfig
from stages.shared.inputs.model_directory import ModelDirectory, resolve_hf_dir
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.model.adapters import adapter_sizes
from trainer.model.family import Family
from trainer.model.registry import get_family, get_variant
from trainer.model.shape import ModelShape
from trainer.plan.estimate import estimate_memory

# Published models whose sizes are known without a download: hub name -> `model.variant` of the same sizes.
_HUB = {
    **{f"Qwen/Qwen3-VL-{size}-Instruct": f"qwen3_vl_{size.lower()}" for size in ("2B", "4B", "8B", "32B")},
    **{f"Qwen/Qwen3.5-{size}": f"qwen3_5_{size.lower()}" for size in ("2B", "4B", "9B", "27B")},
}
_DEFAULTS = tuple(f"Qwen/Qwen3-VL-{size}-Instruct" for size in ("8B", "4B", "2B"))
_TOKEN_SIDE = 32  # pixels
_IMAGE_TOKEN = _TOKEN_SIDE**2
_BOX_CHARS_PER_TOKEN = 1.5  # of coordinates: Qwen's tokenizers have a token for each digit
_MAX_PIXELS = 1_048_576
_TINY_PIXELS = 65_536  # for the model of random weights, which trains on a CPU
_VIDEO_FPS = 2.0  # of Qwen's models
_MOST_FRAMES, _FRAME_PIXELS = 64, 200_704  # of a video: 32 groups of at most 196 tokens
_TINY_FRAMES, _TINY_FRAME_PIXELS = 16, 16_384
_GROUP_TEXT = 10  # tokens of the time and the marks of a group of two frames
_TINY_BINS = (1024, 2048, 4096, 8192)
_TINY_STEPS = 500  # half a minute, since the tiny model serves only to try the whole pipeline
_STEP_TOKENS = 65_536  # tokens between two updates if there is enough data
_MOST_EPOCHS = 200
FEW_STEPS = 20  # a training of fewer steps learns little
_MOST_PIXEL_BYTES = 100e9  # with more bytes of scaled pixels, the image files are kept instead

PATCHES = 4  # patches of one image token
# Share of a GPU's memory that a training may take. The rest is for CUDA itself and for the error of the estimate.
USABLE = 0.92
ROOMY = 4096
_BINS = (8192, 6144, 4096, 3072, 2048)  # tokens; larger bins train faster and come first
_LORA: Mapping[str, Any] = {"rank": 16, "alpha": 32}
_RECOMPUTE: Mapping[str, Any] = {"recompute": "full", "recompute_vision": True}
# Learning rates for full fine-tuning are those of Qwen's own recipes (QwenLM/Qwen3-VL, qwen-vl-finetune). Adapters take
# ten times that (Schulman et al. 2025, "LoRA Without Regret").
FULL_RATES = {"lr": "1.0e-5", "vision": "2.0e-6"}
LORA_RATE = "1.0e-4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Settings of a training that fit a GPU.

    Attributes:
        adapter: value of `train.adapter`; None trains the whole model.
        parallel: fields of `execution.parallel` that differ from their defaults.
        seq_len: tokens of a bin.
        memory: estimated bytes.
        words: a description of the choice for the user.
    """

    adapter: Mapping[str, Any] | None
    parallel: Mapping[str, Any]
    seq_len: int
    memory: int
    words: str

    @property
    def is_plain(self) -> bool:
        """Whether no activation is recomputed, and no weight is stored in float8."""
        return not self.parallel and (self.adapter is None or "base" not in self.adapter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The settings of a recipe that depend on the data and the machine.

    Attributes:
        model: directory or hub name of a model; None means the tiny model of random weights.
        shape: the sizes of `model`; None if it is None.
        fit: adapters and layout; None on a CPU.
        is_tiny: whether the training is on a CPU, in float32 and with small shards.
        seq_len: tokens of a bin.
        max_pixels: largest area to which an image is scaled, in pixels.
        videos: value of `tokenize.videos`; empty if the data have none.
        codec: "u8" if the scaled pixels of all images take little space, else "original".
        epochs, batch: passes over the data, and bins between two updates.
        max_new_tokens: largest number of tokens of an answer.
        metrics: metrics of all subsets, the headline metric first; if empty, the default metrics of each subset.
        words: a description of the model and its settings for the user.
    """

    model: str | None
    shape: ModelShape | None
    fit: Fit | None
    is_tiny: bool
    seq_len: int
    max_pixels: int
    videos: Mapping[str, float]
    codec: str
    epochs: int
    batch: int
    max_new_tokens: int
    metrics: tuple[str, ...]
    words: str


def choose(trial: Trial, model: str | None, gpu_memory: float | None) -> Choice:
    """Choose the settings of a recipe.

    Args:
        model: `--model`; None chooses a model that fits, or the tiny model if there is no GPU.
        gpu_memory: memory of the GPU in GB; None means that the training is on a CPU.

    Raises:
        InputError: `model` is not a model, or it does not fit the memory.
    """
    if gpu_memory is None:
        return _on_cpu(trial, model)
    pixels = _pixels(trial, _MAX_PIXELS)
    videos = _videos(trial, _MOST_FRAMES, _FRAME_PIXELS)
    longest, room = _longest(trial, pixels, videos, 3.0), check_memory(gpu_memory)
    name, family, shape = _model(model, lambda f, s: _is_roomy(f, s, room, longest))
    fit = fit_model(family, shape, room, longest)
    if fit is None:
        raise InputError(
            f"{name} does not fit {gpu_memory:g} GB: adapters beside a base in float8, computed again, take "
            f"{smallest(family, shape, longest) / 1e9:.0f} GB in bins of {bin_sizes(longest)[-1]:,} tokens; take a "
            "smaller model or more memory"
        )
    bins = max(1, round(_tokens(trial, pixels, videos, 3.0) * trial.rows / fit.seq_len))
    return Choice(
        model=name,
        shape=shape,
        fit=fit,
        is_tiny=False,
        seq_len=fit.seq_len,
        max_pixels=pixels,
        videos=videos,
        codec=_codec(trial, pixels, videos),
        epochs=_epochs(trial, bins),
        batch=max(1, min(_STEP_TOKENS // fit.seq_len, bins // 20)),
        max_new_tokens=_new_tokens(trial, 3.0),
        metrics=_metrics(trial),
        words=f"{name}, {fit.words}: {fit.memory / 1e9:.1f} GB of {gpu_memory:g} GB by estimate",
    )


def _on_cpu(trial: Trial, model: str | None) -> Choice:
    pixels = _pixels(trial, _TINY_PIXELS)
    videos = _videos(trial, _TINY_FRAMES, _TINY_FRAME_PIXELS)
    longest = _longest(trial, pixels, videos, 1.5)
    seq_len = next((size for size in _TINY_BINS if size >= longest), -(-longest // 1024) * 1024)
    bins = max(1.0, 0.85 * _tokens(trial, pixels, videos, 2.0) * trial.rows / seq_len)
    epochs = max(1, min(_MOST_EPOCHS, round(_TINY_STEPS / bins)))
    shape = None
    if model is not None:
        (model, _, shape), epochs = _model(model, lambda *_: True), _epochs(trial, bins)
    return Choice(
        model=model,
        shape=shape,
        fit=None,
        is_tiny=True,
        seq_len=seq_len,
        max_pixels=pixels,
        videos=videos,
        codec=_codec(trial, pixels, videos),
        epochs=epochs,
        batch=1,
        max_new_tokens=_new_tokens(trial, 1.5),
        metrics=_metrics(trial),
        words="the tiny model of random weights" if model is None else f"{model} in float32 on the CPU",
    )


def _model(name: str | None, is_roomy: Callable[[Family, ModelShape], bool]) -> tuple[str, Family, ModelShape]:
    """Return the named model, or the largest default model that is roomy; the smallest if none is.

    Args:
        is_roomy: whether a model of a family and shape fits in bins of enough tokens, without recomputation or float8.
    """
    if name is None:
        sizes = [(hub, *_variant(_HUB[hub])) for hub in _DEFAULTS]
        return next((found for found in sizes if is_roomy(*found[1:])), sizes[-1])
    if name in _HUB and not Path(name).exists():
        return name, *_variant(_HUB[name])
    model = ModelDirectory(resolve_hf_dir(name, "--model"))
    return str(model.path) if Path(name).expanduser().is_dir() else name, model.family, model.shape


def _variant(name: str) -> tuple[Family, ModelShape]:
    model_type, _ = get_variant(name)
    return get_family(model_type), EmbeddedModelConfig(variant=name, seed=0).shape


def _is_roomy(family: Family, shape: ModelShape, room: float, longest: int) -> bool:
    fit = fit_model(family, shape, room, longest)
    return fit is not None and fit.seq_len >= ROOMY and fit.is_plain


def _pixels(trial: Trial, most: int) -> int:
    """Return the area to which images are scaled down, in pixels: the area of the largest image seen, rounded up to
    whole image tokens, but at most `most`."""
    largest = max((width * height for width, height in trial.sizes), default=_IMAGE_TOKEN)
    return min(most, max(4, -(-largest // _IMAGE_TOKEN)) * _IMAGE_TOKEN)


def _videos(trial: Trial, most_frames: int, most_pixels: int) -> Mapping[str, float]:
    """Return the frames a second, the most frames, and the area of all of a video's frames: enough for the longest and
    the largest video seen, and at most `most_frames` frames of `most_pixels` each."""
    if not trial.videos:
        return {}
    frames = max(4, min(most_frames, max(_frames(video, {"fps": _VIDEO_FPS}) for video in trial.videos)))
    frames += frames % 2
    # Both sides are rounded to image tokens before the area is compared with its limit.
    sides = [[max(1, round(side / _TOKEN_SIDE)) for side in (video.height, video.width)] for video in trial.videos]
    area = min(most_pixels, max(map(math.prod, sides)) * _IMAGE_TOKEN)
    return {"fps": _VIDEO_FPS, "max_frames": frames, "max_pixels": frames * -(-area // _IMAGE_TOKEN) * _IMAGE_TOKEN}


def _frames(video: VideoFacts, videos: Mapping[str, float]) -> int:
    """Return the approximate number of frames that are read of a video."""
    wished = math.ceil((video.times[-1] - video.times[0]) * videos["fps"]) + 1
    return int(min(len(video.times), max(4, wished), videos.get("max_frames", math.inf)))


def _epochs(trial: Trial, bins: float) -> int:
    """Return the number of passes over the data for a pretrained model: more over so little that few steps came of it,
    even if the estimate of its bins is twice too high."""
    least = math.ceil(2 * FEW_STEPS / max(1.0, bins))
    return max(
        least, next(epochs for rows, epochs in ((1e3, 5), (1e4, 3), (1e5, 2), (math.inf, 1)) if trial.rows < rows)
    )


def _video_area(video: VideoFacts, videos: Mapping[str, float]) -> float:
    """Return the approximate area of all frames that are read of a video, in pixels."""
    return min(videos["max_pixels"], _frames(video, videos) * video.height * video.width)


def _codec(trial: Trial, pixels: int, videos: Mapping[str, float]) -> str:
    area = sum(min(pixels, width * height) for width, height in trial.sizes)
    area += sum(_video_area(video, videos) for video in trial.videos)
    area *= trial.rows / trial.tried
    return "u8" if 3 * area <= _MOST_PIXEL_BYTES else "original"


def _tokens_of(trial: Trial, pixels: int, videos: Mapping[str, float], chars_per_token: float) -> list[float]:
    sizes, seen = iter(trial.sizes), iter(trial.videos)
    lengths = []
    for sample in trial.samples:
        images = [min(pixels, width * height) / _IMAGE_TOKEN + 4 for _, (width, height) in zip(sample.images, sizes)]
        for _, video in zip(sample.videos, seen):
            images.append(_video_area(video, videos) / 2 / _IMAGE_TOKEN + _frames(video, videos) / 2 * _GROUP_TEXT + 4)
        lengths.append(sum(images) + sum(_text_tokens(sample, chars_per_token)) + 8 * len(sample.messages))
    return lengths


def written(sample: Sample) -> Sample:
    """Return the sample with its boxes in its texts in the default form, for lengths: others are about as long."""
    return with_boxes_written(sample, BoxFormat(), None)


def _text_tokens(sample: Sample, chars_per_token: float) -> list[float]:
    """Return the approximate number of tokens of each message's text."""
    chars = [len(m.text.replace(IMAGE_SLOT, "").replace(VIDEO_SLOT, "")) + len(m.reasoning) for m in sample.messages]
    of_boxes = [len(new.text) - len(m.text) for new, m in zip(written(sample).messages, sample.messages)]
    return [c / chars_per_token + boxes / _BOX_CHARS_PER_TOKEN for c, boxes in zip(chars, of_boxes)]


def _tokens(trial: Trial, pixels: int, videos: Mapping[str, float], chars_per_token: float) -> float:
    """Return the mean number of tokens of a sample."""
    lengths = _tokens_of(trial, pixels, videos, chars_per_token)
    return sum(lengths) / len(lengths)


def _longest(trial: Trial, pixels: int, videos: Mapping[str, float], chars_per_token: float) -> int:
    """Return the number of tokens that a bin must hold: a tenth more than the longest sample seen."""
    return math.ceil(1.1 * max(_tokens_of(trial, pixels, videos, chars_per_token)))


def _answers(trial: Trial) -> Sequence[str]:
    return [m.text for sample in trial.samples for m in sample.messages if m.role == "assistant"]


def _new_tokens(trial: Trial, chars_per_token: float) -> int:
    samples = trial.samples
    answers = [(m, n) for s in samples for m, n in zip(s.messages, _text_tokens(s, chars_per_token))]
    longest = max(tokens for message, tokens in answers if message.role == "assistant")
    has_boxes = any(message.boxes for message, _ in answers)  # a list of them that is cut has no end that scores
    return min(4096 if has_boxes else 1024, max(16, 2 ** math.ceil(math.log2(1.3 * longest + 2))))


def _metrics(trial: Trial) -> tuple[str, ...]:
    """Return metrics for long answers, which are hardly ever equal to the reference; () for short answers, which get
    the default metrics."""
    answers = _answers(trial)
    words = sorted(len(text.split()) for text in answers)[len(answers) // 2]
    return ("rouge_l", "bleu4", "exact_match") if words > 5 else ()


def fit_model(family: Family, shape: ModelShape, memory: float, longest: int) -> Fit | None:
    """Return the first settings that fit, from training the whole model down to LoRA on a recomputed float8 base.

    Bins of fewer than ROOMY tokens are tried last, because packing fills them badly.

    Args:
        memory: bytes that the training may take.
        longest: tokens of the longest sample, which a bin must hold.

    Returns:
        None if no settings fit.
    """
    sizes = bin_sizes(longest)
    roomy = [size for size in sizes if size >= ROOMY]
    for some in (roomy, [size for size in sizes if size < ROOMY]):
        for adapter, parallel, words in _choices(shape):
            for seq_len in some:
                size = estimate(family, shape, adapter, parallel, seq_len)
                if size <= memory:
                    return Fit(adapter=adapter, parallel=parallel, seq_len=seq_len, memory=size, words=words)
    return None


def fit_sizes(family: Family, shape: ModelShape, seq_len: int) -> list[tuple[str, int]]:
    """Return (settings in words, bytes on one GPU) for each choice of settings, with bins of `seq_len` tokens."""
    return [
        (words, estimate(family, shape, adapter, parallel, seq_len)) for adapter, parallel, words in _choices(shape)
    ]


def smallest(family: Family, shape: ModelShape, longest: int) -> int:
    """Return the bytes of the settings that take the least memory."""
    return min(estimate(family, shape, a, p, bin_sizes(longest)[-1]) for a, p, _ in _choices(shape))


def bin_sizes(longest: int) -> Sequence[int]:
    """Return the possible bin sizes in tokens, the larger first. Each can hold the longest sample."""
    return [size for size in _BINS if size >= longest] or [-(-longest // 1024) * 1024]


def estimate(
    family: Family, shape: ModelShape, adapter: Mapping[str, Any] | None, parallel: Mapping[str, Any], seq_len: int
) -> int:
    """Return the bytes that a training in bfloat16 takes on one GPU, as `athanor plan` prints them."""
    train = TrainConfig.model_validate(
        {
            "seed": 0,
            "num_steps": 1,
            "global_batch_size": 1,
            "precision": "bfloat16",
            "heldout_interval": 1,
            "optim": {"lr": 1e-5, "min_lr_fraction": 0, "warmup_steps": 0, "weight_decay": 0},
            "adapter": adapter,
        }
    )
    sizes = {"dp": 1, "seq_len": seq_len, "max_patches": PATCHES * seq_len}
    layout, pieces = ParallelConfig.model_validate(parallel), [range(shape.language.num_layers)]
    return sum(
        estimate_memory(
            shape, layout, train, pieces=pieces, adapters=adapter_sizes(train, family, shape), **sizes
        ).values()
    )


def check_memory(gigabytes: float) -> float:
    """Return the bytes that a training may take of a GPU with this memory.

    Raises:
        InputError: `gigabytes` is not a possible memory of a GPU.
    """
    if not 1 <= gigabytes <= 10_000:
        raise InputError(f"--gpu-memory {gigabytes:g} is no memory of a GPU in GB; give 24 for a GPU of 24 GB")
    return USABLE * gigabytes * 1e9


def _choices(shape: ModelShape) -> Iterator[tuple[Mapping[str, Any] | None, Mapping[str, Any], str]]:
    """Yield (adapter, layout, words), the choices that are nearest to plain full training first."""
    recompute = dict(_RECOMPUTE) if shape.vision else {"recompute": "full"}
    small = {**_LORA, "base": "float8"}
    yield None, {}, "the whole model"
    yield None, recompute, "the whole model, its layers computed again in backward"
    yield _LORA, {}, "LoRA of rank 16"
    yield small, {}, "LoRA of rank 16 beside a base in float8"
    yield _LORA, recompute, "LoRA of rank 16, layers computed again in backward"
    yield small, recompute, "LoRA of rank 16 beside a base in float8, layers computed again in backward"
