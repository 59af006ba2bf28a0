"""Plain modules on CUDA: torch's products, flash attention and norms, and our kernels where they run.

D = input features, N = rows of a product (tokens or patches), O = output features of this rank.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch.autograd.function import once_differentiable

from trainer.layers.attention_cores import FlashAttention
from trainer.layers.kernel_support import can_import, kernels_run
from trainer.layers.module_set import TorchModules, TorchNorm, TorchSwiglu
from trainer.layers.vocabulary import add_product
from trainer.libraries.megatron_private import OneRankProduct

if can_import():
    from trainer.layers.kernels import rms_norm, sum_and_norm, swiglu


class OnePassNorm(TorchNorm):
    """A norm in one pass: it reads and writes the input's dtype, computes in float32, and rounds once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension: (..., hidden) -> (..., hidden)."""
        if self.bias is not None:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        if kernels_run(x.device):
            return rms_norm(x, self.weight, self.eps, zero_centred=self.zero_centred)
        if self.zero_centred:
            return super().forward(x)
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def sum_and_norm(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TorchNorm`; one kernel forward and one backward, where ours run."""
        if self.bias is None and kernels_run(x.device):
            return sum_and_norm(x, delta, self.weight, self.eps, zero_centred=self.zero_centred)
        return super().sum_and_norm(x, delta)


class PlainSwiglu(TorchSwiglu):
    """silu(first half) * second half, with our kernel where it runs."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_up) if kernels_run(gate_up.device) else super().__call__(gate_up)


class _Product(torch.autograd.Function):
    """The product x weight^T + bias; with `adds`, backward sums the weight's gradient directly into `main_grad`."""

    @staticmethod
    def forward(ctx, x, weight, bias, adds):
        ctx.save_for_backward(x, weight)
        ctx.summed = weight if adds and weight.requires_grad else None
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        rows, grad_weight = grad.flatten(0, -2), None
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if ctx.summed is not None:
            add_product(ctx.summed.main_grad, rows, x.flatten(0, -2))
            ctx.summed.grad_added_to_main_grad = True
            grad_weight = torch.empty_like(weight)  # never read, but data parallelism waits for a gradient
        elif ctx.needs_input_grad[1]:
            grad_weight = rows.t() @ x.flatten(0, -2)
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class BiasInProduct:
    """A mixin for linear layers that add their bias in the matrix product: with `skip_bias_add` the layer around them
    would add it, by one more pass over memory forward and one backward."""

    def __init__(self, *args: object, skip_bias_add: bool = False, **kwargs: object) -> None:
        super().__init__(*args, skip_bias_add=False, **kwargs)


class _OurProduct(BiasInProduct, OneRankProduct):
    """A mixin for both linear layers, with our product on a single tensor-parallel rank."""

    # True if the weight has `main_grad`, a float32 buffer of its gradient; the gradient is then added to it directly.
    fuse_wgrad_accumulation = False

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _Product.apply(x, weight, bias, self.fuse_wgrad_accumulation)


class PlainColumnLinear(_OurProduct, ColumnParallelLinear):
    """megatron-core's column-parallel layer, with the bias added in the matrix product."""


class PlainRowLinear(_OurProduct, RowParallelLinear):
    """megatron-core's row-parallel layer, with the bias added in the matrix product on a single rank."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map (N, 1, D) to (N, 1, O), and None, as no bias remains to be added."""
        if self.tp_group.size() > 1 or not self.input_is_parallel:
            return super().forward(input_)
        # megatron-core adds the bias after the sum over ranks; on one rank there is no sum.
        return self.product(input_, self.weight, self.bias), None


class PlainModules(TorchModules):
    """megatron-core's set of torch modules, with the slow ones replaced."""

    def __init__(self, fast_attention: type | None = None) -> None:
        self._fast_attention = fast_attention

    def column_parallel_linear(self) -> type:
        return PlainColumnLinear

    def row_parallel_linear(self) -> type:
        return PlainRowLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return OnePassNorm

    def core_attention(self, head_dim: int = 0, *, causal: bool = True) -> type:
        return self._fast_attention or FlashAttention

    def activation_func(self) -> type:
        return PlainSwiglu
