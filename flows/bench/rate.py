"""`athanor rate`: measure the training speed of a model on this machine, and write a card with a row for a table.

The row has the columns of Megatron-Bridge's performance summary and some more, so that rows of several machines and
tools can stand below each other.
"""

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from dataset_builders.errors import InputError, shown
from dataset_builders.known_version import installed_version
from dataset_builders.readers.file_patterns import nearest
from dataset_builders.storage.files import write_json, write_text
from dataset_builders.storage.store import side_dir
from flows.cli.init.fit import PATCHES, USABLE
from flows.cli.text_table import bytes_text
from flows.pipeline.explain import explain
from flows.pipeline.recipe import apply_override
from flows.pipeline.source_version import source_version
from flows.resources.host import ask_driver, gpu_memory_gb, this_host
from flows.tracking.notes import markdown_table
from stages.inputs.hf_directory import check_hf_dir, resolve_hf_dir
from stages.rate.drawn import Ids, Mix, drawing, pad_multiple_of, write_drawn_bins
from stages.rate.measure import RateConfig, Rates, drawn_run, measure_steps, rates_of
from stages.rate.random_model import VARIANTS, is_tiny, random_model, write_random_model
from trainer.contract.machine.modules import check_precision
from trainer.model.family import Family
from trainer.model.registry import get_family, read_model
from trainer.model.shape import ModelShape, Work
from trainer.model.targets import adapter_sizes
from trainer.model.whole_modules import check_adapter
from trainer.plan.checks import check_experts, check_training
from trainer.plan.layout import FieldNames, check_layout
from trainer.plan.placement import PlacementJob, current_placement

PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn-4", "transformers", "triton")
HEADS = ("Model", "#-GPUs", "GPU", "Precision", "Trained", "GBS", "MBS", "Sequence Length", "FSDP", "TP", "PP", "CP")
HEADS += ("VP", "EP", "GA", "Tokens / sec / GPU", "Model TFLOP / sec / GPU", "MFU", "Memory, GB")
_TINY = {"seq_len": 256, "global_batch_size": 4, "steps": 3, "warmup": 1, "precision": "float32"}
_BINS = 48  # distinct bins on disk, at most; later steps train on them again
_LAST_IDS = 20  # the last ids before the image token, or of the vocabulary, are control tokens
_NOTE = (
    "Tokens are counted without padding. FLOPs are those of the model, vision and language, without padding or "
    "recomputation; logits count at loss tokens. A micro batch (MBS) is one packed bin of drawn samples"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model to measure.

    Attributes:
        name: as the user gave it.
        hf_dir: its directory; None for a variant, whose random weights are to be written.
    """

    name: str
    hf_dir: Path | None
    family: Family
    shape: ModelShape

    @property
    def is_small(self) -> bool:
        """Whether it is measured with small samples, because it is meant for a CPU."""
        return self.hf_dir is None and is_tiny(self.name)


def rate_command(args: argparse.Namespace) -> int:
    """Measure, print the card and write it."""
    subject = _subject(args.model)
    config = _config(args, subject)
    gpus = args.gpus or max(1, len(ask_driver("name")) if this_host().gpu else 1)
    check_settings(subject, config, gpus)
    check_memory(subject, config, gpus)
    if args.out and not os.access(args.out.parent, os.W_OK | os.X_OK):
        where = f"no file can be written in {args.out.parent}"
        raise InputError(f"--out {args.out}: {where}; give a file in a directory that exists")
    folder = side_dir(args.root).resolve() / "rates"
    out = args.out or folder / f"{_file_name(args.model)}.md"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=folder) as work:
        rates, mix = _measure(subject, config, gpus, Path(work))
    card = make_card(subject, config, gpus, rates, mix, _command(args))
    text = card_text(card)
    write_text(out, text)
    write_json(out.with_suffix(".json"), card)
    print(f"\n{text}\nCard: {out}, {out.with_suffix('.json')}")
    return 0


def _subject(model: str) -> Subject:
    """Return the model of the command line.

    Raises:
        InputError: it is neither a variant, a directory nor a hub name; or the directory holds no model.
    """
    variant = model.partition(":")[0]
    if variant in VARIANTS and not Path(model).is_dir():
        sizes = random_model(model)
        return Subject(name=model, hf_dir=None, family=get_family(sizes.family), shape=sizes.shape)
    if "/" not in model and not Path(model).is_dir():
        known = f"{nearest(model, VARIANTS)}; variants: {', '.join(VARIANTS)}"
        raise InputError(f"model {shown(model)} is no variant and no directory{known}")
    hf_dir = resolve_hf_dir(model)
    check_hf_dir(hf_dir)
    family, shape = read_model(hf_dir)
    return Subject(name=model, hf_dir=hf_dir, family=family, shape=shape)


def _config(args: argparse.Namespace, subject: Subject) -> RateConfig:
    raw: dict[str, Any] = dict(_TINY) if subject.is_small else {}
    for override in args.overrides:
        apply_override(raw, override)
    try:
        return RateConfig.model_validate(raw | ({"steps": args.steps} if args.steps else {}))
    except ValidationError as error:
        raise InputError(f"--set: {explain(error, RateConfig)}") from error


def check_settings(subject: Subject, config: RateConfig, gpus: int) -> None:
    """Check that the training can run on so many processes of this machine.

    Raises:
        InputError: it cannot. The message has the keys of `--set`, and not those of a recipe.
    """
    try:
        _check_settings(subject, config, gpus)
    except InputError as error:
        recipe_keys = (
            r"\b(train\.optim\.(?=moments)|train\.(?=precision|adapter|global)|execution\.(?=parallel|modules))"
        )
        raise InputError(re.sub(recipe_keys, "", str(error))) from error


def _check_settings(subject: Subject, config: RateConfig, gpus: int) -> None:
    train, parallel = config.train, config.parallel
    check_precision(config.precision, config.modules, this_host())
    check_training(train, parallel, subject.family)
    check_adapter(train, subject.family, subject.shape)
    check_experts(train, parallel, subject.shape)
    sizes = {"global_batch_size": config.global_batch_size, "seq_len": config.seq_len}
    names = FieldNames(parallel="parallel.", processes="--gpus")
    check_layout(parallel, subject.shape, world_size=gpus, pad_multiple=pad_multiple_of(parallel), names=names, **sizes)


def check_memory(subject: Subject, config: RateConfig, gpus: int) -> None:
    """Check that the training fits, by the estimate of `athanor plan`.

    Raises:
        InputError: it does not fit the memory of a GPU, or of this machine if it has none.
    """
    patches = PATCHES * config.seq_len if subject.shape.vision else 0
    job = PlacementJob(
        shape=subject.shape,
        parallel=config.parallel,
        train=config.train,
        processes=gpus,
        seq_len=config.seq_len,
        max_patches=patches,
        work=Work(config.seq_len, config.seq_len, 0, patches, 0),
        adapters=adapter_sizes(config.train, subject.family, subject.shape),
    )
    needed, of_gpu = sum(current_placement(job).memory.values()), gpu_memory_gb()
    room = USABLE * (psutil.virtual_memory().total / gpus if of_gpu is None else of_gpu * 1e9)
    if needed > room:
        where = "this machine gives a process" if of_gpu is None else "a GPU of this machine has"
        raise InputError(
            f"{subject.name} needs about {bytes_text(needed)} in the fullest process, and {where} {bytes_text(room)}; "
            "try --set 'adapter={rank: 16, alpha: 32}', --set parallel.recompute=full, --set seq_len=4096, or a layout "
            "over more --gpus"
        )


def _measure(subject: Subject, config: RateConfig, gpus: int, work: Path) -> tuple[Rates, Mix]:
    """Write the weights and the bins, and measure the counted steps.

    Raises:
        TrainerFailed: the trainer ended before.
    """
    counted = config.warmup + config.steps
    num_bins = max(config.global_batch_size, min(_BINS, counted * config.global_batch_size))
    hf_dir = subject.hf_dir
    if hf_dir is None:
        hf_dir = work / "hf"
        print(f"Writing random weights of {subject.name}", flush=True)
        write_random_model(hf_dir, random_model(subject.name))
    _, shape = read_model(hf_dir)
    ids = Ids(shape.images.image_token_id if shape.images else None)
    last = (ids.image_token_id or shape.language.vocab_size) - _LAST_IDS
    vocab = range(min(1000, last // 2), last)
    print(f"Drawing {num_bins} bins of {config.seq_len:,} tokens", flush=True)
    draw = drawing(ids, subject.is_small)
    mix = write_drawn_bins(work / "data", num_bins, config.seq_len, vocab, ids, draw, pad_multiple_of(config.parallel))
    run = drawn_run(hf_dir, work / "data", work / "run", config.train, config.seq_len, config.execution)

    def show(number: int) -> None:
        print(f"step {number} of {counted}", flush=True)

    rows = measure_steps(run, gpus, counted, show)
    return rates_of(rows[config.warmup - 1 :], gpus), mix


def make_card(subject: Subject, config: RateConfig, gpus: int, rates: Rates, mix: Mix, command: str) -> dict[str, Any]:
    """Return the card's content: the row, and everything that is needed to measure it again."""
    parallel = config.parallel
    dp = parallel.data_parallel(gpus)
    values = (
        *(subject.name, gpus, this_host().gpu or f"CPU, {len(os.sched_getaffinity(0))} cores", config.precision),
        *(f"{config.adapter.kind} of rank {config.adapter.rank}" if config.adapter else "all weights",),
        *(config.global_batch_size, 1, config.seq_len, int(parallel.sharding == "fsdp")),
        *(parallel.tp, parallel.pp, parallel.cp, parallel.vpp, parallel.ep, config.global_batch_size // dp),
        *(round(rates.tokens), _rounded(rates.tflops), rates.mfu and _rounded(rates.mfu), _rounded(rates.memory_gb)),
    )
    return {
        "row": dict(zip(HEADS, values, strict=True)),
        "weights": "random" if subject.hf_dir is None else "of the model",
        "rates": asdict(rates),
        "settings": config.model_dump(mode="json"),
        "samples": {"samples": mix.samples, "images": mix.images, **mix.work._asdict()},
        "command": command,
        "versions": versions(),
        "source": source_version(),
    }


def card_text(card: Mapping[str, Any]) -> str:
    """Return the card in Markdown."""
    row, rates, source = card["row"], card["rates"], card["source"]
    cells = ["" if value is None else f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()]
    commit = source.get("commit", "unknown") + (", with changes" if source.get("dirty") == "true" else "")
    mix, settings = card["samples"], card["settings"]
    drawn = (
        f": {mix['samples']:,} with {mix['images']:,} images, {mix['tokens'] / mix['samples']:,.0f} tokens and "
        f"{mix['patches'] / mix['samples']:,.0f} patches each on average."
    )
    steps = (
        f"{settings['steps']} counted steps after {settings['warmup']}: {rates['step_seconds']:.3g} s "
        f"each, {rates['slowest']:,.0f} to {rates['fastest']:,.0f} tokens/s/GPU in single steps, "
        f"{rates['loss_tokens']:,.0f} loss tokens/s/GPU, {rates['padding']:.1%} padding, {rates['data_share']:.1%} of "
        "the time waits for data."
    )
    return (
        "\n\n".join(
            [
                f"# Training rate of {row['Model']}",
                markdown_table(list(row), [cells], numbers=range(5, len(row))),
                f"    {card['command']}",
                f"{', '.join(f'{name} {version}' for name, version in card['versions'].items())}. Commit {commit}.",
                f"{steps} Weights: {card['weights']}.",
                _NOTE + drawn,
            ]
        )
        + "\n"
    )


def versions() -> dict[str, str]:
    """Return name -> version of Python, of the packages that train, and of the GPU's driver."""
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        if version := installed_version(package):
            found[package] = version
    driver = ask_driver("driver_version") if this_host().gpu else []
    return found | ({"driver": driver[0]} if driver else {})


def _command(args: argparse.Namespace) -> str:
    """Return the command line that measures again. The root and the card's place are not part of it."""
    words = ["athanor", "rate", args.model, *(word for text in args.overrides for word in ("--set", text))]
    words += [
        word for name in ("gpus", "steps") if (value := getattr(args, name)) for word in (f"--{name}", str(value))
    ]
    return shlex.join(words)


def _rounded(value: float) -> float:
    """Return a number with three digits."""
    return float(f"{value:.3g}")


def _file_name(model: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in model.rstrip("/").rpartition("/")[2])
