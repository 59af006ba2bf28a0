"""`athanor init`: find out how raw data can be read, and write a recipe that runs, with a short comment at each setting
that a user may want to change.
"""

import argparse
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError, printable, shown
from dataset_builders.pictures.images import PILLOW_PIXEL_LIMIT, ImageLimits, preview_png
from dataset_builders.readers.parts import heldout_globs
from dataset_builders.recognise.layouts import nearest_layout
from dataset_builders.recognise.recognise import ROW_SUFFIXES, TAR_SUFFIX, Trial, recognise
from dataset_builders.storage.files import write_text
from dataset_builders.storage.store import StorePath, absolute, check_reachable, is_local, location, side_dir
from flows.cli.first_rows import SHOWN, anomalies, check_apart, check_images, is_colourful, sample_lines, summary
from flows.cli.fit import FULL_RATES, LORA_RATE, PATCHES, Choice, check_memory, choose, written
from flows.cli.terminal import raw_stdout
from flows.pipeline.host import gpu_memory_gb
from flows.pipeline.recipe import load_recipe, read_yaml
from stages.convert.config import ConvertConfig
from stages.shared.inputs.raw_source import download_first
from stages.shared.pages.page import plain_page
from stages.shared.pages.report import REPORT_HTML, Picture, Pictures, Table
from stages.shared.preview.samples import boxes_over

_LIMITS = ImageLimits(max_pixels=PILLOW_PIXEL_LIMIT, min_side=4)  # convert.min_image_side of the recipes
_PAGE_SAMPLES = 12

MAX_SKIP_FRACTION = 0.05
_MAX_SUBSETS = 20  # largest number of subsets whose metrics are written into the recipe


def init_command(args: argparse.Namespace) -> int:
    """Recognise the layout of the data, show samples and anomalies, and write the recipe.

    Raises:
        InputError: the data cannot be read, or the recipe's file exists already.
    """
    out = Path(args.out or f"{data_name(args.data)}.yaml")
    if out.exists():
        raise InputError(f"--out {out} exists already; delete it, or give --out another name")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: {out.parent} is not a directory; make it, or give --out another name")
    memory = args.gpu_memory if args.gpu_memory is not None else gpu_memory_gb()
    if memory is not None:
        check_memory(memory)
    data, source, hub_names = _open(args.data)
    _check_utf8(data, args.model or "")
    found = recognise(source, _LIMITS)
    if found.best is None:
        raise InputError(nearest_layout(source, found))
    trial = found.best
    trial.reading = replace(trial.reading, heldout_files=trial.reading.heldout_files or heldout_globs(hub_names))
    check_apart(trial, data)
    choice = choose(trial, args.model, memory)
    if choice.shape is not None:
        check_images(trial, choice.shape, choice.model, MAX_SKIP_FRACTION)
    for line in summary(found, trial):
        print(line)
    for sample in trial.samples[:SHOWN]:
        print()
        for line in sample_lines(sample, is_colourful()):
            print(line, file=raw_stdout())
    page = _write_page(side_dir(args.root) / "init" / data_name(args.data), trial)
    has_boxes = any(message.boxes for sample in trial.samples for message in sample.messages)
    drawn = ", and boxes drawn on them: see that they are where they should be" if has_boxes else ""
    files = "images and frames of their videos" if trial.videos else "images"
    print(f"\nMore samples, with their {files}{drawn}: {page}")
    if hub_names:
        names = f"of the hub's {len(hub_names):,} files of rows only {hub_names[0]}"
        print(f"look at: {names} was downloaded and looked at")
    text = recipe_text(data_name(args.data), data, trial, choice)
    _check_reads_back(text, {"data": data, "model": choice.model})
    write_text(out, text)
    config = load_recipe(str(out)).config
    for line in anomalies(source, found.survey, trial, config.convert):
        print(f"look at: {line}")
    print(f"\nModel: {choice.words}")
    print(f"Wrote {out}. Next:\n  athanor plan {out}\n  athanor run {out}")
    return 0


def _check_utf8(*paths: str) -> None:
    """Raise InputError for a path whose name is not UTF-8, which no recipe can hold."""
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{path}: this name is not UTF-8, and a recipe is; rename it") from error


def _check_reads_back(text: str, named: Mapping[str, str | None]) -> None:
    """Raise InputError if a recipe would name other data or another model than it was written for."""
    read = read_yaml(text, "the new recipe")
    for field, value in named.items():
        if value is not None and read[field] != value:
            raise InputError(f"{field}: a recipe cannot hold the name {shown(value)}; rename it")


def _open(data: str) -> tuple[str, StorePath, list[str]]:
    """Return the value of `data` for the recipe, the source to inspect, and the names of a hub dataset's files of rows,
    of which only the first was downloaded.

    Raises:
        InputError: no such directory, file, URL or hub dataset exists.
    """
    source = location(data)
    if not is_local(source):
        check_reachable(source)
        return data, source, []
    if source.exists():
        return str(absolute(source)), source, []
    if data.startswith(("/", ".", "~")) or data.count("/") != 1:
        raise InputError(f"{data} does not exist; give a directory, a file, a URL or a hub name (owner/name)")
    return data, *download_first(data, (*ROW_SUFFIXES, TAR_SUFFIX))


def _write_page(directory: Path, trial: Trial) -> Path:
    """Write a page of samples with their images, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    boxed = [sample for sample in trial.samples if any(message.boxes for message in sample.messages)][:SHOWN]
    drawn = [
        Picture(preview_png([data], 640), f"image {i} of {sample.key} with boxes", f"{sample.key}, image {i}", boxes)
        for sample in boxed
        for i, data in enumerate(sample.images)
        if (boxes := boxes_over(sample, i)) is not None
    ]
    pictures = []
    for sample in trial.samples[:_PAGE_SAMPLES]:
        caption = "\n".join(f"{m.role}: {m.text}" for m in written(sample).messages)
        if sample.files:
            with contextlib.suppress(SkipSample):  # a video is damaged after its header, which convert says
                pictures.append(Picture.of_sample(sample, 320, caption))
    samples = map(written, trial.samples[:_PAGE_SAMPLES])
    rows = [(s.key, len(s.images), len(s.videos), m.role, m.text) for s in samples for m in s.messages]
    sections = [
        *([Pictures("Boxes", drawn)] if drawn else []),
        Pictures("Samples", pictures),
        Table("Their messages", ["key", "images", "videos", "role", "text"], rows),
        Table(
            "Left out", ["reason", "rows", "the first"], [(r, n, trial.details[r]) for r, n in trial.reasons.items()]
        ),
    ]
    figures = {"rows": trial.rows, "rows read": trial.tried, "usable": len(trial.samples)}
    page = directory / REPORT_HTML
    write_text(page, plain_page("Raw rows as samples", summary=figures, sections=sections))
    return page


def recipe_text(name: str, data: str, trial: Trial, choice: Choice) -> str:
    """Return the YAML text of a recipe for the data of a trial."""
    reading = trial.reading
    splits = "the source says which rows are held out; of the others this share" if trial.splits else "share of images"
    splits += ", with all their samples; never trained on"
    if reading.heldout_files:
        splits = "counts only if heldout_files is empty: share of images, with all their samples"
    model = [
        "model:  # a tiny Qwen3-VL of random weights, to try everything on a CPU; or a directory or hub name",
        "  seed: 0",
    ]
    if choice.model is not None:
        model = [f"model: {_value(choice.model)}"]
    heldout = []
    if reading.heldout_files:
        why = "the rows of these files are held out, and no others; [] chooses them by the share below"
        heldout.append(f"  heldout_files: {_value(list(reading.heldout_files))}  # {why}")
    fraction = 0.2 if trial.rows < 1000 else 0.1 if trial.rows < 10_000 else 0.03
    heldout.append(f"  heldout_fraction: {fraction}  # {splits}")
    number = len(trial.samples) - trial.duplicates
    is_little = number // 2 < ConvertConfig.model_fields["min_heldout"].default
    if is_little and trial.tried >= trial.rows and not trial.splits:  # the usual least number cannot be held out
        heldout.append(f"  min_heldout: {number // 2}  # half of the {number} samples; 10 where there are 20 or more")
    metrics = []
    if choice.metrics:
        named = [f"    {subset}: {_value(list(choice.metrics))}" for subset in list(trial.subsets)[:_MAX_SUBSETS]]
        metrics = ["  metrics:  # the headline first", *named]
    lines = [
        printable(f"# Written by `athanor init {' '.join(data.split())}`: {' '.join(reading.why.split())}."),
        "# `athanor plan` prints what a run will do and what it needs; `athanor run` does it.",
        f"name: {_value(name)}  # of the MLflow experiment and the registered model, after athanor-",
        "",
        f"data: {_value(data)}",
        *model,
        "",
        "convert:",
        f"  builder: {reading.builder}  # docs/data-formats.md lists the builders and their options",
        f"  subsets: {_value(list(reading.subsets))}  # empty: all of them",
        f"  options: {_value(reading.options)}",
        *heldout,
        "  seed: 0",
        "  max_image_pixels: 50000000  # a larger image is left out, and counted",
        "  min_image_side: 4",
        f"  shard_size_mb: {1 if choice.is_tiny else 256}",
        f"  max_skip_fraction: {MAX_SKIP_FRACTION}  # the run ends if more rows than this cannot be used",
        "",
        "tokenize:",
        f"  max_seq_len: {choice.seq_len}  # a longer sample is left out, and counted",
        f"  max_pixels: {choice.max_pixels}  # a larger image is scaled down to this area",
        *_videos(choice),
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
        *metrics,
        "",
        *_execution(choice),
    ]
    return "\n".join(lines) + "\n"


def _videos(choice: Choice) -> list[str]:
    if not choice.videos:
        return []
    return [
        "  videos:",
        f"    fps: {choice.videos['fps']:g}  # frames a second that the model reads",
        f"    max_frames: {choice.videos['max_frames']}  # a longer video gives this number, evenly spread",
        f"    max_pixels: {choice.videos['max_pixels']}  # of all frames together; larger ones are scaled down",
    ]


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


def data_name(source: str) -> str:
    """Return a recipe's name made from the name of the data: lower-case letters, digits and dashes."""
    source = source if source.strip("./") else str(Path(source).resolve())
    last = Path(source.rstrip("/").rpartition("/")[2] or source).name
    stem = last.partition(".")[0] if "." in last.strip(".") else last
    return re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-") or "data"
