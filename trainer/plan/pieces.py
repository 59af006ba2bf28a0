"""The assignment of language layers to the pieces of a pipeline, by cost: a pure function that every process computes.

Cost is FLOPs by the model's formulas, in whole numbers, so that every host compares equal values. It depends only on
the model, the layout, the frozen parts and the plan of the bins: every rank and every resumed run get the same pieces.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.errors import MANIFEST, damaged
from dataset_builders.storage.store import StorePath
from trainer.contract.parallel import ParallelConfig
from trainer.model.shape import ModelShape, Work

# Equal pieces are kept if their costliest rank costs at most this factor more: no cost model is more exact.
EVEN_ENOUGH = 1.02
# What plan_bins counts of each subset.
_SUMS = {"num_samples", "num_tokens", "num_loss_tokens", "num_patches", "num_images"}


class PipelineRoom(NamedTuple):
    """The bounds that a layout sets for its pieces, in the order of the model; piece i is on pipeline rank i % pp."""

    least: list[int]  # minimum number of layers of each piece
    groups: list[tuple[Sequence[int], int]]  # groups of pieces, each with the number of layers that its pieces share


def pipeline_room(shape: ModelShape, parallel: ParallelConfig) -> PipelineRoom:
    """Return the bounds: at least one layer per piece, and in the first piece one per deepstack level. With
    `first_pipeline_layers` the first rank's pieces are one group, and all remaining pieces are another."""
    pieces, layers, first = range(parallel.pp * parallel.vpp), shape.language.num_layers, parallel.first_pipeline_layers
    least = [max(1, shape.num_deepstack), *(1 for _ in pieces[1:])]
    if first is None:
        return PipelineRoom(least, [(pieces, layers)])
    mine = pieces[:: parallel.pp]
    return PipelineRoom(least, [(mine, first), ([i for i in pieces if i not in mine], layers - first)])


def mean_work(seq_len: int, bins: Manifest, directory: StorePath) -> Work:
    """Return the work in a mean training bin, in whole numbers, from what plan_bins says of its epochs. Every sample
    and every image is taken to have the mean size of its subset.

    Args:
        bins: the manifest in `directory`.

    Raises:
        DamagedFile: the manifest does not say it. A guess would divide the layers for other bins than these.
    """
    epochs = bins.stats.get("epochs", [])
    num_bins = sum(epoch.get("num_bins", 0) for epoch in epochs)
    subsets = [sums for epoch in epochs for sums in epoch.get("subsets", {}).values()]
    missing = {name for sums in subsets for name in _SUMS - sums.keys()} if num_bins and subsets else {"epochs"}
    if missing:
        raise damaged(
            directory / MANIFEST, f"does not say what the bins hold: stats has no {', '.join(sorted(missing))}"
        )

    def mean(name: str) -> int:
        return sum(sums[name] for sums in subsets) // num_bins

    def mean_squares(name: str, of: str) -> int:
        return sum(sums[name] ** 2 // max(1, sums[of]) for sums in subsets) // num_bins

    tokens, patches = mean_squares("num_tokens", "num_samples"), mean_squares("num_patches", "num_images")
    return Work(seq_len, mean("num_loss_tokens"), tokens, mean("num_patches"), patches)


def full_work(seq_len: int, max_patches: int) -> Work:
    """Return the work in a full bin, for a forecast before there are bins: a loss at every token, and all patches that
    fit. The squares need the samples and are left out."""
    return Work(seq_len, seq_len, 0, max_patches, 0)


def pipeline_pieces(
    shape: ModelShape, parallel: ParallelConfig, work: Work, frozen: Collection[str] = ()
) -> tuple[range, ...]:
    """Return the indices of the language layers of each piece, in the order of the model; rank r has pieces[r::pp].

    Single layers move between pieces as long as this makes the costliest rank cheaper. `check_layout` has checked that
    the layers fit.
    """
    if parallel.pp == 1:
        return (range(shape.language.num_layers),)
    room, costs = pipeline_room(shape, parallel), _costs(shape, parallel, work, frozen)
    even = best = _even(room)
    # Compared with all splits, 700 random models were at most 1.1% off, and 1.9% with two pieces a rank.
    while costs.of(moved := min(_moved(best, room), key=costs.of, default=best)) < costs.of(best):
        best = moved
    is_even = all(max(even[i] for i in group) == min(even[i] for i in group) for group, _ in room.groups)
    if is_even and costs.of(even)[0] <= EVEN_ENOUGH * costs.of(best)[0]:
        best = even
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(best, initial=0)))


def language_flops(
    shape: ModelShape, parallel: ParallelConfig, work: Work, frozen: Collection[str], pieces: Sequence[range]
) -> list[int]:
    """Return each pipeline rank's FLOPs of the language model for a bin, forward and backward, with these pieces."""
    costs = _costs(shape, parallel, work.without_images(), frozen)
    return costs.ranks(costs.pieces([len(piece) for piece in pieces]))


def vision_flops(shape: ModelShape, parallel: ParallelConfig, work: Work, frozen: Collection[str]) -> int:
    """Return the FLOPs of the vision encoder for a bin: forward, backward for inputs and for weights, and forward again
    if its layers are recomputed. A frozen encoder only runs forward."""
    flops = shape.forward_flops
    forward = flops["per_patch"] * work.patches + flops["per_patch_squared"] * work.patches_squared
    return round(forward * (1 if "vision" in frozen else 3 + parallel.recompute_vision))


class _Costs(NamedTuple):
    before: list[int]  # total cost of the layers before each layer
    first: int  # cost of the first piece in addition to its layers
    last: int  # cost of output layer and loss
    pp: int

    def of(self, counts: Sequence[int]) -> tuple[int, int, int]:
        """Return the sort key to minimise: costliest rank, sum of squared rank costs, sum of squared piece costs."""
        pieces = self.pieces(counts)
        ranks = self.ranks(pieces)
        return max(ranks), sum(cost * cost for cost in ranks), sum(cost * cost for cost in pieces)

    def ranks(self, pieces: Sequence[int]) -> list[int]:
        """Return the cost of each pipeline rank, given the costs of the pieces."""
        return [sum(pieces[rank :: self.pp]) for rank in range(self.pp)]

    def pieces(self, counts: Sequence[int]) -> list[int]:
        """Return the cost of each piece, given its number of layers."""
        bounds = [self.before[bound] for bound in accumulate(counts, initial=0)]
        pieces = [stop - start for start, stop in pairwise(bounds)]
        pieces[0] += self.first
        pieces[-1] += self.last
        return pieces


def _costs(shape: ModelShape, parallel: ParallelConfig, work: Work, frozen: Collection[str]) -> _Costs:
    decoder = shape.language
    # Forward, backward for inputs and for weights, and forward again if recomputed.
    passes = 3 - ("language" in frozen) + (parallel.recompute == "full")
    flops = decoder.layer_flops
    layers = []
    for number, (before, after, squared) in enumerate(flops):
        rows = work.loss_tokens if number == len(flops) - 1 else work.tokens
        layers.append(round(passes * (before * work.tokens + after * rows + squared * work.tokens_squared)))
    # Dealt vision costs all ranks alike, and vision on other ranks costs the pipeline nothing.
    is_elsewhere = parallel.deals_vision or parallel.vision_ranks
    first = 0 if is_elsewhere else vision_flops(shape, parallel, work, frozen)
    logits = 2 * decoder.hidden_size * decoder.vocab_size * work.loss_tokens
    logits *= (3 - ("language" in frozen)) * (1 if decoder.mtp is None else 2)
    # Multi-token prediction is beside the output layer.
    last = round(logits) + sum(layers[decoder.num_layers :])
    return _Costs(list(accumulate(layers[: decoder.num_layers], initial=0)), first, last, parallel.pp)


def _even(room: PipelineRoom) -> tuple[int, ...]:
    """Return numbers of layers that are as equal as the bounds allow."""
    counts = list(room.least)
    for group, layers in room.groups:
        for _ in range(layers - sum(counts[i] for i in group)):
            counts[min(group, key=counts.__getitem__)] += 1
    return tuple(counts)


def _moved(counts: tuple[int, ...], room: PipelineRoom) -> Iterator[tuple[int, ...]]:
    """Yield every split in which one layer has moved to another piece of its group."""
    for group, _ in room.groups:
        for source in group:
            for target in group if counts[source] > room.least[source] else ():
                if target != source:
                    moved = list(counts)
                    moved[source] -= 1
                    moved[target] += 1
                    yield tuple(moved)
