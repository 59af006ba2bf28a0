"""Athanor's side of the toy family: a layer of another kind, and its weights."""

import dataclasses
from collections.abc import Iterator

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from trainer.contract.model_shape import ModelShape
from trainer.families.qwen3_vl.model import Qwen3VLModel
from trainer.families.qwen3_vl.weights import rules as qwen3_vl_rules
from trainer.families.weight_rules import Rule
from trainer.layers.chosen_rows import ChosenRows
from trainer.layers.packed_layer import PackedLayer


class GatedLayer(PackedLayer):
    """A layer in which the output of attention is multiplied by a gate of the layer's normalised input."""

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

    def after_attention(
        self, hidden: torch.Tensor, attended: torch.Tensor, rows: ChosenRows | None = None
    ) -> torch.Tensor:
        if rows is not None:
            hidden, attended = rows.of_hidden(hidden), rows.of_attended(attended)
        gate, _ = self.gate(self.input_layernorm(hidden))
        return super().after_attention(hidden, attended * gate.sigmoid())

    def modules_after_attention(self) -> list[torch.nn.Module]:
        return [*super().modules_after_attention(), self.input_layernorm, self.gate]


class ToyModel(Qwen3VLModel):
    """Qwen3-VL with a gate in every other layer. Its shape gives the number of rotated components of a head."""

    def layer_spec(self, modules: BackendSpecProvider, number: int) -> ModuleSpec:
        spec = super().layer_spec(modules, number)
        return dataclasses.replace(spec, module=GatedLayer) if number % 2 else spec


def rules(shape: ModelShape) -> Iterator[Rule]:
    """Return Qwen3-VL's table with the gates."""
    yield from qwen3_vl_rules(shape)
    for number in range(1, shape.language.num_layers, 2):
        hf = f"model.language_model.layers.{number}.self_attn.g_proj.weight"
        yield Rule(f"language.decoder.layers.{number}.gate.weight", (hf,))
