"""The balance of the deal of a global batch's bins to data-parallel ranks, and the cost of the deal.

    python -m tests.bench.bench_balance

Bins of 8,192 tokens, planned by the stage out of the samples of bench_train_step: image tokens log-normal around 500,
one tenth text only, one tenth with several images. 200 global batches a layout. Costs are model FLOPs
(trainer/data/flops.py); the deal sees what the plan knows, and its result is also measured by what is in
the bins, image by image.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset_builders.contracts.bins import SampleRef
from stages.plan_bins.pack import pack
from tests.bench.bench_train_step import MAX_PATCHES_PER_TOKEN, draw_kind
from tests.bench.mix import config_of
from tests.helpers.bins import sum_bin
from trainer.data.balance import CostModel, Work, deal, planned_work
from trainer.data.flops import cost_model
from trainer.data.order import bins_for_step
from trainer.model.registry import read_model

SEQ_LEN = 8192
STEPS = 200
SEED = 1
LAYOUTS = [(2, 8), (4, 8), (8, 8), (64, 8), (8, 1), (8, 2), (8, 4), (64, 2)]  # (ranks, bins per rank)


@dataclass(frozen=True)
class Plan:
    """The work of every bin: as the plan knows it, and with every image counted separately."""

    planned: list[Work]
    true: list[Work]


def make_plan(num_bins: int) -> Plan:
    """Make enough samples for `num_bins` full bins, and pack them."""
    rng = np.random.default_rng(0)
    refs, squares, total = [], [], 0
    while total < num_bins * SEQ_LEN:
        kind = draw_kind(rng)
        images = [t * h * w for t, h, w in kind.grids]
        tokens = kind.text + sum(images) // 4
        if tokens > SEQ_LEN:
            continue
        learnt = int(rng.binomial(kind.text, kind.learnt))
        refs.append(SampleRef("", "", 0, 0, tokens, learnt, sum(images), len(images), 0))
        squares.append(sum(n * n for n in images))
        total += tokens
    sizes = np.array([(r.num_tokens, r.num_patches) for r in refs]).T
    numbers = pack(*sizes, SEQ_LEN, MAX_PATCHES_PER_TOKEN * SEQ_LEN)
    bins: list[list[int]] = [[] for _ in range(numbers.max() + 1)]
    for sample, number in enumerate(numbers.tolist()):
        bins[number].append(sample)
    planned = [planned_work(sum_bin(tuple(refs[i] for i in members)), SEQ_LEN) for members in bins]
    exact = [float(sum(squares[i] for i in members)) for members in bins]
    return Plan(planned, [work._replace(patches_squared=square) for work, square in zip(planned, exact)])


def costs_of(works: Sequence[Work], model: CostModel) -> list[float]:
    return [model.language(work) + model.vision(work) for work in works]


def sizes_of(name: str) -> CostModel:
    """Return the FLOPs function of the published sizes."""
    with tempfile.TemporaryDirectory(prefix="athanor-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(name)))
        return cost_model(read_model(Path(folder))[1])


def stride(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal bins in their order, like cards."""
    return [list(range(len(costs)))[rank::ranks] for rank in range(ranks)]


def batches(num_bins: int, size: int) -> Iterator[list[int]]:
    for step in range(STEPS):
        yield bins_for_step([num_bins], seed=SEED, step=step, global_batch_size=size)


def imbalance(shares: list[list[int]], costs: Sequence[float]) -> tuple[float, float]:
    """Return two ratios minus 1: costliest rank to mean rank, and the sum over slots of the costliest bin to the mean
    bin."""
    table = np.array([[costs[i] for i in share] for share in shares])
    totals = table.sum(1)
    return totals.max() / totals.mean() - 1, table.max(0).sum() / table.mean(0).sum() - 1


def lower_bounds(costs: Sequence[float], ranks: int) -> tuple[float, float]:
    """Return bounds that no deal can beat: the costliest bin with the cheapest bins; and sorted bins cut into slots."""
    rising = np.sort(costs)
    slots = len(rising) // ranks
    mean = rising.sum() / ranks
    company = max(mean, rising[-1] + rising[: slots - 1].sum())
    return company / mean - 1, rising[::-1][::ranks].sum() / mean - 1


def measure(how: Callable, plan: Plan, model: CostModel, ranks: int, micro_batches: int) -> tuple[np.ndarray, float]:
    """Return `imbalance` as (steps, 2 by the plan's costs + 2 by the true costs), and the seconds of one deal."""
    planned, true = costs_of(plan.planned, model), costs_of(plan.true, model)
    rows, seconds = [], 0.0
    for numbers in batches(len(planned), ranks * micro_batches):
        costs = [planned[n] for n in numbers]
        started = time.perf_counter()
        shares = how(costs, ranks)
        seconds += time.perf_counter() - started
        rows.append((*imbalance(shares, costs), *imbalance(shares, [true[n] for n in numbers])))
    return np.array(rows), seconds / STEPS


def bounds(plan: Plan, model: CostModel, ranks: int, micro_batches: int) -> np.ndarray:
    planned = costs_of(plan.planned, model)
    sizes = batches(len(planned), ranks * micro_batches)
    return np.array([lower_bounds([planned[n] for n in numbers], ranks) for numbers in sizes])


def print_model(name: str, plan: Plan) -> None:
    """Print both tables of one model."""
    model = sizes_of(name)
    planned, true = np.array(costs_of(plan.planned, model)), np.array(costs_of(plan.true, model))
    vision = sum(model.vision(work) for work in plan.planned) / planned.sum()
    relative = planned / planned.mean()
    low, high = np.percentile(relative, [1, 99])
    off = planned / true - 1
    print(f"\n## Qwen3-VL-{name}\n\nCost of a bin over the mean bin: standard deviation {relative.std():.3f},")
    print(f"1% of bins below {low:.2f}, 1% above {high:.2f}. Vision is {vision:.0%}.")
    print(f"The plan's cost is {off.mean():+.2%} off the true one, at worst {off.min():+.2%}.")
    found = []
    for layout in LAYOUTS:
        strided, _ = measure(stride, plan, model, *layout)
        found.append((*layout, strided, *measure(deal, plan, model, *layout), bounds(plan, model, *layout)))
    titles = (
        "Costliest rank over the mean rank, less 1 (ranks meet once a step):",
        "Costliest bin of each slot over the mean bin, less 1 (ranks meet at every micro batch):",
    )
    for column, title in enumerate(titles):
        print(f"\n{title}\n\n| dp | bins a rank | strided | dealt | no deal can beat | dealt, true cost | ms a deal |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for ranks, micro_batches, strided, dealt, seconds, bound in found:
            picked = (strided[:, column], dealt[:, column], bound[:, column], dealt[:, 2 + column])
            cells = " | ".join(f"{values.mean():.2%} ({values.max():.2%})" for values in picked)
            print(f"| {ranks} | {micro_batches} | {cells} | {1e3 * seconds:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=int, default=25_600, help="bins in the plan; dp 64 goes over them four times")
    args = parser.parse_args()
    started = time.perf_counter()
    plan = make_plan(args.bins)
    print(f"{len(plan.planned):,} bins of {SEQ_LEN:,} tokens planned in {time.perf_counter() - started:.0f} s;")
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}. Cells: mean (largest) of {STEPS} global batches."
    )
    for name in ("qwen3_vl_2b", "qwen3_vl_8b"):
        print_model(name, plan)


if __name__ == "__main__":
    main()
