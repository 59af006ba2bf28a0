"""Fully sharded data parallelism: torch's FSDP2 divides weights, gradients and moments over the data-parallel ranks.

`FullyShardedModel` has the interface of megatron-core's DistributedDataParallel (`module`, `zero_grad_buffer`,
`finish_grad_sync`, `scale_gradients`, `no_sync`, `ddp_config`), so that the schedule, the gradients' normalisation,
the optimizer and `train_step` work on either class. Each rank keeps a float32 slice of every parameter, of its gradient
and of its moments. A layer's whole weights exist only while the layer runs, in the precision of the arithmetic.

megatron-core 0.16.1 has its own wrapper, TorchFullyShardedDataParallel. That wrapper keeps no float32 weights under
bfloat16 arithmetic, averages gradients over ranks and ignores `scale_gradients`, so it is not used.
"""

import dataclasses
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.libraries.megatron_private import DataParallelBase
from trainer.libraries.torch_private import first_row
from trainer.parallel.meta_parameters import materialise_shards

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FullyShardedModel(DataParallelBase):
    """A model whose weights are divided over a group of ranks.

    Args:
        module: the whole model in float32, equal on every rank, or without memory; it is divided in place.
        dtype: arithmetic of forward and backward.
        device: device of the slices; the slices of a model without memory are zeros.
        state: the checkpoint entries of the parameters that a checkpoint holds.
    """

    def __init__(
        self,
        module: MegatronModule,
        dtype: torch.dtype,
        group: ProcessGroup,
        device: torch.device,
        state: ShardedStateDict,
    ) -> None:
        super().__init__(module.config, module)
        self.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
        self.group = group
        # Made before the model is divided, from whole parameters: so the checkpoint is that of any layout.
        self.entries = _entries_without_data(state)
        _divide(module, dtype, group, device)
        materialise_shards(module, device)
        # Valid outside a step: between forward and backward the module holds whole weights under these names.
        self.weights: dict[str, DTensor] = dict(module.named_parameters())
        self.slices: dict[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(weight.to_local().detach(), requires_grad=weight.requires_grad)
            for name, weight in self.weights.items()
        }

    def zero_grad_buffer(self) -> None:
        """Drop the gradients of the previous step."""
        for weight in self.weights.values():
            weight.grad = None

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Set the slices' gradients, which FSDP has summed over the ranks, layer by layer, in backward."""
        for name, piece in self.slices.items():
            if piece.requires_grad:
                piece.grad = self.weights[name].grad.to_local()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply the gradients by a factor: 1 / loss tokens of the global batch."""
        for piece in self.slices.values():
            if piece.grad is not None:
                piece.grad.mul_(scaling_factor)

    def optimize_slices(self, optimizer: ChainedOptimizer) -> None:
        """Make an optimizer of the divided weights update this rank's slices instead: plain tensors, which Transformer
        Engine's Adam needs. Call it before the first step."""
        slices = {self.weights[name]: piece for name, piece in self.slices.items()}
        for group in optimizer.param_groups:
            # A slice without elements (of a bias that has fewer numbers than the group has ranks) is left out.
            group["params"] = [slices[weight] for weight in group["params"] if slices[weight].numel()]
        for chained in optimizer.chained_optimizers:
            # megatron-core then sums the gradient norm over the group.
            chained.grad_stats_parallel_group = self.group

    def checkpoint_state(self, optimizer: ChainedOptimizer, num_updates: int) -> dict[str, Any]:
        """Return the state that dist_checkpointing saves, and loads in place: this rank's slices and their moments. The
        weights have the names and shapes of the bare model, so that any layout can load them."""
        state = {name: entry for name, entry in self.entries.items() if isinstance(entry, ShardedObject)}
        adam = optimizer.optimizer
        for piece in (piece for group in optimizer.param_groups for piece in group["params"]):
            for key in _MOMENTS:
                # Zeros before the first update, so that a checkpoint's moments can be loaded into them.
                if key not in adam.state[piece]:
                    adam.state[piece][key] = torch.zeros_like(piece)
        for name, piece in self.slices.items():
            if name in self.entries and piece.numel():
                moments = adam.state[piece] if piece.requires_grad else {}
                tensors = {"": piece.data} | {f"optimizer.state.{key}.": moments[key] for key in _MOMENTS if moments}
                for prefix, tensor in tensors.items():
                    state[prefix + name] = _entry_of_slice(prefix, self.entries[name], self.weights[name], tensor)
        return state | {"num_updates": num_updates}

    def load_checkpoint_state(self, state: dict[str, Any], optimizer: ChainedOptimizer) -> None:
        """Set the number of updates, the only value that is not loaded in place."""
        # torch's Adam counts updates by parameter, Transformer Engine's by group.
        by_parameter = isinstance(optimizer.optimizer, torch.optim.AdamW)
        for group in optimizer.param_groups:
            group["step"] = state["num_updates"]
            for piece in group["params"] if by_parameter else ():
                optimizer.optimizer.state[piece]["step"] = torch.tensor(float(state["num_updates"]))


def _divide(module: MegatronModule, dtype: torch.dtype, group: ProcessGroup, device: torch.device) -> None:
    """Apply FSDP2 to each transformer layer, vision and language, and to the rest. Gradients are summed, not
    averaged."""
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    exact = dataclasses.replace(policy, param_dtype=torch.float32)
    # Other modules use these weights after the module's forward pass, so they stay whole until the gradients are ready.
    # They are only a few numbers per head.
    for unit in [unit for unit in module.modules() if getattr(unit, "computes_in_float32", False)]:
        fully_shard(unit, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
    layers = [layer for layer in module.modules() if isinstance(layer, TransformerLayer)]
    # The model last: FSDP2 leaves out what is divided already, so the model's own unit is what remains of it.
    for unit in (*layers, module):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            # A sum: `scale_gradients` divides it by the loss tokens of the global batch.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def _entries_without_data(state: ShardedStateDict) -> dict[str, ShardedTensor | ShardedObject]:
    """Return the checkpoint entry of each whole parameter of the bare model, without data."""
    entries = {}
    for name, value in state.items():
        if isinstance(value, ShardedTensorFactory):
            # The two halves of a gated MLP have the same order in the checkpoint as in the parameter.
            value = value.build()[0]
        entries[name] = value.without_data() if isinstance(value, ShardedTensor) else value
    return entries


def _entry_of_slice(prefix: str, whole: ShardedTensor, weight: DTensor, piece: torch.Tensor) -> ShardedTensor:
    """Return the checkpoint entry of a slice: some rows of a parameter. megatron-core stacks layers on leading axes."""
    stacked = whole.prepend_axis_num
    data = piece.view((1,) * stacked + piece.shape)
    offset = list(whole.global_offset)
    offset[stacked] += first_row(weight)
    return ShardedTensor(
        key=prefix + whole.key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=whole.global_shape,
        global_offset=tuple(offset),
        axis_fragmentations=None,  # ranks hold unequal numbers of rows
    )
