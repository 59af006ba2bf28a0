"""`athanor init`: find out how raw data can be read, and write a recipe that runs."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError, shown
from dataset_builders.pictures.images import PILLOW_PIXEL_LIMIT, ImageLimits, preview_png
from dataset_builders.readers.parts import heldout_globs
from dataset_builders.recognise.layouts import nearest_layout
from dataset_builders.recognise.recognise import ROW_SUFFIXES, TAR_SUFFIX, Trial, recognise
from dataset_builders.storage.files import write_text
from dataset_builders.storage.store import StorePath, absolute, check_reachable, is_local, location, side_dir
from flows.cli.init.choice import check_apart, choose, data_name
from flows.cli.init.findings import SHOWN, anomalies, is_colourful, sample_lines, summary
from flows.cli.init.fit import check_memory
from flows.cli.init.recipe_text import MAX_SKIP_FRACTION, recipe_text
from flows.cli.rows_plan import check_images
from flows.pipeline.recipe import load_recipe, read_yaml
from flows.resources.host import gpu_memory_gb
from flows.resources.terminal import raw_stdout
from stages.shared.inputs.raw_source import download_first
from stages.shared.pages.page import REPORT_HTML, plain_page
from stages.shared.pages.report import Pictures, Table

_LIMITS = ImageLimits(max_pixels=PILLOW_PIXEL_LIMIT, min_side=4)  # convert.min_image_side of the recipes
_PAGE_SAMPLES = 12


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
    print(f"\nMore samples, with their images: {page}")
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
    shown = [sample for sample in trial.samples[:_PAGE_SAMPLES] if sample.images]
    pictures = [(preview_png(list(sample.images), 320), _caption(sample)) for sample in shown]
    rows = [(s.key, len(s.images), m.role, m.text) for s in trial.samples[:_PAGE_SAMPLES] for m in s.messages]
    sections = [
        Pictures("Samples", pictures),
        Table("Their messages", ["key", "images", "role", "text"], rows),
        Table(
            "Left out", ["reason", "rows", "the first"], [(r, n, trial.details[r]) for r, n in trial.reasons.items()]
        ),
    ]
    figures = {"rows": trial.rows, "rows read": trial.tried, "usable": len(trial.samples)}
    page = directory / REPORT_HTML
    write_text(page, plain_page("Raw rows as samples", summary=figures, sections=sections))
    return page


def _caption(sample: Sample) -> str:
    return "\n".join(f"{message.role}: {message.text}" for message in sample.messages)
