"""Qwen3.5: a decoder of two kinds of layers behind Qwen3-VL's vision encoder without deepstack."""

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec

from trainer.families.qwen3_vl.model import Qwen3VLModel
from trainer.layers.delta_layer import DeltaAttention
from trainer.layers.delta_rule.gated_delta_net import DeltaHeads, kernels_fit
from trainer.layers.module_set import delta_layer_spec, layer_spec
from trainer.model.family import load


class Qwen35VLModel(Qwen3VLModel):
    """One chunk of the model."""

    def build_parts(self, dtype: torch.dtype, modules: BackendSpecProvider) -> None:
        """Qwen3-VL's. A compiler that gets the delta rule's kernels wrong is found before a weight is read."""
        if kernels_fit(torch.empty(0, dtype=dtype, device=self.mesh.device), self._delta_heads()):
            load("trainer.layers.delta_rule.kernel_check:prove_kernels")(self.mesh.device.index)
        super().build_parts(dtype, modules)

    def layer_spec(self, modules: BackendSpecProvider, number: int) -> ModuleSpec:
        """A gated delta net or gated attention, as `layer_types` says."""
        if self.shape.language.is_delta(number):
            return delta_layer_spec(modules, self._delta_heads())
        return layer_spec(modules, head_dim=self.shape.language.head_dim, causal=True, qk_norm=True, gated=True)

    def _delta_heads(self) -> DeltaHeads:
        shape = self.shape.language
        return DeltaHeads(shape.delta_key_heads, shape.delta_value_heads, shape.delta_head_dim)

    def partial_gradients(self) -> list[torch.nn.Parameter]:
        """Qwen3-VL's, and the norms of the delta layers, which each tensor-parallel rank uses for its own heads."""
        deltas = [module for module in self.modules() if isinstance(module, DeltaAttention)]
        norms = [delta.norm_weight for delta in deltas if delta.norm_weight.requires_grad and self.parallel.tp > 1]
        return super().partial_gradients() + norms
