"""A prediction of the time of a training step for each choice of the ranks that encode images. Nothing is run for it.

A rank's seconds are the FLOPs of its part of a mean bin, by the model's formulas, divided by a rate. All bins are taken
to be equal, and all images; no share of a bin's images is smaller than one image. Communication, data and the update
are left out, because they are much the same for all choices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainer.contract.parallel import ParallelConfig, VisionRanks
from trainer.contract.run import TrainConfig
from trainer.model.adapters import AdapterSizes
from trainer.model.shape import ModelShape, Work
from trainer.plan.estimate import estimate_memory, estimate_vision_rank, vision_in_flight
from trainer.plan.pieces import (
    EVEN_ENOUGH,
    language_flops,
    pipeline_pieces,
    vision_flops,
)

# FLOP/s of one H200 in bfloat16, the medians of eight trainings of Qwen3-VL and Qwen3.5, 2B to 8B: vision 313 to 458,
# language model and loss 499 to 580 TFLOP/s (tests/bench/results/vision_placement.md).
VISION_RATE = 420e12
LANGUAGE_RATE = 525e12
# Bytes of an H200 that CUDA leaves free.
GPU_MEMORY = 148e9
MOST_VISION_RANKS = 1024  # the bound of VisionRanks.ranks

Name = Literal["first_rank", "dealt", "own_ranks", "cached"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementJob:
    """The inputs of a prediction."""

    shape: ModelShape
    parallel: ParallelConfig  # the current layout
    train: TrainConfig
    processes: int
    seq_len: int
    max_patches: int
    work: Work  # the work in a mean bin with its images, see `mean_work`
    is_cached: bool = False  # the images were encoded before the training
    adapters: AdapterSizes | None = None  # sizes of the training's adapters; None: no adapters

    @property
    def pieces(self) -> tuple[range, ...]:
        """The language layers of the pipeline's pieces in the current layout."""
        work = self.work.without_images() if self.is_cached else self.work
        return pipeline_pieces(self.shape, self.parallel, work, self.train.frozen)

    @property
    def vision(self) -> float:
        """Seconds of one GPU for the images of a mean bin, forward and backward."""
        return vision_flops(self.shape, self.parallel, self.work, self.train.frozen) / VISION_RATE

    @property
    def vision_share(self) -> float:
        """The vision encoder's fraction of the seconds of one GPU for a mean bin."""
        alone = ParallelConfig(recompute=self.parallel.recompute)
        return self.vision / (self.vision + sum(self.language(alone, pipeline_pieces(self.shape, alone, self.work))))

    @property
    def largest_image(self) -> float:
        """The fraction of a bin's patches that one image has."""
        return self.work.patches_squared / self.work.patches**2 if self.work.patches else 0

    def language(self, parallel: ParallelConfig, pieces: Sequence[range]) -> list[float]:
        """Return each pipeline rank's seconds of the language model for a mean bin."""
        flops = language_flops(self.shape, parallel, self.work, self.train.frozen, pieces)
        return [rank / (parallel.tp * parallel.cp) / LANGUAGE_RATE for rank in flops]

    def memory(self, parallel: ParallelConfig, pieces: Sequence[range], dp: int, max_patches: int) -> dict[str, int]:
        """Return the bytes of the fullest rank that has language layers, by purpose."""
        sizes = {"seq_len": self.seq_len, "max_patches": max_patches, "adapters": self.adapters}
        return estimate_memory(self.shape, parallel, self.train, pieces=pieces, dp=dp, **sizes)


class RankSeconds(NamedTuple):
    """A rank's seconds of work in one step."""

    vision: float
    language: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A choice of the ranks that encode images, with the predicted time and memory of a step."""

    # first_rank: the first pipeline rank encodes all images of its bins; dealt: all pipeline ranks do; own_ranks: ranks
    # that do nothing else; cached: no rank, because the images were encoded before the training
    name: Name
    parallel: ParallelConfig  # the layout with this choice
    # seconds of each pipeline rank; with own_ranks, a rank with only vision follows them
    ranks: tuple[RankSeconds, ...]
    step: float  # seconds of a step
    start: float  # seconds of the step that the pipeline takes to fill and to empty
    memory: Mapping[str, int]  # bytes of the fullest process, by purpose

    @property
    def waits(self) -> list[float]:
        """The fraction of the step in which each of `ranks` is idle, including the pipeline's start and end."""
        return [1 - (rank.vision + rank.language) / self.step for rank in self.ranks]

    @property
    def bytes(self) -> int:
        """Bytes of the fullest process."""
        return sum(self.memory.values())


def current_placement(job: PlacementJob) -> Placement:
    """Return the choice that the current layout makes."""
    parallel = job.parallel
    if job.is_cached:
        return _in_pipeline(job, "cached")
    if parallel.vision_ranks:
        return _own_ranks(job, parallel)
    return _in_pipeline(job, "dealt" if parallel.deals_vision else "first_rank")


def placements(job: PlacementJob) -> list[Placement]:
    """Return all possible choices, the current one first. For own_ranks, only the fastest number of ranks is listed."""
    now, names = current_placement(job), list[Name]()
    if _divides(job, job.parallel.model_copy(update={"vision": "first_rank"})):
        names += ["first_rank", *(["dealt"] if job.parallel.pp > 1 else [])]
        names += ["cached"] if {"vision", "merger"} <= job.train.frozen else []
    own = [choice for choice in own_ranks(job) if choice != now]
    best = sorted(own, key=lambda choice: choice.step)[:1]
    return [now, *(_in_pipeline(job, name) for name in names if name != now.name), *best]


def _divides(job: PlacementJob, parallel: ParallelConfig) -> bool:
    """Whether the processes with the language model form whole replicas, among which a global batch divides evenly."""
    dp, rest = divmod(job.processes - parallel.vision_ranks, parallel.model_size)
    return rest == 0 and dp > 0 and job.train.global_batch_size % (dp * parallel.pp if parallel.vpp > 1 else dp) == 0


def recommended(choices: Sequence[Placement]) -> Placement:
    """Return the fastest choice that fits an H200, or the first one, which is current, if no choice gains more than
    2%."""
    now = choices[0]
    # If the current choice itself does not fit by the estimate, memory is not considered.
    room = GPU_MEMORY if now.bytes <= GPU_MEMORY else math.inf
    best = min((choice for choice in choices if choice.bytes <= room), key=lambda choice: choice.step)
    return now if now.step <= EVEN_ENOUGH * best.step else best


def own_ranks(job: PlacementJob) -> Iterator[Placement]:
    """Yield a placement for every valid number of vision ranks: it leaves whole replicas of the language model, among
    which a global batch divides evenly, and one of the numbers of encoders and of replicas is a multiple of the other.
    """
    tp = job.parallel.vision.tp if isinstance(job.parallel.vision, VisionRanks) else 1
    # The pipeline may be shorter than the current one, because fewer ranks are left for it.
    for pp in range(1, job.parallel.pp + 1 if job.parallel.sharding != "fsdp" else 1):
        changes = {"pp": pp, "first_pipeline_layers": None, "vision_split": "images"}
        shorter = job.parallel.model_copy(update=changes if pp > 1 else changes | {"vpp": 1})
        for dp in range(1, (job.processes - 1) // shorter.model_size + 1):
            ranks = job.processes - dp * shorter.model_size
            if ranks % tp == 0 and ranks <= MOST_VISION_RANKS:
                parallel = shorter.model_copy(update={"vision": VisionRanks(ranks=ranks, tp=tp)})
                is_shared = parallel.vision_encoders % dp == 0 or dp % parallel.vision_encoders == 0
                if is_shared and _divides(job, parallel):
                    yield _own_ranks(job, parallel)


def _own_ranks(job: PlacementJob, parallel: ParallelConfig) -> Placement:
    """Predict a step with ranks that only encode: they act as one more pipeline rank, which works on a later bin of
    each replica."""
    dp = parallel.data_parallel(job.processes)
    each, count = dp / parallel.vision_encoders, job.train.global_batch_size // dp
    pieces = pipeline_pieces(job.shape, parallel, job.work, job.train.frozen)
    language = job.language(parallel, pieces)
    vision = job.vision * max(each, job.largest_image) / parallel.vision.tp
    start = (sum(language) - max(language)) / parallel.vpp + min(vision, max(language))
    alone = estimate_vision_rank(
        job.shape,
        job.train,
        tp=parallel.vision.tp,
        recompute=parallel.recompute_vision,
        patches=job.max_patches * each,
        in_flight=min(vision_in_flight(parallel), count),
        adapters=job.adapters,
    )
    return Placement(
        name="own_ranks",
        parallel=parallel,
        ranks=(*(RankSeconds(0, count * seconds) for seconds in language), RankSeconds(count * vision, 0)),
        step=count * max(vision, *language) + start,
        start=start,
        memory=max(job.memory(parallel, pieces, dp, 0), alone, key=lambda parts: sum(parts.values())),
    )


def _in_pipeline(job: PlacementJob, name: Name) -> Placement:
    parallel = job.parallel
    if parallel.deals_vision != (name == "dealt") or parallel.vision_ranks:
        where = {"vision": "dealt", "vision_split": "images"} if name == "dealt" else {"vision": "first_rank"}
        parallel = parallel.model_copy(update=where | {"first_pipeline_layers": None})
    work = job.work.without_images() if name == "cached" else job.work
    pieces = pipeline_pieces(job.shape, parallel, work, job.train.frozen)
    vision, language = _vision_by_rank(job, parallel, name), job.language(parallel, pieces)
    busy = [sum(seconds) for seconds in zip(vision, language)]
    # All ranks encode dealt images at the same time; the rest of a bin passes through the ranks one after the other.
    through = language if name == "dealt" else busy
    dp = parallel.data_parallel(job.processes)
    count, start = job.train.global_batch_size // dp, (sum(through) - max(through)) / parallel.vpp
    return Placement(
        name=name,
        parallel=parallel,
        ranks=tuple(RankSeconds(count * v, count * seconds) for v, seconds in zip(vision, language)),
        step=count * max(busy) + start,
        start=start,
        memory=job.memory(parallel, pieces, dp, 0 if name == "cached" else job.max_patches),
    )


def _vision_by_rank(job: PlacementJob, parallel: ParallelConfig, name: Name) -> list[float]:
    """Return each pipeline rank's seconds of vision for a mean bin. If the shares differ, the first is the largest."""
    if name == "cached":
        return [0.0] * parallel.pp
    stages = parallel.pp if name == "dealt" else 1
    tp = parallel.tp if parallel.vision_split == "tensor_parallel" else 1  # ranks that divide each image's matrices
    sharers = stages * parallel.cp * parallel.tp // tp
    largest = max(1 / sharers, job.largest_image)
    others = (1 - largest) / max(1, sharers - 1) if stages > 1 else 0.0
    return [job.vision * share / tp for share in (largest, *[others] * (parallel.pp - 1))]
