"""Parameters that ranks divide: the marks by which megatron-core knows them, and their entries in a checkpoint."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

# The axis of the weight that tensor-parallel ranks divide; a row-parallel bias is whole on every rank.
_PARALLEL_AXES = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}


def mark_sharded(param: torch.nn.Parameter, axis: int) -> None:
    """Mark a parameter that ranks divide along an axis, as megatron-core's and Transformer Engine's modules do."""
    # Gradient norms, and the reading and writing of weights, depend on the marks. An unmarked parameter is taken to be
    # whole on every rank: only the first rank's would be counted and written.
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, axis, 1


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark every parameter that tensor-parallel ranks divide, with the axis along which they divide it.

    megatron-core's modules set these marks only when they also initialise the weight, which we do not. Transformer
    Engine's modules set them always.
    """
    for module in model.modules():
        axis = next((axis for kind, axis in _PARALLEL_AXES.items() if isinstance(module, kind)), None)
        if axis is None or module.tp_group.size() == 1:
            continue
        parts = [module.weight] if axis == 1 else [module.weight, getattr(module, "bias", None)]
        for param in parts:
            if param is not None:
                mark_sharded(param, axis)


def in_runs(entry: ShardedTensor, rows: Sequence[int], rank: int, ranks: int) -> ShardedTensorFactory:
    """Return the factory of sharded tensors for a parameter with several runs of rows, if a rank holds a part of each.

    Args:
        entry: the sharded tensor as if the rank held one run; layers are not stacked.
        rows: number of this rank's rows in each run.
    """
    whole = entry.without_data()

    def build(key: str, tensor: torch.Tensor, replica_id: tuple, flattened_range: slice | None) -> list[ShardedTensor]:
        parts = []
        for part, before in zip(tensor.split(tuple(rows)), accumulate(rows, initial=0)):
            parts.append(
                ShardedTensor(
                    key=key,
                    data=part,
                    dtype=part.dtype,
                    local_shape=tuple(part.shape),
                    global_shape=whole.global_shape,
                    global_offset=(before * ranks + rank * len(part), *whole.global_offset[1:]),
                    axis_fragmentations=None,  # the runs are of unequal lengths
                    replica_id=replica_id,
                )
            )
        return parts

    return ShardedTensorFactory(entry.key, entry.data, build, torch.cat, entry.replica_id)
