"""Checkpoints of a parameter with several runs of rows, where a rank holds a part of each run."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


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
