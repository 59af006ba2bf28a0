"""The text of a new recipe: every setting that a user may want to change, with a short comment."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dataset_builders.errors import printable
from dataset_builders.recognise.recognise import Trial
from flows.cli.init.choice import Choice
from flows.cli.init.fit import FULL_RATES, LORA_RATE, PATCHES
from flows.pipeline.recipe import read_yaml
from stages.convert.config import ConvertConfig

MAX_SKIP_FRACTION = 0.05
_MAX_SUBSETS = 20  # largest number of subsets whose metrics are written into the recipe


def recipe_text(name: str, data: str, trial: Trial, choice: Choice) -> str:
    """Return the YAML text of a recipe for the data of a trial."""
    reading = trial.reading
    splits = "the source says which rows are held out; of the others this share" if trial.splits else "share of images"
    splits += ", with all their samples; never trained on"
    if reading.heldout_files:
        splits = "counts only if heldout_files is empty: share of images, with all their samples"
    lines = [
        printable(f"# Written by `athanor init {' '.join(data.split())}`: {' '.join(reading.why.split())}."),
        "# `athanor plan` prints what a run will do and what it needs; `athanor run` does it.",
        f"name: {_value(name)}  # of the MLflow experiment and the registered model, after athanor-",
        "",
        f"data: {_value(data)}",
        *_model(choice),
        "",
        "convert:",
        f"  builder: {reading.builder}  # docs/data-formats.md lists the builders and their options",
        f"  subsets: {_value(list(reading.subsets))}  # empty: all of them",
        f"  options: {_value(reading.options)}",
        *_heldout_files(reading.heldout_files),
        f"  heldout_fraction: {_heldout(trial)}  # {splits}",
        *_min_heldout(trial),
        "  seed: 0",
        "  max_image_pixels: 50000000  # a larger image is left out, and counted",
        "  min_image_side: 4",
        f"  shard_size_mb: {1 if choice.is_tiny else 256}",
        f"  max_skip_fraction: {MAX_SKIP_FRACTION}  # the run ends if more rows than this cannot be used",
        "",
        "tokenize:",
        f"  max_seq_len: {choice.seq_len}  # a longer sample is left out, and counted",
        f"  max_pixels: {choice.max_pixels}  # a larger image is scaled down to this area",
        f"  codec: {choice.codec}  # u8: pixels ready to train on; original: the image files, an eighth of the space",
        f"  max_skip_fraction: {MAX_SKIP_FRACTION}",
        "",
        "plan_bins:",
        f"  seq_len: {choice.seq_len}  # tokens of a bin, into which samples are packed",
        f"  max_patches: {PATCHES * max(choice.seq_len, choice.max_pixels // 1024)}",
        "  pad_multiple: 1",
        "",
        *_train(choice),
        "",
        "evaluate:",
        f"  max_new_tokens: {choice.max_new_tokens}  # an answer is cut there",
        *_metrics(trial, choice),
        "",
        *_execution(choice),
    ]
    return "\n".join(lines) + "\n"


def _model(choice: Choice) -> list[str]:
    if choice.model is None:
        return [
            "model:  # a tiny Qwen3-VL of random weights, to try everything on a CPU; or a directory or hub name",
            "  seed: 0",
        ]
    return [f"model: {_value(choice.model)}"]


def _train(choice: Choice) -> list[str]:
    is_lora = choice.fit is not None and choice.fit.adapter is not None
    rate = "3.0e-3" if choice.model is None else LORA_RATE if is_lora else FULL_RATES["lr"]
    return [
        "train:",
        "  seed: 0",
        f"  num_epochs: {choice.epochs}  # passes over the data; or num_steps",
        f"  global_batch_size: {choice.batch}  # bins between two updates",
        f"  precision: {'float32' if choice.is_tiny else 'bfloat16'}",
        "  heldout_interval: 100  # steps between two measurements of the held-out loss",
        *([f"  adapter: {_value(dict(choice.fit.adapter))}"] if is_lora else []),
        "  optim:",
        f"    lr: {rate}  # {'for adapters: ten times that of the whole model' if is_lora else 'the peak'}",
        "    min_lr_fraction: 0.0",
        "    warmup_fraction: 0.05",
        f"    weight_decay: {'0.0' if is_lora else '0.1'}",
        *(
            []
            if choice.shape is None or choice.shape.vision is None or is_lora
            else ["  vision:", f"    lr: {FULL_RATES['vision']}  # the encoder knows more than this data can teach it"]
        ),
    ]


def _metrics(trial: Trial, choice: Choice) -> list[str]:
    if not choice.metrics:
        return []
    subsets = list(trial.subsets)[:_MAX_SUBSETS]
    lines = [f"    {subset}: {_value(list(choice.metrics))}" for subset in subsets]
    return ["  metrics:  # the headline first", *lines]


def _execution(choice: Choice) -> list[str]:
    lines = ["execution:"]
    if choice.fit is not None and choice.fit.parallel:
        lines += [f"  parallel: {_value(dict(choice.fit.parallel))}  # less memory for a third more time"]
    if choice.model is None:
        lines += ["  cluster:", "    num_threads: 1  # a second thread costs this model time"]
    lines += [
        "  checkpoint:",
        "    save_interval: 500",
        "  registry:",
        "    metric: score  # of the champion",
        "    gates:",
        "      stop_rate: {min: 0.9}  # a model that does not end its answers is not registered",
    ]
    return lines


def _heldout_files(globs: Sequence[str]) -> list[str]:
    why = "the rows of these files are held out, and no others; [] chooses them by the share below"
    return [f"  heldout_files: {_value(list(globs))}  # {why}"] if globs else []


def _heldout(trial: Trial) -> float:
    return 0.2 if trial.rows < 1000 else 0.1 if trial.rows < 10_000 else 0.03


def distinct(trial: Trial) -> int:
    """Return the number of different samples that were read."""
    return len(trial.samples) - trial.duplicates


def _min_heldout(trial: Trial) -> list[str]:
    """Return a line for data of which the usual least number cannot be held out beside as many to train on."""
    most = distinct(trial) // 2
    if trial.splits or trial.tried < trial.rows or most >= ConvertConfig.model_fields["min_heldout"].default:
        return []
    return [f"  min_heldout: {most}  # half of the {distinct(trial)} samples; 10 where there are 20 or more"]


def _value(value: str | Sequence[Any] | Mapping[str, Any]) -> str:
    """Return a value as one line of YAML: as JSON, which is YAML too, except that a plain name gets no quotes."""
    if isinstance(value, str) and re.fullmatch(r"[\w/][\w/.-]*", value) and read_yaml(value, value) == value:
        return value
    if isinstance(value, Mapping):
        items = ", ".join(f"{key}: {json.dumps(_plain(item), ensure_ascii=False)}" for key, item in value.items())
        return printable(f"{{{items}}}")
    return printable(json.dumps(_plain(value), ensure_ascii=False))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
