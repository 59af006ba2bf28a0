"""Set-up and end of the process group, megatron-core's rank mesh, seeds. Only this file reads torchrun's variables."""

import contextlib
import datetime
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.contract.parallel import ParallelConfig
from trainer.data.slices import RankSlice
from trainer.parallel.vision.world import VisionWorld, join
from trainer.parallel.watch import RankAddress, watched
from trainer.plan.layout import check_world

T = TypeVar("T")
log = logging.getLogger("athanor.trainer")
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The position of this process among the ranks of its world."""

    rank: int
    world_size: int
    dp_rank: int
    dp: int
    device: torch.device
    groups: ProcessGroupCollection
    alone: dist.ProcessGroup  # the process group of only this rank
    # connects the language model's ranks with those that only encode images; None without such ranks
    vision_world: VisionWorld | None = None
    # all ranks, in a group whose messages do not pass through the devices and so do not wait for them; None: the world
    # is such a group
    hosts: dist.ProcessGroup | None = None

    def slice_of_bin(self, parallel: ParallelConfig, *, has_vision: bool = True) -> RankSlice:
        """Return the part of every bin that this rank works on."""
        tp, cp, pp = self.groups.tp, self.groups.cp, self.groups.pp
        # Tensor-parallel ranks encode different images each, or share the matrices for every image.
        encoders = self.groups.tp_cp if parallel.vision_split == "images" else cp
        is_first, shares, share = pp.rank() == 0, encoders.size(), encoders.rank()
        if parallel.deals_vision:
            shares, share = shares * pp.size(), share + shares * pp.rank()
        elif parallel.vision_ranks:
            shares, share = parallel.encoders_of_replica(self.dp), None
        return RankSlice(
            pad_multiple=parallel.pad_multiple,
            cp=cp.size(),
            cp_rank=cp.rank(),
            sequence_ranks=tp.size() if parallel.sequence_parallel else 1,
            sequence_rank=tp.rank() if parallel.sequence_parallel else 0,
            vision_ranks=encoders.size(),
            vision_rank=encoders.rank(),
            vision_shares=shares,
            vision_share=share,
            has_vision=has_vision and (is_first or parallel.deals_vision),
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and not self.is_vision

    @property
    def is_vision(self) -> bool:
        """Whether this rank encodes images and does nothing else."""
        return self.vision_world is not None and self.vision_world.is_vision

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set on any rank; one collective of hosts."""
        if self.world_size == 1:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.int)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.hosts)
        return [bool(flag) for flag in tensor.tolist()]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on all ranks; a collective."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def from_main(self, value: T) -> T:
        """Return rank 0's value; a collective."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


def place_in_world() -> tuple[int, int, int]:
    """Return (rank, local rank, world size) from torchrun; a process started by hand is a world of one."""
    return tuple(
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )


def processes_here() -> int:
    """Return the number of this training's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def set_threads(num_threads: int) -> None:
    """Set the CPU threads of this process; 0 shares the cores among the processes of this host."""
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) // processes_here()))


@contextlib.contextmanager
def rank_mesh(parallel: ParallelConfig, seed: int, on_lost: Callable[[str], None] = log.error) -> Iterator[Mesh]:
    """Join the process group, build megatron-core's groups, and leave them at the end. Ranks that only encode images
    are data-parallel ranks of a separate world.

    Args:
        on_lost: called with a line that names the lost ranks when other ranks are gone; then this process ends.
    """
    rank, local_rank, world = place_in_world()
    check_world(parallel, world)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    vision_world = None
    if parallel.vision_ranks:
        vision_world = join(rank, world, parallel.vision, TIMEOUT, device)
        # All that is not tensor parallel is data parallel there.
        parallel = ParallelConfig(tp=parallel.vision.tp) if vision_world.is_vision else parallel
    else:
        _join(rank, world, "nccl" if cuda else "gloo")

    def gather_addresses(own: RankAddress) -> list[RankAddress]:
        """Gather over the whole job: the process group has only the ranks of this rank's own world."""
        return [RankAddress.of_text(text) for text in vision_world.gather("watch", own.text())]

    try:
        with watched(rank, world, on_lost, gather_addresses if vision_world is not None else None):
            parallel_state.initialize_model_parallel(
                parallel.tp,
                parallel.pp,
                virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
                context_parallel_size=parallel.cp,
                expert_model_parallel_size=parallel.ep,
                expert_tensor_parallel_size=1,  # tensor-parallel ranks do not divide an expert
                create_gloo_process_groups=True,  # `get_megatron_optimizer` takes those of the data-parallel ranks
            )
            tensor_parallel.model_parallel_cuda_manual_seed(seed)  # its generators need the groups
            groups = ProcessGroupCollection.use_mpu_process_groups()
            # Each rank makes only its own: without local synchronisation all ranks would have to make all of them.
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            # On a CPU the world itself is a gloo group.
            hosts = dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda and dist.get_world_size() > 1 else None
            dp = groups.dp
            if vision_world is not None and not vision_world.is_vision:
                # Ranks that encode wait for these in `VisionWorld.places`.
                vision_world.publish_place(dp.rank(), groups.tp_cp.rank() if groups.pp.rank() == 0 else None)
            yield Mesh(
                dist.get_rank(), dist.get_world_size(), dp.rank(), dp.size(), device, groups, alone, vision_world, hosts
            )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _join(rank: int, world: int, backend: str) -> None:
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        # Started by hand, or in a test: there is no rendezvous.
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=world, timeout=TIMEOUT)
