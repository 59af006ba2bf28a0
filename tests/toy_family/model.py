"""Our side of the toy: attention of another kind."""

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from tests.toy_family.family import GateAfterAttention
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


def gated_spec(part: GateAfterAttention, modules: BackendSpecProvider) -> ModuleSpec:
    """The mixer of a layer with a gate."""
    plain = spec(part, modules)
    return ModuleSpec(module=GatedAfterAttention, params=plain.params, submodules=plain.submodules)
