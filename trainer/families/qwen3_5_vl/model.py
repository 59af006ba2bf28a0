"""Qwen3.5: a decoder of two kinds of layers behind Qwen3-VL's vision encoder without deepstack."""

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec

from trainer.families.qwen3_vl.model import Qwen3VLModel
from trainer.layers.delta_layer import DeltaAttention
from trainer.layers.delta_rule.gated_delta_net import DeltaHeads
from trainer.layers.module_set import delta_layer_spec, layer_spec


class Qwen35VLModel(Qwen3VLModel):
    """One chunk of the model."""

    def layer_spec(self, modules: BackendSpecProvider, number: int) -> ModuleSpec:
        """A gated delta net or gated attention, as `layer_types` says."""
        shape = self.shape.language
        if shape.is_delta(number):
            heads = DeltaHeads(shape.delta_key_heads, shape.delta_value_heads, shape.delta_head_dim)
            return delta_layer_spec(modules, heads)
        return layer_spec(modules, causal=True, qk_norm=True, gated=True)

    def partial_gradients(self) -> list[torch.nn.Parameter]:
        """Qwen3-VL's, and the norms of the delta layers, which each tensor-parallel rank uses for its own heads."""
        deltas = [module for module in self.modules() if isinstance(module, DeltaAttention)]
        norms = [delta.norm_weight for delta in deltas if delta.norm_weight.requires_grad and self.parallel.tp > 1]
        return super().partial_gradients() + norms
