"""The optimizer's tensors in a checkpoint: each rank writes its own numbers as pieces of whole parameters.

megatron-core 0.16.1's `fully_reshardable` format gathers main parameters and moments of all data-parallel ranks on each
of them, through the host (25 to 35 s at 2 billion parameters), and one rank writes them all. The format on disk allows
rectangles of a tensor. A rank's share of a parameter is a run of consecutive numbers, which is a few rectangles. So no
rank needs another rank's numbers, and a save needs only views of the optimizer's own tensors. Any layout can load the
result, and checkpoints that megatron-core wrote still load.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trainer.libraries.megatron_private import first_held, held_tensors, replace_param_state

_TENSORS = ("param", "exp_avg", "exp_avg_sq")
Entry = ShardedTensor | ShardedTensorFactory


def rectangles(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, size) of the boxes that the numbers `first` to `last` - 1 of a tensor fill, in order."""
    if len(shape) <= 1:
        yield (first,) * len(shape), (last - first,) * len(shape)
        return
    row = math.prod(shape[1:])
    whole = range(-(-first // row), last // row)
    if first % row and first // row == last // row:  # within one row
        yield from _in_row(shape, first // row, first % row, last % row)
        return
    if first % row:
        yield from _in_row(shape, first // row, first % row, row)
    if whole:
        yield (whole.start, *(0 for _ in shape[1:])), (len(whole), *shape[1:])
    if last % row:
        yield from _in_row(shape, last // row, 0, last % row)


def _in_row(shape: Sequence[int], row: int, first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in rectangles(shape[1:], first, last):
        yield (row, *offset), (1, *size)


def _pieces(entry: Entry, key: str, numbers: torch.Tensor, first: int) -> Iterator[ShardedTensor]:
    """Yield consecutive numbers of a parameter, from flat index `first` on, as parts of the whole model's tensor."""
    start = 0  # of the part, as a flat index into the parameter
    # The two halves of a gated MLP are two parts of the tensor, and follow each other in the parameter.
    for part in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
        shape, stacked = part.data.shape, part.prepend_axis_num
        held = range(max(first, start), min(first + len(numbers), start + shape.numel()))
        taken = held.start - first
        for offset, size in rectangles(shape, held.start - start, held.stop - start) if held else ():
            data = numbers[taken : taken + math.prod(size)].view((1,) * stacked + size)
            taken += math.prod(size)
            yield ShardedTensor(
                key=f"optimizer.state.{key}.{part.key}",
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_shape=part.global_shape,
                global_offset=tuple(a + b for a, b in zip(part.global_offset, (0,) * stacked + offset, strict=True)),
                axis_fragmentations=None,  # ranks hold unequal pieces
                replica_id=(*part.replica_id[:-1], 0),  # data-parallel ranks hold no copies of each other's pieces
            )
        start += shape.numel()


def _param_state(
    optimizer: DistributedOptimizer, model_state: dict[str, Any], is_loading: bool = False, metadata: object = None
) -> dict[int, dict[str, object]]:
    """Return parameter index -> name -> its pieces; when loading, the whole tensors that the optimizer requests."""
    # The model's entries by parameter: the data of an entry is the parameter itself.
    entries = {entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    moments = getattr(optimizer.optimizer, "moments", torch.float32)
    dtypes = dict.fromkeys(_TENSORS, moments) | {"param": torch.float32}
    state: dict[int, dict[str, object]] = {}
    for number, param in enumerate(param for buffer in optimizer.buffers for param in buffer.param_index_map):
        if is_loading:
            # Whole tensors, from which the optimizer takes its share.
            entry, state[number] = entries[param], {}
            for key in _TENSORS:
                data = torch.empty(entry.data.shape, dtype=dtypes[key])
                of_data = {} if isinstance(entry, ShardedTensorFactory) else {"dtype": dtypes[key]}
                state[number][key] = replace(entry, key=f"optimizer.state.{key}.{entry.key}", data=data, **of_data)
            continue
        if param in optimizer.model_param_gbuf_map:  # otherwise only other ranks hold it
            first = first_held(optimizer, param)
            tensors = held_tensors(optimizer, param)
            # Before the first update there are no moments; the parameter, which has the same size, takes their role.
            numbers = {key: tensors.get(key, tensors["param"]).detach().view(-1) for key in _TENSORS}
            state[number] = {key: list(_pieces(entries[param], key, numbers[key], first)) for key in _TENSORS}
    return state


def install() -> None:
    """Make megatron-core's optimizer use `_param_state`, until the process ends."""
    replace_param_state(_param_state)
