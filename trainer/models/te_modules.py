"""Transformer Engine's modules as this trainer uses them. Imported only where Transformer Engine is."""

import torch
import transformer_engine_torch as tex
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from transformer_engine.pytorch.cpp_extensions import general_gemm


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


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return tex.swiglu(gate_up, None)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        return tex.dswiglu(grad.contiguous(), gate_up, None)


class Swiglu:
    """silu(first half) * second half, each value read and written once. No module: it has no state to be saved."""

    def __init__(self, *, config: object) -> None:
        pass

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _Swiglu.apply(gate_up)


def add_product(buffer: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """buffer (m, k) += grad^T (m, n) x (n, k): float32 += bfloat16, in one product as its modules have it."""
    general_gemm(x, grad, out_dtype=buffer.dtype, accumulate=True, layout="NT", out=buffer, grad=True)


class FusedModules(TESpecProvider):
    """megatron-core's choice of Transformer Engine's modules, with ours in place of some."""

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnLinear

    def row_parallel_linear(self) -> type:
        return RowLinear

    def activation_func(self) -> type:
        return Swiglu
