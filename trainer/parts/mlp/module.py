"""The MLP of a layer: megatron-core's, or one Transformer Engine module where it can compute the same function."""

from functools import cached_property

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.module_set import column_after_norm
from trainer.parts.mlp.part import GatedMLP

if HAVE_TE:
    from trainer.layers.modules.engine import JointMLP, can_join


class PackedMLP(MLP):
    """megatron-core's MLP, with the GELU fused into the matrix products where Transformer Engine can do so."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        super().__init__(config, submodules, tp_group=pg_collection.tp, **kwargs)

    @cached_property
    def _joint(self) -> "JointMLP | None":
        # Built at the first call: if the linear layers have adapters by then, the products cannot be joined.
        return JointMLP(self) if HAVE_TE and can_join(self) else None

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map (T, 1, D) to (T, 1, D), and a bias that remains to be added, or None."""
        return self._joint(hidden_states) if self._joint is not None else super().forward(hidden_states, **kwargs)


def spec(part: GatedMLP, modules: BackendSpecProvider) -> ModuleSpec:
    """Return the spec of a decoder layer's MLP; its sizes and its gate are in the TransformerConfig."""
    return mlp_spec(modules)


def mlp_spec(modules: BackendSpecProvider) -> ModuleSpec:
    """Return the spec of an MLP built from this set of modules."""
    return ModuleSpec(
        module=PackedMLP,
        submodules=MLPSubmodules(
            linear_fc1=column_after_norm(modules),
            linear_fc2=modules.row_parallel_linear(),
            activation_func=modules.activation_func(),  # used if the config's `use_te_activation_func` is true
        ),
    )
