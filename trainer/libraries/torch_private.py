"""The private parts of torch that the trainer uses. They are equal in torch 2.11 to 2.13.

`tests/trainer/libraries/test_torch_private.py` compares them with the installed torch.
"""

import datetime
import io
from collections.abc import Callable
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup, Store
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo, _write_item
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dataset_builders.known_version import check_version

KNOWN = "<2.14,>=2.11"
check_version("torch", KNOWN, __name__, "a call may fail in the middle of a training", refuses=False)

foreach_add, foreach_copy, foreach_multiply = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_
foreach_norm, foreach_zero = torch._foreach_norm, torch._foreach_zero_
flash_attention = torch.ops.aten._flash_attention_forward
efficient_attention = torch.ops.aten._efficient_attention_forward
flatten_together, views_of_flat = _flatten_dense_tensors, _unflatten_dense_tensors
set_in_nested, write_entry = set_element, _write_item  # of a checkpoint's state, and of its files
_BACKENDS = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dictionary that holds a module's own parameters. A change of it changes the module."""
    return module._parameters


def replace_tensors(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace all parameters and buffers of a module and of the modules within it."""
    module._apply(change)


def innermost_hooks() -> tuple[Callable, Callable] | None:
    """Return the innermost hooks (pack, unpack) for tensors that autograd saves; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def first_row(tensor: DTensor) -> int:
    """Return the index in the whole tensor of the first row that this rank holds."""
    _, (first, *_) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return first


def separate_group(
    backend: str, store: Store, rank: int, size: int, timeout: datetime.timedelta, device: torch.device
) -> ProcessGroup:
    """Make a process group that belongs to no torch.distributed world."""
    group = ProcessGroup(store, rank, size)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        messages = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        messages = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group._register_backend(torch.device(device.type), _BACKENDS[backend], messages)
    group._set_default_backend(_BACKENDS[backend])
    return group


class EntryReader(FileSystemReader):
    """A reader of checkpoints whose subclass reads the bytes of each entry in `read_entry`."""

    def read_entry(self, file: BinaryIO, name: str, start: int, length: int) -> bytes:
        """Return the bytes of an entry."""
        raise NotImplementedError

    def _slice_file(self, file: BinaryIO, sinfo: _StorageInfo) -> BinaryIO:
        return io.BytesIO(self.read_entry(file, sinfo.relative_path, sinfo.offset, sinfo.length))
