"""The MLP of a layer, which is megatron-core's."""

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.parts.mlp.part import GatedMLP


class PackedMLP(MLP):
    """megatron-core's MLP, built from a layer's process groups."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        super().__init__(config, submodules, tp_group=pg_collection.tp, **kwargs)


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
