"""The data that each rank holds of one packed micro batch, in every parallel layout, for draw_layouts.py.

None of these data are written down here. megatron-core decides which ranks make a group, and the trainer's own
functions
decide which part of the bin each rank gets.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from dataset_builders.contracts.bins import Bin, SampleRef
from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import Kind, make_samples, sum_bin
from tests.helpers.shapes import QWEN_2B
from trainer.contract.parallel import ParallelConfig
from trainer.data.balance import deal, planned_work
from trainer.data.flops import cost_model
from trainer.data.micro_batch import Geometry, MicroBatch, make_micro_batch
from trainer.data.slices import zigzag_order
from trainer.families.qwen3_vl.model import image_groups
from trainer.parallel.mesh import Mesh
from trainer.plan.pieces import pipeline_pieces

SEQ_LEN = 48
GEOMETRY = Geometry(image_token_id=9, spatial_merge_size=2, patch_bytes=12)
BINS = [
    [Kind(10, ((1, 2, 2), (1, 4, 4))), Kind(9, ((1, 4, 6),)), Kind(10)],
    [Kind(21), Kind(25)],
    [Kind(9, ((1, 4, 6),)), Kind(12, ((1, 6, 4), (1, 4, 4)))],
    [Kind(12), Kind(20, ((1, 4, 4),)), Kind(11)],
]
ANSWER = 4  # tokens that are trained on, at the end of each sample


@dataclass(frozen=True)
class Layout:
    """A layout to draw. `says` is the line under its title."""

    title: str
    says: str
    ranks: int
    parallel: ParallelConfig


ONE = ParallelConfig()
LAYOUTS = {
    "one-process": Layout("One process", "the whole bin; everything below is cut from this", 1, ONE),
    "tp2": Layout("tp2", "both ranks hold all tokens; each encodes some images whole", 2, ParallelConfig(tp=2)),
    "tp2-sp": Layout(
        "tp2, sequence parallel",
        "attention, matrix products and loss see all tokens; between them each rank holds a run of equal length",
        2,
        ParallelConfig(tp=2, sequence_parallel=True),
    ),
    "tp2-vision": Layout(
        "tp2, vision_split=tensor_parallel",
        "both ranks encode all images, each with half of every matrix; nothing is left to gather",
        2,
        ParallelConfig(tp=2, vision_split="tensor_parallel"),
    ),
    "pp2": Layout("pp2", "layers divided; pixels and embedding first, loss last", 2, ParallelConfig(pp=2)),
    "pp2-dealt": Layout(
        "pp2, vision=dealt",
        "layers divided; both ranks encode some images whole, and the first one gets all image tokens",
        2,
        ParallelConfig(pp=2, vision="dealt"),
    ),
    "pp2-vpp2": Layout(
        "pp2, vpp2",
        "two pieces of the model a rank: a micro batch passes each rank twice",
        2,
        ParallelConfig(pp=2, vpp=2),
    ),
    "cp2": Layout(
        "cp2",
        "of 4 pieces of each segment rank 0 holds the first and the last, rank 1 the two between; images are shared",
        2,
        ParallelConfig(cp=2),
    ),
    "dp2": Layout("dp2", "the bins of a global batch, dealt by cost; the costliest of a rank comes first", 2, ONE),
    "tp2-sp-cp2": Layout(
        "tp2, sequence parallel, cp2",
        "context parallel cuts the bin, sequence parallel what is left; all four ranks share the images",
        4,
        ParallelConfig(tp=2, cp=2, sequence_parallel=True),
    ),
}


@dataclass(frozen=True)
class Group:
    """A process group on paper: its members, and the member that is looked at."""

    ranks: tuple[int, ...]
    me: int

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.me)


@dataclass(frozen=True)
class Part:
    """The part of a bin that one rank holds.

    Attributes:
        tokens: (t,) positions of the bin: those in attention and the matrix products.
        stream: (s,) positions of the bin: those in the residual stream between them.
        images: indexes of the images that the rank encodes; None is the blank image.
        chunks: indexes of the language layers of each piece of the model.
        stages: pipeline ranks that encode for this rank's coordinates in tensor and context parallel.
        encoders: ranks that gather image tokens from each other.
        users: ranks whose gradients of a gathered image token are summed.
    """

    mesh: Mesh
    batch: MicroBatch
    tokens: np.ndarray
    stream: np.ndarray
    images: list[int | None]
    chunks: list[range]
    stages: Group
    encoders: Group
    users: Group

    @property
    def embeds(self) -> bool:
        return self.mesh.groups.pp.rank() == 0

    @property
    def name(self) -> str:
        groups = self.mesh.groups
        sizes = {"tp": groups.tp, "cp": groups.cp, "pp": groups.pp, "dp": groups.dp}
        return ", ".join(f"{name} {group.rank()}" for name, group in sizes.items() if group.size() > 1)

    @property
    def has_loss(self) -> bool:
        return self.chunks[-1][-1] == QWEN_2B.language.num_layers - 1


def mesh_on_paper(parallel: ParallelConfig, rank: int, ranks: int) -> Mesh:
    """Return the mesh that `rank_mesh` would give this rank, without a process group."""
    order = inspect.signature(parallel_state.initialize_model_parallel).parameters["order"].default
    dp = ranks // parallel.model_size
    generator = parallel_state.RankGenerator(parallel.tp, 1, dp, parallel.pp, parallel.cp, order)

    def group(token: str) -> Group:
        return Group(next(tuple(found) for found in generator.get_ranks(token) if rank in found), rank)

    groups = ProcessGroupCollection(
        tp=group("tp"), cp=group("cp"), pp=group("pp"), dp=group("dp"), tp_cp=group("tp-cp")
    )
    device = torch.device("cpu")
    return Mesh(rank, ranks, groups.dp.rank(), dp, device, groups, alone=Group((rank,), rank))


def make_bin(number: int) -> list[TokenizedSample]:
    """Return the samples of a bin, each with its answer at its end."""
    samples = make_samples(BINS[number], GEOMETRY, range(20, 90), seed=number)
    return [dataclasses.replace(s, loss_mask=_answer(len(s.input_ids))) for s in samples]


def _answer(length: int) -> np.ndarray:
    return (np.arange(length) >= length - ANSWER).astype(np.uint8)


def pixels_of(samples: Sequence[TokenizedSample]) -> list[bytes]:
    """Return the bytes of each image of a bin. No two are the same."""
    images = []
    for sample in samples:
        bounds = np.cumsum(sample.image_grid_thw.prod(-1))[:-1]
        images += [patches.tobytes() for patches in np.split(sample.patches, bounds)] if len(sample.patches) else []
    return images


def parts_of(parallel: ParallelConfig, ranks: int, samples: Sequence[TokenizedSample]) -> list[Part]:
    """Return the part of a bin that each rank of a layout holds."""
    return [_part(parallel, mesh_on_paper(parallel, rank, ranks), samples) for rank in range(ranks)]


def _part(parallel: ParallelConfig, mesh: Mesh, samples: Sequence[TokenizedSample]) -> Part:
    cut = mesh.slice_of_bin(parallel)
    batch = make_micro_batch(samples, GEOMETRY, SEQ_LEN, cut)
    sizes = batch.vision_cu_seqlens.diff().tolist()
    tokens = zigzag_order(batch.cu_seqlens.numpy(), cut.cp).reshape(cut.cp, -1)[cut.cp_rank]
    numbers = {image: number for number, image in enumerate(pixels_of(samples))}
    encoders, users = image_groups(mesh.groups, parallel)
    work = planned_work(sum_bin(planned_bin(samples)), SEQ_LEN)
    pieces = pipeline_pieces(QWEN_2B, parallel, work)
    return Part(
        mesh,
        batch,
        tokens,
        np.split(tokens, cut.sequence_ranks)[cut.sequence_rank],
        [numbers.get(image.numpy().tobytes()) for image in batch.patches.split(sizes)],
        list(pieces[mesh.groups.pp.rank() :: parallel.pp]),
        mesh.groups.pp if parallel.deals_vision else mesh.alone,
        encoders,
        users,
    )


def joined_images(parts: Mapping[int, Part] | Sequence[Part], part: Part) -> list[tuple[int, int]]:
    """Return (image, token of it) of each row that the pipeline ranks with a first rank's coordinates have encoded, its
    own rows first."""
    shares = []
    for stage in (parts[rank] for rank in part.stages.ranks):
        sizes = [patches // GEOMETRY.spatial_merge_size**2 for patches in stage.batch.image_patches]
        shares.append([(i, token) for i in stage.images if i is not None for token in range(sizes[i])])
    assert tuple(map(len, shares)) == (part.batch.encoded_rows, *part.batch.arriving_rows)
    return list(itertools.chain.from_iterable(shares))


def gathered_images(parts: Mapping[int, Part] | Sequence[Part], part: Part) -> list[tuple[int, int] | None]:
    """Return (image, token of it) of each row that a rank has gathered; None is padding.

    Args:
        parts: the parts of all ranks, by rank.
    """
    rows = []
    for place in (parts[rank] for rank in part.encoders.ranks):
        mine = joined_images(parts, place)
        rows += mine + [None] * (part.batch.gathered_rows - len(mine))
    return rows


def planned_bin(samples: Sequence[TokenizedSample]) -> Bin:
    return tuple(
        SampleRef(
            s.key, "", 0, 0, len(s.input_ids), int(s.loss_mask[1:].sum()), len(s.patches), len(s.image_grid_thw), 0
        )
        for s in samples
    )


def deal_bins(ranks: int) -> tuple[list[float], list[list[int]]]:
    """Return (cost of each bin, bins of each rank) of a global batch of all bins, dealt as the trainer deals it."""
    costs = [cost_model(QWEN_2B).planned_cost(sum_bin(planned_bin(make_bin(n))), SEQ_LEN) for n in range(len(BINS))]
    return costs, deal(costs, ranks)
