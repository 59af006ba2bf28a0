"""Recomputation: backward computes whole modules again in place of keeping what is inside, or single cheap results.

A norm, an activation or a gate reads and writes its numbers once, which a GPU does in a few microseconds, while what it
returns, kept for the product after it, would be a quarter of the memory of a layer (tests/bench/results/memory.md).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

_whole = threading.local()  # backward runs in threads of its own


def recomputed(module: Callable, *args: object, is_random: bool = False, **kwargs: object):
    """Return the output of `module`, keeping only its inputs; the backward pass computes `module` again, with the same
    random numbers if it draws any (`is_random`)."""
    return checkpoint(_as_a_whole, module, *args, use_reentrant=False, preserve_rng_state=is_random, **kwargs)


def _as_a_whole(module: Callable, *args: object, **kwargs: object):
    outer, _whole.runs = getattr(_whole, "runs", False), True
    try:
        return module(*args, **kwargs)
    finally:
        _whole.runs = outer


@contextmanager
def not_kept(result: torch.Tensor, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Iterator[None]:
    """Let what is computed inside keep no copy of `result`: backward computes function(*inputs) again, which must have
    the same bits and read only tensors that are kept anyway.

    Inside a module that is recomputed as a whole it does nothing: the inputs would be kept.
    """
    if getattr(_whole, "runs", False) or not torch.is_grad_enabled():
        yield
        return
    place, shape = result.untyped_storage().data_ptr(), result.shape
    inputs, latest = [x.detach() for x in inputs], lambda: None

    def pack(x: torch.Tensor) -> torch.Tensor | torch.Size:
        # A tensor that Transformer Engine has quantised is an object around others, without a storage of its own.
        if type(x) is not torch.Tensor:
            return x
        if x.untyped_storage().data_ptr() == place and x.numel() == shape.numel() and x.is_contiguous():
            return x.shape
        return x.detach()  # with its graph it would keep itself alive

    def unpack(packed: torch.Tensor | torch.Size) -> torch.Tensor:
        nonlocal latest
        if isinstance(packed, torch.Tensor):
            return packed
        again = latest()  # a layer and its adapter read it one after the other
        if again is None:
            with torch.no_grad():
                again = function(*inputs)
            latest = ref(again)
        return again.view(packed)

    with saved_tensors_hooks(pack, unpack):
        yield
