"""The models that fit each GPU, trained completely or with adapters, by the estimate of `athanor plan`. On a CPU, in
seconds.

    python -m tests.bench.bench_adapter_memory

Bins, images and batch are those of the recipe `cauldron`. Every linear layer of the language model has adapters of rank
16.
"""

import platform
from collections.abc import Iterator
from typing import NamedTuple

from flows.pipeline.config import PipelineConfig
from flows.pipeline.recipe import load_recipe
from stages.inputs.config import EmbeddedModelConfig
from trainer.contract.adapter import AdapterConfig
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.model.family import Family
from trainer.model.registry import get_family
from trainer.model.shape import ModelShape
from trainer.model.targets import adapter_sizes
from trainer.plan.estimate import estimate_memory

VARIANTS = (
    *(f"qwen3_vl_{size}" for size in ("2b", "4b", "8b", "32b")),
    *(f"qwen3_5_{size}" for size in ("2b", "4b", "9b", "27b")),
)
# Bytes that a GPU of this many GB has besides CUDA's own. Measured for H100 and H200; others minus 2.6e9.
ROOM = {24: 23.1e9, 48: 45.7e9, 80: 82.4e9, 141: 148e9}
SPARE = 1.02  # for errors of the estimate; the reserve of torch's allocator is already part of it
ADAPTER = AdapterConfig(rank=16, alpha=32)
RECOMPUTED = ParallelConfig(recompute="full", recompute_vision=True)


class Way(NamedTuple):
    """A way to train."""

    name: str
    adapter: AdapterConfig | None


WAYS = (
    Way("whole model", None),
    Way("LoRA 16", ADAPTER),
    Way("LoRA 16, base in float8", ADAPTER.model_copy(update={"base": "float8"})),
)


def model_of(variant: str) -> tuple[Family, ModelShape]:
    """Return family and sizes of a variant."""
    model = EmbeddedModelConfig(variant=variant, seed=0)
    return get_family(model.family), model.shape


def memory(variant: str, way: Way, parallel: ParallelConfig, config: PipelineConfig) -> dict[str, int]:
    """Return the bytes on one GPU by purpose."""
    family, shape = model_of(variant)
    train: TrainConfig = config.train.model_copy(update={"adapter": way.adapter})
    return estimate_memory(
        shape,
        parallel,
        train,
        pieces=(range(shape.language.num_layers),),
        dp=1,
        seq_len=config.plan_bins.seq_len,
        max_patches=config.plan_bins.max_patches,
        adapters=adapter_sizes(train, family, shape),
    )


def smallest(number: float) -> str:
    """Return the smallest GPU with enough memory."""
    return next((f"{size} GB" for size, room in ROOM.items() if number * SPARE <= room), "none")


def rows(config: PipelineConfig) -> Iterator[str]:
    """Return the lines of the table."""
    yield "| model | trained | states GB | as it is GB | fits | recomputed GB | fits |"
    yield "| --- | --- | ---: | ---: | --- | ---: | --- |"
    for variant in VARIANTS:
        for way in WAYS:
            plain, again = (memory(variant, way, layout, config) for layout in (ParallelConfig(), RECOMPUTED))
            whole = [sum(parts.values()) for parts in (plain, again)]
            states = whole[0] - plain["activations"] - plain["reserve"]
            cells = [f"{total / 1e9:.1f} | {smallest(total)}" for total in whole]
            yield f"| {variant} | {way.name} | {states / 1e9:.1f} | {' | '.join(cells)} |"


def main() -> None:
    """Print the result file."""
    config = load_recipe("cauldron").config
    plan = config.plan_bins
    print("# What fits which GPU, trained whole or by adapters: estimates\n")
    print("    python -m tests.bench.bench_adapter_memory\n")
    rooms = ", ".join(f"{room / 1e9:.1f}" for room in ROOM.values())
    print(f"""\
Python {platform.python_version()}; nothing is run. Bins of {plan.seq_len:,} tokens and {plan.max_patches:,} patches
(the recipe `cauldron`), bfloat16, one GPU, moments in float32. LoRA 16: rank 16 beside every linear layer of the
language model, vision and mergers frozen. float8: `train.adapter.base=float8`, a byte per weight of the language
layers' matrices; the rest stays in bfloat16. Recomputed: `recompute=full` and `recompute_vision=true`. States: weights,
gradients and moments. A GPU of 24, 48, 80, 141 GB has {rooms} GB beside CUDA's own, {SPARE - 1:.0%} of which stay free.
""")
    print("\n".join(rows(config)))


if __name__ == "__main__":
    main()
