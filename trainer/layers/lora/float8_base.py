"""A frozen base in 8 bits: the weights of the language model's linear layers as float8 numbers, and nowhere else.

A number is an e4m3 number times a power of two, one for each row of the weight: so it is a number of bfloat16 too, and
every device, precision and layout unpacks the same. A layer's weight exists unpacked while its product runs, forward
and again backward: activations and products are those of the layer without float8.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from trainer.layers.kernels.permission import can_import, kernels_run
from trainer.model.rules import global_names

if can_import():
    from trainer.layers.kernels.float8 import unpack_rows

LARGEST = 448.0  # of e4m3
_SMALLEST_EXPONENT = -100  # of a row's factor: what is unpacked is no subnormal number, which devices treat differently
_LAYERS, _WEIGHT = "language.decoder.layers.", ".weight"


def pack(weight: torch.Tensor, sharers: ProcessGroup | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, width) numbers -> the same as uint8 codes of e4m3 numbers, and the factor of each row, (rows,) float32.

    Args:
        sharers: tensor-parallel ranks that hold other columns of the same rows; None: these are whole.
    """
    largest = weight.abs().amax(1).float()
    if sharers is not None and sharers.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=sharers)
    exponent = torch.frexp(largest / LARGEST).exponent.clamp(min=_SMALLEST_EXPONENT)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return (weight / scale[:, None].to(weight.dtype)).to(torch.float8_e4m3fn).view(torch.uint8), scale


def unpack(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `pack` gave -> (rows, width) numbers, exactly."""
    if kernels_run(codes.device):
        return unpack_rows(codes, scale, dtype)
    return codes.view(torch.float8_e4m3fn).to(dtype).mul_(scale[:, None])


class _Part(NamedTuple):
    """A view of an unpacked weight."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Graph:
    """What autograd keeps of one forward pass of a packed layer: the weight as its place, all else as before.

    A layer may save its weight several times; in backward it is unpacked once for all of them. Of hooks torch calls
    the innermost alone, so these pass on what a recomputation is to see.
    """

    def __init__(self, linear: Any) -> None:
        self._linear, self._unpacked = linear, None
        self._saved = self._taken = 0
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._keep, self._give = outer or (_itself, _itself)

    def save(self, tensor: torch.Tensor) -> object:
        if tensor.untyped_storage().data_ptr() != self._linear.weight.untyped_storage().data_ptr():
            return self._keep(tensor)
        self._saved += 1
        return _Part(tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(self, kept: object) -> torch.Tensor:
        if not isinstance(kept, _Part):
            return self._give(kept)
        weight = self._linear.weight if self._unpacked is None else self._unpacked
        self._taken += 1
        self._unpacked = weight if self._taken % self._saved else None
        return weight.as_strided(*kept)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.cache
def _with_float8(kind: type) -> type:
    """The class of linear layers of this kind whose weight is packed."""

    class WithFloat8(kind):
        @property
        def weight(self) -> torch.Tensor:
            """(out, in) unpacked: the same tensor while the layer runs, else a new one."""
            held = self._parameters["weight"]
            if held.dtype is not torch.uint8:
                return held
            return unpack(held.detach(), self.row_scale, self.config.params_dtype)

        def forward(self, *args: object, **kwargs: object):
            codes, weight, graph = self._parameters["weight"], self.weight, _Graph(self)
            self._parameters["weight"] = weight  # Transformer Engine looks at the types of all parameters
            try:
                with saved_tensors_hooks(graph.save, graph.restore):
                    return super().forward(*args, **kwargs)
            finally:
                self._parameters["weight"] = codes
                weight.untyped_storage().resize_(0)  # Transformer Engine 2.11 keeps a reference that it does not use

    WithFloat8.__name__ = f"{kind.__name__}WithFloat8"
    return WithFloat8


def pack_layer(linear: Any, device: torch.device) -> None:
    """Hold a linear layer's weight as float8 on a device from now on: its parameter has the codes. A collective of the
    tensor-parallel ranks if these divide its input."""
    whole = linear.weight
    divides_input = getattr(whole, "tensor_model_parallel", False) and whole.partition_dim == 1
    codes, scale = pack(whole.detach().to(device), linear.tp_group if divides_input else None)
    param = torch.nn.Parameter(codes, requires_grad=False)
    param.__dict__.update(whole.__dict__)
    linear._parameters["weight"] = param
    linear.register_buffer("row_scale", scale, persistent=False)
    linear.__class__ = _with_float8(type(linear))


def base_packer(model: torch.nn.Module, device: torch.device, packed: Collection[str]) -> Callable[[str], None]:
    """A function that packs a chunk's weight on its way to the device, by our name of it in the whole model; it leaves
    alone what is not a matrix of a language layer.

    Args:
        packed: names of the weights of linear layers that are frozen.
    """
    names = zip(global_names(model), model.named_parameters(), strict=True)
    linears = {
        ours: model.get_submodule(name.removesuffix(_WEIGHT))
        for (ours, _), (name, _) in names
        if ours.startswith(_LAYERS) and ours in packed
    }

    def pack_weight(ours: str) -> None:
        if ours in linears:
            pack_layer(linears[ours], device)

    return pack_weight
