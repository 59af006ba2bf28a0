"""`athanor plan`: the stages that a run would make, its sizes, its memory, and the job that a cluster would get.

The command makes nothing. A table says which processes encode the images, with one line of advice.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from dataset_builders.contracts.manifest import FeatureStore
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.storage.store import StorePath, free_bytes, is_local, side_dir
from flows.cli.first_rows import plan_rows, rows_table
from flows.cli.fit import check_memory, fit_sizes
from flows.cli.terminal import bytes_text, print_table
from flows.pipeline.plan import Plan, check_subsets, first_lines
from flows.pipeline.steps import Step
from stages.answer.stage import answers_apart
from stages.answer.worker import answer_job
from stages.convert.config import subset_prefix
from stages.encode_images.stage import JOB_DIR as ENCODE_JOB_DIR
from stages.export.stage import JOB_DIR
from stages.shared.artifacts.artifact import Artifact, stage_identity
from stages.shared.artifacts.run_stage import scratch_dir
from stages.shared.inputs.model_directory import opened_model
from stages.shared.launchers.job import Job, make_launcher
from stages.shared.launchers.vllm import find_vllm
from stages.train.run_trainer import trainer_job
from trainer.contract.parallel import ParallelConfig, VisionRanks
from trainer.model.adapters import adapter_sizes, list_matches
from trainer.model.family import Family
from trainer.model.registry import get_family
from trainer.model.shape import ModelShape
from trainer.plan.estimate import estimate_saved
from trainer.plan.pieces import EVEN_ENOUGH, full_work, language_flops, mean_work, vision_flops
from trainer.plan.placement import (
    LANGUAGE_RATE,
    VISION_RATE,
    Placement,
    PlacementJob,
    current_placement,
    placements,
    recommended,
)

UNKNOWN = "known once the data is made"
UNKNOWN_FINGERPRINT = "FINGERPRINT"
RULER = "-" * 80
# Step -> function that makes its job from its work directory.
_JOBS: dict[str, Callable[[Path], Job]] = {
    "encode_images": lambda work: trainer_job(work / ENCODE_JOB_DIR),
    "train": trainer_job,
    "export": lambda work: trainer_job(work / JOB_DIR),
    "answer": answer_job,
    "answer_base": answer_job,
}

COLUMNS = ("images are encoded by", "vision", "language", "waiting", "step", "start, end", "memory", "tokens/s")
_RATES = f"vision at {VISION_RATE / 1e12:.0f} and language at {LANGUAGE_RATE / 1e12:.0f} TFLOP/s per GPU"
NOTE = f"""\
Seconds per step, from the FLOPs of a mean bin with {_RATES}, as measured on an
H200 in bfloat16. Where a cell has several numbers, they are of the pipeline's ranks, then of a rank that only encodes.
The pipeline's start and end are part of the step and of the waiting; communication and update are not. Memory is that
of the fullest process. tokens/s is relative to the present layout."""
# If vision takes at least this share of a step, and there is a choice, the table is shown even where one process has
# the whole model.
LARGE_SHARE = 1 / 3
LARGE_MODEL = 10**9  # parameters from which on the program that answers is named


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan."""
    plan = args.plan
    config = plan.config
    if args.gpu_memory is not None:
        check_memory(args.gpu_memory)
    why = plan.find_finished()
    is_terminal = sys.stdout.isatty()
    print(f"recipe {plan.recipe}, root {plan.root}")
    for line in first_lines(plan):
        print(line)
    rows = [(step.name, "reuse" if step.artifact else "make", why[step.name]) for step in plan.steps]
    print_table("Stages", ("stage", "", "why"), rows, is_terminal)
    _print_rows(plan, is_terminal)
    print_table("Size", ("", "value"), size_rows(plan), is_terminal)
    _print_adapters(plan, is_terminal)
    _print_vision(plan, is_terminal)
    num_made = sum(step.artifact is None for step in plan.steps)
    print(f"\n{num_made} of {len(plan.steps)} stages would be made, {len(plan.steps) - num_made} reused.")
    if args.gpu_memory is not None:
        _print_fits(plan, args.gpu_memory, is_terminal)
    if args.launcher or not config.execution.cluster.is_here:
        print_submission(plan)
    return 0


def _print_rows(plan: Plan, is_terminal: bool) -> None:
    """Print a table of estimates from the first rows of each source, unless the samples are made already.

    Raises:
        InputError: a run would refuse the rows, or the recipe names a subset that they do not have.
    """
    plan.check_subsets()
    if plan.artifact("convert") is not None:
        return
    config, counts = plan.config, {}
    for role, source in config.sources.items():
        found = plan_rows(config, config.convert_config.readings[role], plan.given[role].dir, plan.given.get("model"))
        title = "Rows" if len(config.sources) == 1 else f"Rows of {source}"
        print_table(title, ("", "value"), rows_table(found, config, plan.root), is_terminal)
        for line in found.warnings:
            print(f"look at: {line}")
        counts |= {
            f"{subset_prefix(role)}{name}": {"train": n, "heldout": n} for name, n in found.trial.subsets.items()
        }
    if counts:
        check_subsets(config, counts)


def _print_fits(plan: Plan, gigabytes: float, is_terminal: bool) -> None:
    """Print a table of settings for training on one GPU: the memory that each takes, and whether it fits."""
    room, seq_len = check_memory(gigabytes), plan.config.plan_bins.seq_len
    rows = [
        (words, bytes_text(size), "yes" if size <= room else "no") for words, size in fit_sizes(*_model(plan), seq_len)
    ]
    title = f"One GPU of {gigabytes:g} GB, bins of {seq_len:,} tokens"
    print_table(title, ("trained", "memory", "fits"), rows, is_terminal)


def print_submission(plan: Plan) -> None:
    """Print the exact text that the launcher would submit for the next stage that trains or answers."""
    cluster = plan.config.execution.cluster
    steps = [step for step in plan.steps if step.name in _JOBS and step.artifact is None]
    if not answers_apart(cluster):
        steps = [step for step in steps if _JOBS[step.name] is not answer_job]
    if not steps:
        print("\nNothing would be submitted: the training, its export and the answers are finished.")
        return
    first, *others = (_JOBS[step.name](work_dir_of(step, plan.root)) for step in steps)
    text = make_launcher(cluster).plan(first)
    who = {"slurm": "sbatch gets", "kubernetes": "the cluster gets", "torchrun": "this machine runs"}[cluster.launcher]
    note = f" ({UNKNOWN_FINGERPRINT}: {UNKNOWN})" if UNKNOWN_FINGERPRINT in first.name else ""
    print(f"\nFor {steps[0].name}, {who}{note}:\n{RULER}\n{text}", end="" if text.endswith("\n") else "\n")
    print(RULER)
    for step, job in zip(steps[1:], others):
        print(f"For {step.name} the same, with {' '.join(job.arguments)}")


def work_dir_of(step: Step, root: StorePath) -> Path:
    """Return the directory in which a stage will work. An unknown fingerprint becomes UNKNOWN_FINGERPRINT."""
    if step.missing() is None:
        return Path(scratch_dir(root, step.stage, stage_identity(step.stage, step.config, step.read()))).resolve()
    return Path(side_dir(root) / "scratch" / f"{step.stage.name}-{UNKNOWN_FINGERPRINT}").resolve()


def size_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, value) of samples, bins, steps, epochs, parameters and memory, as far as they are known now."""
    job = _placement_job(plan)
    return [*_data_rows(plan, job), *_model_rows(plan, job), *_memory_rows(plan, job)]


def _data_rows(plan: Plan, job: PlacementJob) -> Iterator[tuple[str, str]]:
    """Yield the samples, bins, steps, epochs and the time of the training."""
    tokenized, bins, train, seq_len = plan.artifact("tokenize"), plan.artifact("plan_bins"), job.train, job.seq_len
    samples = packed = steps = epochs = UNKNOWN
    if tokenized is not None:
        counts = {"train": 0, "heldout": 0}
        for shard in tokenized.manifest.shards:
            counts[shard.split] += shard.num_samples
        skipped = sum(tokenized.manifest.skips.values())
        samples = f"{counts['train']:,} train, {counts['heldout']:,} held-out, {skipped:,} left out"
    if train.num_steps is not None:
        most = train.num_steps * train.global_batch_size * seq_len
        steps = f"{train.num_steps:,} of {train.global_batch_size} bins of {seq_len:,} tokens (up to {most:,} tokens)"
    if bins is not None:
        stats = bins.manifest.stats
        counted = ", ".join(f"{stats['num_bins'][split]:,} {split}" for split in SPLITS)
        packed = f"{counted}; {stats['padding_fraction']['train']:.1%} padding"
        epochs = f"{train.num_steps * train.global_batch_size / max(1, stats['num_bins']['train']):.2f}"
    elif train.num_epochs is not None:
        epochs = f"{train.num_epochs:g}"
    yield from {"samples": samples, "bins": packed, "steps": steps, "epochs": epochs}.items()
    # The rate of a GPU is known in bfloat16. With adapters the FLOPs would count gradients of frozen weights.
    if train.precision == "bfloat16" and train.adapter is None:
        step, whole = current_placement(job).step, ""
        if train.num_steps is not None:
            seconds = step * train.num_steps
            hours = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
            whole = f", {f'{seconds:.0f} s' if seconds < 120 else hours} in all"
        yield "time", f"about {step:.2g} s a step{whole} on an H200; on another GPU in proportion to its bfloat16 rate"


def _model_rows(plan: Plan, job: PlacementJob) -> Iterator[tuple[str, str]]:
    """Yield the parameters, and what is special about them: adapters, layers per rank, image features, tensors that are
    not trained, multi-token prediction."""
    shape, train, parts, active = job.shape, job.train, job.shape.parameters, job.shape.active_parameters
    number, names = sum(parts.values()), ", ".join(f"{name} {count:,}" for name, count in parts.items())
    of_token = f", {active:,} of them for a token" if active < number else ""
    yield "parameters", f"{number:,} ({names}){of_token}"
    if job.adapters is not None:
        trained, adapter = job.adapters.parameters, train.adapter
        beside = f"{trained:,} beside these ({trained / number:.3%})"
        yield "trained", f"{beside}: {adapter.kind} of rank {adapter.rank}"
    if (pp := job.parallel.pp) > 1:
        ranks = (" + ".join(str(len(piece)) for piece in job.pieces[rank::pp]) for rank in range(pp))
        yield "layers", f"{', '.join(ranks)} by pipeline rank{_if_full(plan.artifact('plan_bins'))}"
    if plan.config.encode_images is not None:  # each image is encoded once, before the training
        store = FeatureStore(dtype=plan.config.encode_images.dtype, width=shape.feature_width)
        encoded, tokenized, in_all = plan.artifact("encode_images"), plan.artifact("tokenize"), f"in all {UNKNOWN}"
        if encoded is not None:
            stats = encoded.manifest.stats
            images = f"{stats['image_tokens']:,} tokens of {stats['distinct_images']:,} distinct images"
            in_all = f"{bytes_text(stats['bytes'])} for {images}"
        elif tokenized is not None:
            tokens = tokenized.manifest.stats["total"]["num_patches"] // shape.vision.spatial_merge_size**2
            in_all = f"{bytes_text(tokens * store.token_bytes)} if no image occurs twice"
        levels = f"{1 + shape.num_deepstack} x {shape.language.hidden_size:,} numbers"
        yield "image features", f"{store.token_bytes:,} bytes per image token in {store.dtype} ({levels}); {in_all}"
    model = plan.given.get("model")
    copied = {} if model is None else opened_model(model).count_copied(train)
    if copied:
        tensors = ", ".join(f"{count} tensors {prefix}*" for prefix, count in copied.items())
        yield "copied", f"{tensors}: exported as they are, not trained"
    if (mtp := shape.language.mtp) is not None:
        alone = dataclasses.replace(shape, language=dataclasses.replace(shape.language, mtp=None))
        without, whole = (
            sum(language_flops(each, job.parallel, job.work, train.frozen, job.pieces))
            + vision_flops(each, job.parallel, job.work, train.frozen)
            for each in (alone, shape)
        )
        yield "mtp", f"{mtp.parameters:,} of the parameters, {1 - without / whole:.1%} of a step's FLOPs"


def _memory_rows(plan: Plan, job: PlacementJob) -> Iterator[tuple[str, str]]:
    """Yield the memory of the fullest process and of its host, and the number of processes."""
    memory, execution, train = current_placement(job).memory, plan.config.execution, job.train
    whole = bytes_text(sum(memory.values()))
    yield "memory", f"about {whole} in the fullest process, without the 0.5 to 1 GB of torch itself"
    for name, value in memory.items():
        yield f"  {name}", bytes_text(value)
    saves_late = train.num_steps is not None and execution.checkpoint.save_interval >= train.num_steps
    if execution.checkpoint.asynchronous and not saves_late:  # a training that saves only at its end keeps no copy
        dp = execution.parallel.data_parallel(execution.cluster.processes)
        sizes = {"pieces": job.pieces, "dp": dp, "adapters": job.adapters}
        copied = bytes_text(estimate_saved(job.shape, execution.parallel, train, **sizes))
        yield "host memory", f"{copied} in the fullest process, page-locked: checkpoints are written from it"
    yield "disk", _disk(plan, job)
    yield "processes", str(execution.cluster.processes)
    yield from _engine_rows(plan, job)


def _engine_rows(plan: Plan, job: PlacementJob) -> Iterator[tuple[str, str]]:
    """Yield which program answers, where a large model could be answered by vLLM too."""
    if not plan.config.execution.cluster.is_here or sum(job.shape.parameters.values()) <= LARGE_MODEL:
        return
    if (vllm := find_vllm()) is not None:
        engine = plan.config.evaluate.engine
        other = "vllm" if engine == "transformers" else "transformers"
        yield "answers", f"by {engine}; vLLM {vllm.version} is here ({vllm.path}), so evaluate.engine={other} works too"


def _disk(plan: Plan, job: PlacementJob) -> str:
    """Return the bytes of a training's checkpoints and model in words, and how many such trainings the root's disk has
    room for."""
    settings, train, shape = plan.config.execution.checkpoint, job.train, job.shape
    pieces = (range(shape.language.num_layers),)
    # In every layout all ranks together write what one rank alone would.
    saved = estimate_saved(shape, ParallelConfig(), train, pieces=pieces, dp=1, adapters=job.adapters)
    model = (4 if train.precision == "float32" else 2) * sum(shape.parameters.values())
    most, for_good = settings.keep_last + 1, 0  # an old checkpoint is deleted when the new one is whole
    if train.num_steps is not None:
        most = min(most, math.ceil(train.num_steps / settings.save_interval))
        if settings.keep_every is not None:
            for_good = train.num_steps // math.lcm(settings.save_interval, settings.keep_every)
    at_most = (most + for_good) * saved + model
    stays = (min(settings.keep_released, most) + for_good) * saved + model
    said = f"{bytes_text(at_most)} while it trains, {bytes_text(stays)} with its model afterwards"
    if not is_local(plan.root):
        return said
    free = free_bytes(plan.root)
    room = 0 if free < at_most else 1 + (free - at_most) // stays
    return f"{said}; {bytes_text(free)} are free, room for {room:,} such training{'s' * (room != 1)}"


def _placement_job(plan: Plan) -> PlacementJob:
    """Return the model, its layout and the mean bin. Without bins, the mean bin is an assumption."""
    config, settings, bins = plan.config, plan.config.plan_bins, plan.artifact("plan_bins")
    family, shape = _model(plan)
    if bins is None:
        train, work = config.train, full_work(settings.seq_len, settings.max_patches)
    else:
        train = config.train.for_bins(bins.manifest.stats["num_bins"]["train"])
        work = mean_work(settings.seq_len, bins.manifest, bins.dir)
    return PlacementJob(
        shape=shape,
        parallel=config.execution.parallel,
        train=train,
        processes=config.execution.cluster.processes,
        seq_len=settings.seq_len,
        max_patches=settings.max_patches,
        work=work,
        is_cached=config.encode_images is not None,
        adapters=adapter_sizes(config.train, family, shape),
    )


def _model(plan: Plan) -> tuple[Family, ModelShape]:
    config = plan.config
    if isinstance(config.model, str):
        model = opened_model(plan.given["model"])
        return model.family, model.shape.for_training(config.train)
    return get_family(config.model.family), config.model.shape


def _print_adapters(plan: Plan, is_terminal: bool) -> None:
    """Print a table of the modules that each target adapts, if adapters are trained."""
    if plan.config.train.adapter is None:
        return
    rows = [
        (
            found.target,
            f"{len(found.modules):,}",
            (found.modules or ("none in this model",))[0],
            f"{found.parameters:,}",
        )
        for found in list_matches(plan.config.train, *_model(plan))
    ]
    print_table("Adapters", ("target", "modules", "first", "parameters"), rows, is_terminal)


def _print_vision(plan: Plan, is_terminal: bool) -> None:
    """Print where images can be encoded, with the assumptions and the advice, if there is a choice."""
    job = _placement_job(plan)
    if is_worth_showing(job, choices := placements(job)):
        print_table(f"Vision{_if_full(plan.artifact('plan_bins'))}", COLUMNS, vision_rows(choices), is_terminal)
        print(f"\n{NOTE}\n{advice(choices)}")


def _if_full(bins: Artifact | None) -> str:
    return f" (if bins were full; for these bins {UNKNOWN})" if bins is None else ""


def is_worth_showing(job: PlacementJob, choices: Sequence[Placement]) -> bool:
    """Whether a model with a vision encoder is split over several processes, or the encoder takes a large share of a
    step. The share follows from the measured rates, which do not hold for float32."""
    is_large = len(choices) > 1 and job.vision_share >= LARGE_SHARE and job.train.precision != "float32"
    is_shared = job.parallel.model_size > 1 or job.parallel.vision_ranks > 0
    return job.vision > 0 and (is_shared or is_large)


def vision_rows(choices: Sequence[Placement]) -> list[tuple[str, ...]]:
    """Return one row of `COLUMNS` per choice. The first choice is the present layout."""
    now = choices[0]
    return [
        (
            f"{_who(choice)}, pp={choice.parallel.pp}" if choice.parallel.pp != now.parallel.pp else _who(choice),
            _by_rank(f"{rank.vision:.3g}" for rank in choice.ranks),
            _by_rank(f"{rank.language:.3g}" for rank in choice.ranks),
            _by_rank(f"{waits:.0%}" for waits in choice.waits),
            f"{choice.step:.3g}",
            f"{choice.start / choice.step:.0%}",
            f"{choice.bytes / 1e9:.3g} GB",
            f"{now.step / choice.step:.2f}" + (" (now)" if choice is now else ""),
        )
        for choice in choices
    ]


# What is known from GPUs: tests/bench/results/vision_placement.md.
_ON_GPUS = {
    "dealt": "; measured on two GPUs: 0.71 to 0.88 of data parallel at 2B, 0.88 to 0.89 at 4B",
    "own_ranks": "; measured on two GPUs: 0.85 of data parallel at 2B, 0.73 to 0.77 at 4B",
}


def advice(choices: Sequence[Placement]) -> str:
    """Return one line: the settings to change, or that no change helps; then the faster choices that need too much
    memory."""
    now, best = choices[0], recommended(choices)
    gain = f"{now.step / best.step:.2f} times the tokens/s"
    more = best.bytes - now.bytes
    cost = f", and {more / 1e9:.3g} GB more in the fullest process" if more > 0.01 * now.bytes else ""
    if best is now:
        text = "keep the present layout; no layout that fits in memory gains more than 2%."
    elif best.name == "cached":
        text = f"set encode_images.dtype=bfloat16: {gain} where images are read in more than one epoch or run."
    else:
        tried = _ON_GPUS.get(best.name, "")
        text = f"set {', '.join(_settings(now.parallel, best.parallel))}: {gain}{cost}{tried}."
    return " ".join([f"Advice: {text}", *_without_room(choices, best)])


def _settings(now: ParallelConfig, other: ParallelConfig) -> Iterator[str]:
    """Yield the settings that turn one layout into the other, as `--set` takes them."""
    for name in ("vision", "vision_split", "pp", "vpp", "first_pipeline_layers"):
        value = getattr(other, name)
        if value != getattr(now, name):
            yield f"execution.parallel.{name}={_written(value)}"


def _written(value: str | int | VisionRanks | None) -> str:
    """Return the value as a recipe writes it."""
    if isinstance(value, VisionRanks):
        return f"{{ranks: {value.ranks}{f', tp: {value.tp}' if value.tp > 1 else ''}}}"
    return "null" if value is None else str(value)


def _without_room(choices: Sequence[Placement], best: Placement) -> Iterator[str]:
    """Yield a sentence for each choice that would be faster than the advised one but needs too much memory."""
    for choice in choices:
        if EVEN_ENOUGH * choice.step < best.step:
            needs = f"{choice.bytes / 1e9:.3g} GB are more than an H200 has; recompute_vision saves some"
            yield f"With {_who(choice)} it would be {best.step / choice.step:.2f} times as fast as that, but {needs}."


def _who(choice: Placement) -> str:
    if choice.name == "own_ranks":
        ranks = choice.parallel.vision_ranks
        whose = "rank of its own" if ranks == 1 else "ranks of their own"
        return f"{ranks} {whose} (vision={_written(choice.parallel.vision)})"
    if choice.name == "first_rank" and choice.parallel.pp == 1:
        return "every rank"
    return {
        "first_rank": "the first pipeline rank",
        "dealt": "all pipeline ranks (vision=dealt)",
        "cached": "nobody: they are cached",
    }[choice.name]


def _by_rank(cells: Iterable[str]) -> str:
    """Return the ranks' cells on one line. Equal neighbours become "3 x cell", or just "cell" if all are equal."""
    runs = [(cell, len(list(same))) for cell, same in groupby(cells)]
    return ", ".join(cell if count == 1 or len(runs) == 1 else f"{count} x {cell}" for cell, count in runs)
