"""The choice of the ranks that encode images: the prediction of `athanor plan` against measurements. On a CPU, in
seconds.

    python -m tests.bench.bench_vision

The mix is that of bench_train_step. Measured seconds are copied from the named files of tests/bench/results.
"""

import itertools
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from flows.cli.vision_table import COLUMNS, vision_rows
from stages.plan_bins.pack import pack
from tests.bench.bench_train_step import MAX_PATCHES_PER_TOKEN, draw_kind
from tests.bench.mix import HEAVY as VISION_HEAVY
from tests.bench.mix import random_model
from tests.bench.trainer_job import bench_train_config
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import PartConfig, TrainConfig
from trainer.data.balance import spread_images
from trainer.data.flops import cost_model
from trainer.model.shape import ModelShape, Work
from trainer.plan.pieces import mean_work
from trainer.plan.placement import (
    LANGUAGE_RATE,
    VISION_RATE,
    Placement,
    PlacementJob,
    current_placement,
    own_ranks,
    placements,
    recommended,
)

SEQ_LEN = 8192
SAMPLES = 20_000
BINS_PER_GPU = 8
TWO_H200 = "train_step_h200_2026-11-22.md"
LADDER = "ladder_h200_2026-11-21.md"


class Timed(NamedTuple):
    """A training whose seconds per step on rank 0 are known. `passes` counts the passes of vision: 4 if it was
    recomputed."""

    source: str
    model: str
    bins: int  # per GPU and step, in bins of SEQ_LEN tokens
    passes: int
    vision: float
    language: float


TRAININGS = [
    Timed(f"{TWO_H200}, 4 bins of 16,384", "qwen3_vl_2b", 8, 3, 1.308, 1.062),
    Timed(TWO_H200, "qwen3_vl_4b", 8, 3, 1.379, 2.672),
    Timed(f"{TWO_H200}, one of two GPUs", "qwen3_vl_2b", 8, 3, 1.425, 1.127),
    Timed(f"{TWO_H200}, dp 2", "qwen3_vl_2b", 8, 3, 1.489, 1.107),
    Timed(LADDER, "qwen3_vl_2b", 8, 3, 1.395, 1.114),
    Timed(LADDER, "qwen3_vl_4b", 8, 3, 1.387, 2.706),
    Timed(f"{LADDER}, dp 4", "qwen3_vl_8b", 4, 4, 1.680, 2.365),
    Timed("qwen3_5_h200_2026-11-23.md", "qwen3_5_2b", 8, 3, 1.232, 1.107),
]

HEAVY = random_model(VISION_HEAVY).shape
# A bin is one sample: 8 x 576 image tokens and 192 text tokens, 60 of which are trained on.
HEAVY_SEQ_LEN, HEAVY_IMAGES, HEAVY_PATCHES = 4800, 8, 2304
HEAVY_WORK = Work(4800, 60, 4800**2, HEAVY_IMAGES * HEAVY_PATCHES, HEAVY_IMAGES * HEAVY_PATCHES**2)


@dataclass(frozen=True)
class Mix:
    """Full bins of the mix.

    Attributes:
        work: work of the mean bin, with each sample and image counted separately.
        planned: the same from the manifest of a plan, as `athanor plan` knows it.
        images: patches of each image, bin by bin.
    """

    work: Work
    planned: Work
    images: list[list[int]]


def draw_mix() -> Mix:
    rng = np.random.default_rng(0)
    tokens, images, learnt = [], [], 0
    for _ in range(SAMPLES):
        kind = draw_kind(rng)
        grids = [t * h * w for t, h, w in kind.grids]
        if kind.text + sum(grids) // 4 <= SEQ_LEN:
            tokens.append(kind.text + sum(grids) // 4)
            images.append(grids)
            learnt += int(rng.binomial(kind.text, kind.learnt))
    numbers = pack(np.array(tokens), np.array([sum(i) for i in images]), SEQ_LEN, MAX_PATCHES_PER_TOKEN * SEQ_LEN)
    bins = int(numbers.max()) + 1
    by_bin: list[list[int]] = [[] for _ in range(bins)]
    for number, grids in zip(numbers.tolist(), images):
        by_bin[number] += grids
    patches = np.array(list(itertools.chain.from_iterable(images)), np.int64)
    sums = {
        "num_samples": len(tokens),
        "num_tokens": sum(tokens),
        "num_loss_tokens": learnt,
        "num_patches": int(patches.sum()),
        "num_images": len(patches),
    }
    planned = mean_work(SEQ_LEN, {}, {"epochs": [{"num_bins": bins, "subsets": {"mix": sums}}]})
    squares = sum(n * n for n in tokens) / bins, int((patches**2).sum()) / bins
    return Mix(planned._replace(tokens_squared=squares[0], patches_squared=squares[1]), planned, by_bin)


def shape_of(name: str) -> ModelShape:
    return random_model(name).shape


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return f"\n## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rates(mix: Mix) -> str:
    """Return the TFLOP/s of vision and language model in trainings without a pipeline, by the real work."""
    rows, both = [], []
    for timed in TRAININGS:
        cost = cost_model(shape_of(timed.model))
        vision = cost.vision(mix.work) * timed.passes / 3 * timed.bins / timed.vision / 1e12
        language = cost.language(mix.work) * timed.bins / timed.language / 1e12
        both.append((vision, language))
        rows.append((timed.source, timed.model, f"{vision:.0f}", f"{language:.0f}"))
    medians = [f"{median(column):.0f}" for column in zip(*both)]
    taken = [f"{VISION_RATE / 1e12:.0f}", f"{LANGUAGE_RATE / 1e12:.0f}"]
    rows += [("**median**", "", *medians), ("**taken**", "", *taken)]
    return table("TFLOP/s per GPU", ("training", "model", "vision", "language"), rows)


def job_of(
    shape: ModelShape,
    work: Work,
    gpus: int,
    *,
    bins: int = BINS_PER_GPU,
    seq_len: int = SEQ_LEN,
    frozen: bool = False,
    **layout: object,
) -> PlacementJob:
    train = bench_train_config(bins * gpus)
    return PlacementJob(
        shape=shape,
        parallel=ParallelConfig(**layout),
        train=freeze(train) if frozen else train,
        processes=gpus,
        seq_len=seq_len,
        max_patches=MAX_PATCHES_PER_TOKEN * seq_len,
        work=work,
    )


def freeze(train: TrainConfig) -> TrainConfig:
    still = PartConfig(frozen=True)
    return train.model_copy(update={"vision": still, "merger": still})


def measured(mix: Mix) -> str:
    """Return the figures for 2B on two H200 with the layouts of `TWO_H200`. Their update is not part of the step."""
    pipeline = {"pp": 2, "first_pipeline_layers": 14}  # at that time layers were not dealt by cost
    steps = {
        "dp 2": ({}, (1.489, 1.107, 2.646 - 0.029, None)),
        "pp 2": (pipeline, (3.022, 1.073, 4.140 - 0.031, 0.763)),
    }
    columns = ("", "vision of rank 0, s", "language of rank 0, s", "step, s", "rank 1 waits", "tokens/s, dp 2 = 1")
    rows = []
    for name, (layout, (vision, language, step, waits)) in steps.items():
        ratio = steps["dp 2"][1][2] / step
        shown = "" if waits is None else f"{waits:.0%}"
        rows.append((f"{name}, measured", f"{vision:.2f}", f"{language:.2f}", f"{step:.2f}", shown, f"{ratio:.2f}"))
        for how, work in (("by the plan", mix.planned), ("if it knew every image", mix.work)):
            one = current_placement(job_of(shape_of("qwen3_vl_2b"), work, 2, **layout))
            dp = current_placement(job_of(shape_of("qwen3_vl_2b"), work, 2))
            waits_said = "" if waits is None else f"{one.waits[1]:.0%}"
            seconds = (f"{value:.2f}" for value in (*one.ranks[0], one.step))
            rows.append((f"{name}, {how}", *seconds, waits_said, f"{dp.step / one.step:.2f}"))
    return table("2B on two H200, 16 bins: predicted and measured", columns, rows)


def shares(mix: Mix) -> str:
    """Return the ratio of the costliest to the mean share of a bin's images, if bins are dealt one by one."""
    job = job_of(shape_of("qwen3_vl_2b"), mix.work, 2)
    rows = []
    for ranks in (2, 4, 8, 16):
        largest, first = [], []
        for images in filter(None, mix.images):
            loads = [sum(images[i] for i in share) for share in spread_images(images, ranks)]
            largest.append(max(loads) * ranks / sum(loads))
            first.append(loads[0] * ranks / sum(loads))
        assumed = max(1, ranks * job.largest_image)
        rows.append((str(ranks), f"{np.mean(largest):.2f}", f"{np.mean(first):.2f}", f"{assumed:.2f}"))
    columns = ("ranks", "largest share", "rank 0's share", "assumed")
    return table("Images dealt bin by bin: shares of patches, in mean shares", columns, rows)


def predicted(title: str, jobs: Sequence[tuple[str, PlacementJob]]) -> str:
    """Return every choice of every layout, and the tokens/s of each relative to the first layout."""
    rows = []
    base = current_placement(jobs[0][1])
    for name, job in jobs:
        choices = placements(job)
        best = recommended(choices)
        for choice, cells in zip(choices, vision_rows(choices)):
            mark = " (advised)" if choice is best else ""
            rows.append((name, *cells[:-1], f"{base.step / choice.step:.2f}{mark}"))
    return table(title, ("layout", *COLUMNS[:-1], f"tokens/s, {jobs[0][0]} = 1"), rows)


def every_own(title: str, job: PlacementJob) -> str:
    """Return the choices for every number of vision ranks."""
    now, choices = current_placement(job), sorted(own_ranks(job), key=lambda choice: choice.parallel.vision_ranks)
    rows = [(*cells[:-1], relative(now, choice)) for cells, choice in zip(vision_rows([now, *choices])[1:], choices)]
    return table(title, (*COLUMNS[:-1], "tokens/s, all ranks alike = 1"), rows)


def relative(now: Placement, other: Placement) -> str:
    return f"{now.step / other.step:.2f}"


def main() -> None:
    mix = draw_mix()
    print("# Where images should be encoded: predictions, to be held against runs\n")
    print("    python -m tests.bench.bench_vision\n")
    print(f"On a CPU, nothing timed. Python {platform.python_version()}, numpy {np.__version__}.")
    print(rates(mix))
    print(measured(mix))
    print(shares(mix))
    for model, gpus in itertools.product(("qwen3_vl_2b", "qwen3_vl_4b", "qwen3_vl_8b"), (2, 4, 8)):
        layouts = [{}, *({"pp": pp} for pp in (2, 4) if pp <= gpus)]
        jobs = [(layout_name(gpus, x), job_of(shape_of(model), mix.planned, gpus, **x)) for x in layouts]
        print(predicted(f"{model} on {gpus} H200, {BINS_PER_GPU} bins of {SEQ_LEN:,} per GPU", jobs))
    frozen = [(f"pp {pp}", job_of(shape_of("qwen3_vl_2b"), mix.planned, 2, frozen=True, pp=pp)) for pp in (1, 2)]
    print(predicted("qwen3_vl_2b with a frozen encoder on 2 H200", frozen))
    for gpus in (1, 2, 4, 8):
        layouts = [{}, *({"pp": pp} for pp in (2, 4) if pp <= gpus)]
        jobs = [(layout_name(gpus, x), job_of(HEAVY, HEAVY_WORK, gpus, seq_len=HEAVY_SEQ_LEN, **x)) for x in layouts]
        print(predicted(f"The vision-heavy shape on {gpus} H200, {BINS_PER_GPU} bins of one sample per GPU", jobs))
    heavy = job_of(HEAVY, HEAVY_WORK, 8, seq_len=HEAVY_SEQ_LEN)
    print(every_own("The vision-heavy shape on 8 H200: every number of ranks of their own", heavy))


def layout_name(gpus: int, layout: dict[str, int]) -> str:
    pp = layout.get("pp", 1)
    return ", ".join(f"{name} {size}" for name, size in (("dp", gpus // pp), ("pp", pp)) if size > 1) or "one GPU"


if __name__ == "__main__":
    main()
