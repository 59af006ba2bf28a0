"""The MLP of a layer: megatron-core's, or one module of Transformer Engine where that computes the same."""

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
    """megatron-core's MLP, whose GELU is part of its matrix products where Transformer Engine can do that."""

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
        # Made at the first call: adapters that the linear layers get before it come between the products.
        return JointMLP(self) if HAVE_TE and can_join(self) else None

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(T, 1, D) -> (T, 1, D), and a bias that remains to be added, or None."""
        return self._joint(hidden_states) if self._joint is not None else super().forward(hidden_states, **kwargs)


def spec(part: GatedMLP, modules: BackendSpecProvider) -> ModuleSpec:
    """The MLP of a decoder layer. Its sizes and its gate are in the TransformerConfig."""
    return mlp_spec(modules)


def mlp_spec(modules: BackendSpecProvider) -> ModuleSpec:
    """An MLP of this set of modules."""
    return ModuleSpec(
        module=PackedMLP,
        submodules=MLPSubmodules(
            linear_fc1=column_after_norm(modules),
            linear_fc2=modules.row_parallel_linear(),
            activation_func=modules.activation_func(),  # used if the config's `use_te_activation_func` is true
        ),
    )
