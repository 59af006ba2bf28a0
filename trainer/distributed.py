"""Init and teardown of the process group, megatron-core's rank mesh, seeds. The only reader of torchrun's variables."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from dataset_builders.contracts.errors import InputError
from trainer.contract import ParallelConfig

TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place among the ranks."""

    rank: int
    world_size: int
    dp_rank: int
    dp: int
    device: torch.device
    groups: ProcessGroupCollection

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; a collective."""
        if self.world_size == 1:
            return flag
        tensor = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return bool(tensor.item())


def place_in_world() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun gives them; a process started by hand is a world of one."""
    return tuple(
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )


def set_threads(num_threads: int) -> None:
    """CPU threads of this process; 0 shares the cores among the processes of this host."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) // local))


@contextlib.contextmanager
def rank_mesh(parallel: ParallelConfig, seed: int) -> Iterator[Mesh]:
    """Join the process group, build megatron-core's groups, and leave them at the end.

    Raises:
        InputError: the world does not divide into model copies.
    """
    rank, local_rank, world = place_in_world()
    if world % parallel.model_size:
        raise InputError(
            f"{world} processes do not divide into copies of tp={parallel.tp} x pp={parallel.pp} x cp={parallel.cp} "
            f"= {parallel.model_size}; start a multiple of {parallel.model_size}"
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    _join(rank, world, "nccl" if cuda else "gloo")
    try:
        parallel_state.initialize_model_parallel(
            parallel.tp, parallel.pp, context_parallel_size=parallel.cp, create_gloo_process_groups=True
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        yield Mesh(rank, world, groups.dp.rank(), groups.dp.size(), device, groups)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _join(rank: int, world: int, backend: str) -> None:
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=world, timeout=TIMEOUT)
