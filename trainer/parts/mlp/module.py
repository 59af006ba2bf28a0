"""The MLP of a layer: megatron-core's, which keeps less for the backward pass."""

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.recompute import not_kept
from trainer.parts.mlp.part import GatedMLP


class PackedMLP(MLP):
    """megatron-core's MLP, built from a layer's process groups; it keeps the input of its activation and not the
    result."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        super().__init__(config, submodules, tp_group=pg_collection.tp, **kwargs)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map (s, 1, D) to (s, 1, D), and a bias that is still to be added, or None."""
        before, bias = self.linear_fc1(hidden_states)
        before = before if bias is None else before + bias
        inner = self._activated(before)
        with not_kept(inner, self._activated, before):
            return self.linear_fc2(inner)

    def _activated(self, before: torch.Tensor) -> torch.Tensor:
        """Apply the activation, with the gate if the layer has one: (s, 1, F) or (s, 1, 2 F) -> (s, 1, F)."""
        if self.config.use_te_activation_func or not self.config.gated_linear_unit:
            return self.activation_func(before)
        gate, up = before.chunk(2, dim=-1)
        return self.activation_func(gate) * up


def spec(part: GatedMLP, modules: BackendSpecProvider) -> ModuleSpec:
    """Return the spec of a decoder layer's MLP; its sizes and its gate are in the TransformerConfig."""
    return mlp_spec(modules)


def mlp_spec(modules: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(module=PackedMLP, submodules=mlp_submodules(modules))


def mlp_submodules(modules: BackendSpecProvider) -> MLPSubmodules:
    return MLPSubmodules(
        linear_fc1=modules.column_parallel_linear(),
        linear_fc2=modules.row_parallel_linear(),
        activation_func=modules.activation_func(),  # used if the config's `use_te_activation_func` is true
    )
