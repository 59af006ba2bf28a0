"""A frozen base in 8 bits: the weights of the language model's linear layers are held only as float8.

A value is an e4m3 number times a power of two, one power for each row of the weight. So every value is exact in
bfloat16, and unpacks the same on every device, in every precision and layout. A layer's weight exists unpacked only
while its product runs, once forward and once backward. Activations and products are the same as without float8.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from trainer.layers.kernel_support import can_import, kernels_run
from trainer.libraries.torch_private import innermost_hooks, parameters_of
from trainer.model.rules import LAYERS, global_names

if can_import():
    from trainer.layers.kernels import unpack_rows

LARGEST = 448.0  # largest e4m3 number
_SMALLEST_EXPONENT = -100  # of a row's factor; avoids subnormal values, which devices treat differently


def pack(weight: torch.Tensor, sharers: ProcessGroup | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack (rows, width) values to (rows, width) uint8 e4m3 codes and the (rows,) float32 factor of each row.

    Args:
        sharers: tensor-parallel ranks that hold other columns of the same rows; None if the rows are whole.
    """
    largest = weight.abs().amax(1).float()
    if sharers is not None and sharers.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=sharers)
    exponent = torch.frexp(largest / LARGEST).exponent.clamp(min=_SMALLEST_EXPONENT)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return (weight / scale[:, None].to(weight.dtype)).to(torch.float8_e4m3fn).view(torch.uint8), scale


def unpack(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack the codes and factors from `pack` to (rows, width) values, exactly."""
    if kernels_run(codes.device):
        values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        unpack_rows(codes[None], scale, values[None])
        return values
    return codes.view(torch.float8_e4m3fn).to(dtype).mul_(scale[:, None])


class _WeightView(NamedTuple):
    """A view of an unpacked weight."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedWeight:
    """The hooks for tensors that autograd saves in one forward pass of a packed layer.

    A view of the weight is saved as its size, stride and offset, every other tensor as it is. A layer may save its
    weight several times; backward unpacks it once for all of them.
    """

    def __init__(self, linear: Any) -> None:
        self._linear, self._unpacked = linear, None
        self._saved = self._taken = 0  # counted, because the unpacked weight is freed with the last that is taken
        # torch calls only the innermost hooks, so these pass all other tensors on to the outer ones, which a
        # recomputation needs.
        outer = innermost_hooks()
        self._outer_pack, self._outer_unpack = outer or (_itself, _itself)

    def save(self, tensor: torch.Tensor) -> object:
        # The same memory, and so the weight or a view of it: its transpose, or what Transformer Engine reshapes.
        if tensor.untyped_storage().data_ptr() != self._linear.weight.untyped_storage().data_ptr():
            return self._outer_pack(tensor)
        self._saved += 1
        return _WeightView(tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(self, kept: object) -> torch.Tensor:
        if not isinstance(kept, _WeightView):
            return self._outer_unpack(kept)
        weight = self._linear.weight if self._unpacked is None else self._unpacked
        self._taken += 1
        self._unpacked = weight if self._taken % self._saved else None
        return weight.as_strided(*kept)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.cache
def _with_float8(kind: type) -> type:
    """Return the subclass of `kind` for linear layers whose weight is packed."""

    class WithFloat8(kind):
        @property
        def weight(self) -> torch.Tensor:
            """The unpacked weight (out, in): the same tensor while the layer runs, otherwise a new one."""
            held = parameters_of(self)["weight"]
            if held.dtype is not torch.uint8:
                return held
            return unpack(held.detach(), self.row_scale, self.config.params_dtype)

        def forward(self, *args: object, **kwargs: object):
            codes, weight, saved = parameters_of(self)["weight"], self.weight, _SavedWeight(self)
            parameters_of(self)["weight"] = weight  # Transformer Engine checks the dtypes of all parameters
            try:
                with saved_tensors_hooks(saved.save, saved.restore):
                    return super().forward(*args, **kwargs)
            finally:
                parameters_of(self)["weight"] = codes
                weight.untyped_storage().resize_(0)  # a layer of Transformer Engine 2.11 keeps a reference

    WithFloat8.__name__ = f"{kind.__name__}WithFloat8"
    return WithFloat8


def pack_layer(linear: Any, device: torch.device) -> None:
    """Hold a linear layer's weight as float8 on a device from now on; the layer's parameter then holds the codes.

    This is a collective of the tensor-parallel ranks if they divide the layer's input.
    """
    whole = linear.weight
    divides_input = getattr(whole, "tensor_model_parallel", False) and whole.partition_dim == 1
    codes, scale = pack(whole.detach().to(device), linear.tp_group if divides_input else None)
    hold_codes(linear, "weight", codes, "row_scale", scale)
    linear.__class__ = _with_float8(type(linear))


def hold_codes(module: torch.nn.Module, name: str, codes: torch.Tensor, buffer: str, scale: torch.Tensor) -> None:
    """Replace a module's parameter by its codes, and add their factors as a `buffer` that no checkpoint has."""
    param = torch.nn.Parameter(codes, requires_grad=False)
    param.__dict__.update(module.get_parameter(name).__dict__)  # marks such as tensor_model_parallel
    parameters_of(module)[name] = param
    module.register_buffer(buffer, scale, persistent=False)


def base_packer(model: torch.nn.Module, device: torch.device, packed: Collection[str]) -> Callable[[str], None]:
    """Return a function that packs a chunk's weight onto the device, given our name of the weight in the whole model.
    The function ignores weights outside the language layers and weights that are not in `packed`."""
    names = zip(global_names(model), model.named_parameters(), strict=True)
    places = {
        ours: name.rpartition(".") for (ours, _), (name, _) in names if ours.startswith(LAYERS) and ours in packed
    }

    def pack_weight(ours: str) -> None:
        if ours not in places:
            return
        module, _, name = places[ours]
        if name == "weight":
            pack_layer(model.get_submodule(module), device)
        else:
            model.get_submodule(module).pack(name, device)

    return pack_weight
