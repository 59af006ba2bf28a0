"""The table of `athanor plan` about which processes encode the images: a row per choice, and one line of advice."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from trainer.contract.parallel import ParallelConfig, VisionRanks
from trainer.plan.pieces import EVEN_ENOUGH
from trainer.plan.placement import LANGUAGE_RATE, VISION_RATE, Placement, PlacementJob, recommended

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
    "dealt": "; measured on two GPUs: 0.86 of data parallel at 2B, 0.89 at 4B",
    "own_ranks": "; measured on two GPUs: 0.86 of data parallel at 2B, 0.73 at 4B",
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
