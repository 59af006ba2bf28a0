"""Transformer Engine's modules as this trainer uses them. Imported only where Transformer Engine is."""

from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider


class NormColumnLinear(TELayerNormColumnParallelLinear):
    """Adds its bias in the matrix product; megatron-core asks for it outside, a pass over memory each way."""

    def __init__(self, *args: object, skip_bias_add: bool = False, **kwargs: object) -> None:
        super().__init__(*args, skip_bias_add=False, **kwargs)


class RowLinear(TERowParallelLinear):
    """The same. Transformer Engine adds a row-parallel bias by hand, after the sum over ranks: also of one rank alone,
    where there is no sum."""

    def __init__(self, *args: object, skip_bias_add: bool = False, **kwargs: object) -> None:
        super().__init__(*args, skip_bias_add=False, **kwargs)
        if self.tp_size == 1:
            self.gemm_bias_unfused_add = False


class FusedModules(TESpecProvider):
    """megatron-core's choice of Transformer Engine's modules, with ours in place of some."""

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnLinear

    def row_parallel_linear(self) -> type:
        return RowLinear
