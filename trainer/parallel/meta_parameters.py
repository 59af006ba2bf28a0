"""Models built on the meta device: each parameter, or a rank's rows of it, gets memory when its numbers are loaded."""

import contextlib
import ctypes
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from trainer.libraries.torch_private import first_row, parameters_of, replace_tensors

_MMAP_THRESHOLD = -3  # glibc's malloc.h


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give the parameters of modules that are built in this context shapes, but no memory."""

    def move(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
        return None if param is None or param.is_meta else _like(param, "meta")

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


def materialised(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """Return a parameter by its name in the model. One without memory first gets uninitialised memory on the CPU."""
    module, _, own = name.rpartition(".")
    held = parameters_of(model.get_submodule(module))
    if held[own].is_meta and not isinstance(held[own], DTensor):
        held[own] = _like(held[own], "cpu")
    return held[own]


def materialise_all(model: torch.nn.Module) -> None:
    """Give every parameter without memory uninitialised memory on the CPU."""
    for name in [name for name, _ in model.named_parameters()]:
        materialised(model, name)


def _like(param: torch.nn.Parameter, device: str) -> torch.nn.Parameter:
    moved = torch.nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
    moved.__dict__.update(param.__dict__)  # marks such as tensor_model_parallel
    return moved


def return_freed_memory() -> None:
    """Make glibc map every allocation of a megabyte or more separately, and unmap it when it is freed."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        # By default glibc raises this threshold up to 32 MB as large blocks are freed. Freed blocks below it stay in
        # the heap between blocks in use; after many matrices of unlike sizes the heap is several times as large as the
        # memory in use.
        set_option(_MMAP_THRESHOLD, 1 << 20)


@torch.no_grad()
def materialise_shards(model: torch.nn.Module, device: torch.device) -> None:
    """Allocate zeros on the device for a rank's rows of every parameter that FSDP2 divided without memory. Tensors with
    memory are moved there unchanged."""
    replace_tensors(model, lambda held: torch.zeros_like(held, device=device) if held.is_meta else held.to(device))


@torch.no_grad()
def copy_into(param: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter; into a divided parameter, only this rank's rows."""
    if not isinstance(param, DTensor):
        param.copy_(whole)
        return
    rows = param.to_local()
    first = first_row(param)
    rows.copy_(whole[first : first + len(rows)])
