"""The choice of a new recipe's settings, from the trial of the data, the model and the memory of the GPU."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.sample import IMAGE_SLOT, image_digests
from dataset_builders.errors import InputError
from dataset_builders.recognise.recognise import Trial
from flows.cli.init.fit import ROOMY, Fit, bin_sizes, check_memory, fit_model, smallest
from stages.shared.inputs.config import EmbeddedModelConfig
from stages.shared.inputs.model_directory import ModelDirectory, resolve_hf_dir
from trainer.model.family import Family
from trainer.model.registry import get_family, get_variant
from trainer.model.shape import ModelShape

# Published models whose sizes are known without a download: hub name -> `model.variant` of the same sizes.
_HUB = {
    **{f"Qwen/Qwen3-VL-{size}-Instruct": f"qwen3_vl_{size.lower()}" for size in ("2B", "4B", "8B", "32B")},
    **{f"Qwen/Qwen3.5-{size}": f"qwen3_5_{size.lower()}" for size in ("2B", "4B", "9B", "27B")},
}
_DEFAULTS = tuple(f"Qwen/Qwen3-VL-{size}-Instruct" for size in ("8B", "4B", "2B"))
_IMAGE_TOKEN = 32 * 32  # pixels
_MAX_PIXELS = 1_048_576
_TINY_PIXELS = 65_536  # for the model of random weights, which trains on a CPU
_TINY_BINS = (1024, 2048, 4096, 8192)
_TINY_STEPS = 500  # half a minute, since the tiny model serves only to try the whole pipeline
_STEP_TOKENS = 65_536  # tokens between two updates if there is enough data
_MOST_EPOCHS = 200
FEW_STEPS = 20  # a training of fewer steps learns little
_MOST_PIXEL_BYTES = 100e9  # with more bytes of scaled pixels, the image files are kept instead


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
    longest, room = _longest(trial, pixels, 3.0), check_memory(gpu_memory)
    name, family, shape = _model(model, lambda f, s: _is_roomy(f, s, room, longest))
    fit = fit_model(family, shape, room, longest)
    if fit is None:
        raise InputError(
            f"{name} does not fit {gpu_memory:g} GB: adapters beside a base in float8, computed again, take "
            f"{smallest(family, shape, longest) / 1e9:.0f} GB in bins of {bin_sizes(longest)[-1]:,} tokens; take a "
            "smaller model or more memory"
        )
    bins = max(1, round(_tokens(trial, pixels, 3.0) * trial.rows / fit.seq_len))
    return Choice(
        model=name,
        shape=shape,
        fit=fit,
        is_tiny=False,
        seq_len=fit.seq_len,
        max_pixels=pixels,
        codec=_codec(trial, pixels),
        epochs=_epochs(trial, bins),
        batch=max(1, min(_STEP_TOKENS // fit.seq_len, bins // 20)),
        max_new_tokens=_new_tokens(trial, 3.0),
        metrics=_metrics(trial),
        words=f"{name}, {fit.words}: {fit.memory / 1e9:.1f} GB of {gpu_memory:g} GB by estimate",
    )


def check_apart(trial: Trial, data: str) -> None:
    """Raise InputError if samples could not be both trained on and held out: there is one, or all share pictures.

    Only checked if all rows were read, and the source does not say which rows are held out.
    """
    if trial.tried < trial.rows or trial.splits or not trial.samples:
        return
    groups: list[set[object]] = []  # digests of pictures of samples that stay together
    for sample in trial.samples:
        own = {*image_digests(sample)} or {sample.digest()}
        groups = [group for group in groups if not group & own] + [own.union(*(g for g in groups if g & own))]
    if len(groups) == 1:
        raise InputError(
            f"{data}: its {len(trial.samples)} usable rows are one sample, or share pictures and so stay together; "
            "none can be held out beside others to train on, so add rows with other pictures"
        )


def data_name(source: str) -> str:
    """Return a recipe's name made from the name of the data: lower-case letters, digits and dashes."""
    source = source if source.strip("./") else str(Path(source).resolve())
    last = Path(source.rstrip("/").rpartition("/")[2] or source).name
    stem = last.partition(".")[0] if "." in last.strip(".") else last
    return re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-") or "data"


def _on_cpu(trial: Trial, model: str | None) -> Choice:
    pixels = _pixels(trial, _TINY_PIXELS)
    longest = _longest(trial, pixels, 1.5)
    seq_len = next((size for size in _TINY_BINS if size >= longest), -(-longest // 1024) * 1024)
    bins = max(1.0, 0.85 * _tokens(trial, pixels, 2.0) * trial.rows / seq_len)
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
        codec=_codec(trial, pixels),
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


def _epochs(trial: Trial, bins: float) -> int:
    """Return the number of passes over the data for a pretrained model: more over so little that few steps came of it,
    even if the estimate of its bins is twice too high."""
    least = math.ceil(2 * FEW_STEPS / max(1.0, bins))
    return max(
        least, next(epochs for rows, epochs in ((1e3, 5), (1e4, 3), (1e5, 2), (math.inf, 1)) if trial.rows < rows)
    )


def _codec(trial: Trial, pixels: int) -> str:
    area = sum(min(pixels, width * height) for width, height in trial.sizes) * trial.rows / trial.tried
    return "u8" if 3 * area <= _MOST_PIXEL_BYTES else "original"


def _tokens_of(trial: Trial, pixels: int, chars_per_token: float) -> list[float]:
    sizes = iter(trial.sizes)
    lengths = []
    for sample in trial.samples:
        images = [min(pixels, width * height) / _IMAGE_TOKEN + 4 for _, (width, height) in zip(sample.images, sizes)]
        chars = sum(len(m.text.replace(IMAGE_SLOT, "")) + len(m.reasoning) for m in sample.messages)
        lengths.append(sum(images) + chars / chars_per_token + 8 * len(sample.messages))
    return lengths


def _tokens(trial: Trial, pixels: int, chars_per_token: float) -> float:
    """Return the mean number of tokens of a sample."""
    lengths = _tokens_of(trial, pixels, chars_per_token)
    return sum(lengths) / len(lengths)


def _longest(trial: Trial, pixels: int, chars_per_token: float) -> int:
    """Return the number of tokens that a bin must hold: a tenth more than the longest sample seen."""
    return math.ceil(1.1 * max(_tokens_of(trial, pixels, chars_per_token)))


def _answers(trial: Trial) -> Sequence[str]:
    return [m.text for sample in trial.samples for m in sample.messages if m.role == "assistant"]


def _new_tokens(trial: Trial, chars_per_token: float) -> int:
    longest = max(len(text) for text in _answers(trial)) / chars_per_token
    return min(1024, max(16, 2 ** math.ceil(math.log2(1.3 * longest + 2))))


def _metrics(trial: Trial) -> tuple[str, ...]:
    """Return metrics for long answers, which are hardly ever equal to the reference; () for short answers, which get
    the default metrics."""
    answers = _answers(trial)
    words = sorted(len(text.split()) for text in answers)[len(answers) // 2]
    return ("rouge_l", "bleu4", "exact_match") if words > 5 else ()
