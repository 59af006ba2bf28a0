"""Transformer Engine's modules as this trainer uses them. Imported only if Transformer Engine is installed.

Private parts, as they are in Transformer Engine 2.11.0:

- `FusedAttnFunc`, whose 32 arguments have no names, and `attn_forward_func_with_cp` with the same attention over ranks
- `_attention_backends`, in which the attention module notes its choice
- `swiglu` and `dswiglu` of the C++ extension
- `general_gemm`, with a GELU as its epilogue
- attributes of its modules, among them `gemm_bias_unfused_add`; `trainer/layers/lora.py` uses `te_return_bias`

`tests/trainer/layers/test_engine_private_gpu.py` compares them with the installed Transformer Engine.
"""

import torch
import transformer_engine_torch as tex
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TERowParallelLinear,
)
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer.enums import AttnMaskType
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention
from transformer_engine.pytorch.attention.dot_product_attention.backends import FusedAttnFunc
from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import attn_forward_func_with_cp
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend
from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm

from dataset_builders.known_version import check_version
from trainer.layers.attention_cores import CUDNN_HEAD_DIM, FlashAttention
from trainer.layers.module_set import TorchSwiglu
from trainer.layers.modules.plain import BiasInProduct, OnePassNorm
from trainer.layers.segments import PackedSegments

KNOWN = "==2.11.0"
check_version("transformer-engine", KNOWN, __name__, "attention may be wrong", refuses=True)

_MASKS = {AttnMaskType.causal: "padding_causal", AttnMaskType.no_mask: "padding"}  # inside each segment
_CUDNN = FusedAttnBackend["F16_arbitrary_seqlen"]


class ColumnLinear(BiasInProduct, TEColumnParallelLinear):
    """A column-parallel linear layer, with the bias added in the matrix product."""


class RowLinear(BiasInProduct, TERowParallelLinear):
    """A row-parallel linear layer that adds its bias in the matrix product on a single rank."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # Transformer Engine adds the bias after the sum over ranks, even on one rank, where there is no sum.
        if self.tp_size == 1:
            self.gemm_bias_unfused_add = False


class PackedAttention(TEDotProductAttention):
    """Transformer Engine's attention over a packed bin, which bypasses Transformer Engine's own module.

    In every call that module chooses a back end, inspects layouts and strides and keeps a random state. On the host
    this takes three times as long as the attention call itself, and the choice depends on nothing that changes from
    bin to bin. So only the first call goes through the module; if it chose cuDNN, later calls go to cuDNN directly.
    The arguments follow FusedAttention.forward in Transformer Engine's dot_product_attention/backends.py.
    """

    _uses_cudnn: bool | None = None  # None until the first call

    def forward(
        self, query, key, value, attention_mask=None, *, attn_mask_type: AttnMaskType, packed_seq_params: PackedSegments
    ) -> torch.Tensor:
        """Attend: queries (T, h, d), keys and values (T, g, d) -> (T, h * d)."""
        if self._uses_cudnn is None:
            out = super().forward(query, key, value, attention_mask, attn_mask_type, None, packed_seq_params)
            chosen = dot_product_attention._attention_backends
            self._uses_cudnn = bool(chosen["use_fused_attention"]) and chosen["fused_attention_backend"] == _CUDNN
            return out
        if not self._uses_cudnn:
            return super().forward(query, key, value, attention_mask, attn_mask_type, None, packed_seq_params)
        attend = self._over_ranks if packed_seq_params.cp > 1 else self._alone
        # cuDNN gets no strides: it would read values that are views of a projection at wrong addresses.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        return attend(query, key, value, _MASKS[attn_mask_type], packed_seq_params).view(len(query), -1)

    def _alone(self, query, key, value, mask: str, segments: PackedSegments) -> torch.Tensor:
        bounds, longest = segments.cu_seqlens_q, segments.max_seqlen_q
        window = (-1, 0) if mask == "padding_causal" else (-1, -1)
        return FusedAttnFunc.apply(
            *(self.training, longest, longest, bounds, bounds, bounds, bounds, None, None),
            *(query, key, value, None, self.fused_attention.softmax_scale, 0.0, True),
            *("thd_thd_thd", "no_bias", mask, "vanilla"),
            *(window, None, _CUDNN, self.fused_attention.use_FAv2_bwd, False, None, None, self.deterministic),
            *(None, False, self.layer_number, False),
        )

    def _over_ranks(self, query, key, value, mask: str, segments: PackedSegments) -> torch.Tensor:
        bounds, longest = segments.cu_seqlens_q, segments.max_seqlen_q
        return attn_forward_func_with_cp(
            *(self.training, query, key, value, bounds, bounds, longest, longest, bounds, bounds, 0.0),
            *(self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type),
            softmax_scale=self.fused_attention.softmax_scale,
            qkv_format="thd",
            attn_mask_type=mask,
            deterministic=self.deterministic,
            use_fused_attention=True,
            window_size=(-1, 0) if mask == "padding_causal" else (-1, -1),
            layer_number=self.layer_number,
        )


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return tex.swiglu(gate_up, None)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        return tex.dswiglu(grad.contiguous(), gate_up, None)


class Swiglu(TorchSwiglu):
    """silu(first half) * second half, where each value is read and written once."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _Swiglu.apply(gate_up)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x weight^T + bias: (N, D) and (O, D) to (N, O)."""
    return general_gemm(weight, x, out_dtype=x.dtype, bias=bias)[0]


def product_gradient(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `product` with respect to x: (N, O) and (O, D) to (N, D)."""
    return general_gemm(weight, grad, out_dtype=grad.dtype, layout="NN", grad=True)[0]


def gelu_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gelu(x weight^T + bias) and the GELU's input, both (N, O), by the product's own epilogue.

    The GELU is the tanh approximation. Rows must be a multiple of 16 bytes long.
    """
    out, _, before, _ = general_gemm(weight, x, out_dtype=x.dtype, bias=bias, gelu=True)
    return out, before


def gelu_product_gradient(grad: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the gradient of GELU's input `before` (N, D), given that of gelu(before) weight^T (N, O)."""
    return general_gemm(weight, grad, out_dtype=grad.dtype, layout="NN", grad=True, gelu=True, gelu_in=before)[0]


def weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of `product` with respect to its weight (O, D) and, if it is given, its bias (O,). The
    weight's is added to `out`, a float32 buffer."""
    dtype = grad.dtype if out is None else out.dtype
    added = {"accumulate": out is not None, "out": out, "bias": bias}
    return general_gemm(x, grad, out_dtype=dtype, layout="NT", grad=True, **added)[:2]


class FusedModules(TESpecProvider):
    """megatron-core's set of Transformer Engine modules, with some replaced by ours.

    A norm is a module of ours and no part of the linear layer after it, so that one kernel computes the norm and the
    sum before it.

    Args:
        fast_attention: the class of attention cores in place of Transformer Engine's.
        cp: ranks that divide the tokens of a segment. They keep Transformer Engine's attention, which passes keys and
            values from rank to rank; ours would keep those of all ranks.
    """

    def __init__(self, fast_attention: type | None = None, cp: int = 1) -> None:
        super().__init__()
        self._fast_attention, self._cp = fast_attention, cp

    def column_parallel_linear(self) -> type:
        return ColumnLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return OnePassNorm

    def row_parallel_linear(self) -> type:
        return RowLinear

    def core_attention(self, head_dim: int = 0, *, causal: bool = True) -> type:
        passes_keys = causal and self._cp > 1 and head_dim <= CUDNN_HEAD_DIM
        if self._fast_attention and not passes_keys:
            return self._fast_attention
        return PackedAttention if head_dim <= CUDNN_HEAD_DIM else FlashAttention

    def activation_func(self) -> type:
        return Swiglu
