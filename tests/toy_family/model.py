"""Our side of the toy: attention and a feed-forward part of other kinds."""

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from tests.toy_family.family import BlendedMLPs, GateAfterAttention
from trainer.layers.segments import PackedSegments, Rotation
from trainer.parts.attention.module import RotarySelfAttention, spec


class GatedAfterAttention(RotarySelfAttention):
    """Attention whose output is multiplied by a gate of the layer's normalised input."""

    def __init__(self, config, *args: object, pg_collection=None, **kwargs: object) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.gate = ColumnParallelLinear(
            config.hidden_size,
            config.num_attention_heads * config.kv_channels,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=pg_collection.tp,
        )

    def prepare(self, hidden_states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        return *super().prepare(hidden_states, rotation), self.gate(hidden_states)[0]

    def attend(self, query, key, value, gate, segments: PackedSegments) -> torch.Tensor:
        return super().attend(query, key, value, segments) * gate.sigmoid()

    def modules_of_prepare(self) -> list[torch.nn.Module]:
        return [*super().modules_of_prepare(), self.gate]


_AXES = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}  # the axes that tensor-parallel ranks divide


class Blended(MegatronModule):
    """Gated MLPs whose outputs are weighted by a softmax of the token. Tensor-parallel ranks divide their width."""

    def __init__(self, config, *, part: BlendedMLPs, pg_collection) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        width, inner = part.hidden_size, part.intermediate_size // self.tp_group.size()
        self.router = torch.nn.Parameter(torch.empty(part.count, width))
        for name, axis in _AXES.items():
            shape = (part.count, inner, width) if axis == 1 else (part.count, width, inner)
            weight = torch.nn.Parameter(torch.empty(shape))
            if self.tp_group.size() > 1:
                weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, axis, 1
            self.register_parameter(name, weight)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map (T, 1, D) to (T, 1, D), and no bias."""
        weights = F.linear(hidden, self.router).softmax(-1)
        shared = copy_to_tensor_model_parallel_region(hidden, self.tp_group)
        gate, up = (torch.einsum("tbd,eid->tbei", shared, weight) for weight in (self.gate_proj, self.up_proj))
        out = torch.einsum("tbei,edi->tbed", F.silu(gate) * up, self.down_proj)
        # megatron-core drops the sum if the tensor is not contiguous.
        out = reduce_from_tensor_model_parallel_region(out.contiguous(), self.tp_group)
        return (weights[..., None] * out).sum(-2), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the checkpoint's tensors; tensor-parallel ranks divide three of them."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            _AXES,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def blended_spec(part: BlendedMLPs, modules: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(module=Blended, params={"part": part})


def gated_spec(part: GateAfterAttention, modules: BackendSpecProvider) -> ModuleSpec:
    plain = spec(part, modules)
    return ModuleSpec(module=GatedAfterAttention, params=plain.params, submodules=plain.submodules)
