"""Transformer Engine's modules as this trainer uses them. Imported only if Transformer Engine is installed.

Private parts, as they are in Transformer Engine 2.11.0:

- `FusedAttnFunc`, whose 32 arguments have no names, and `attn_forward_func_with_cp` with the same attention over ranks
- `_attention_backends`, in which the attention module notes its choice
- `swiglu` and `dswiglu` of the C++ extension
- attributes of its modules, among them `gemm_bias_unfused_add` and `bias_gelu_nvfusion`; `trainer/layers/lora/` uses
  `return_layernorm_output` and `te_return_bias`

`tests/trainer/layers/test_engine_private_gpu.py` compares them with the installed Transformer Engine.
"""

from functools import partial

import torch
import torch.nn.functional as F
import transformer_engine_torch as tex
from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from transformer_engine.pytorch import LayerNormMLP
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention
from transformer_engine.pytorch.attention.dot_product_attention.backends import FusedAttnFunc
from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import attn_forward_func_with_cp
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

from dataset_builders.known_version import check_version
from trainer.layers.attention_cores import CUDNN_HEAD_DIM, FlashAttention
from trainer.layers.segments import PackedSegments
from trainer.libraries.torch_private import parameters_of

KNOWN = "==2.11.0"
check_version("transformer-engine", KNOWN, __name__, "attention may be wrong", refuses=True)

_MASKS = {AttnMaskType.causal: "padding_causal", AttnMaskType.no_mask: "padding"}  # inside each segment
_CUDNN = FusedAttnBackend["F16_arbitrary_seqlen"]


class NormColumnLinear(TELayerNormColumnParallelLinear):
    """A fused norm and column-parallel linear layer, with the bias added in the matrix product.

    megatron-core's `skip_bias_add` would cost one more pass over memory forward and one backward.
    """

    def __init__(self, *args: object, skip_bias_add: bool = False, **kwargs: object) -> None:
        super().__init__(*args, skip_bias_add=False, **kwargs)


class RowLinear(TERowParallelLinear):
    """A row-parallel linear layer that adds its bias in the matrix product on a single rank.

    Transformer Engine adds the bias after the sum over ranks, even on one rank, where there is no sum.
    """

    def __init__(self, *args: object, skip_bias_add: bool = False, **kwargs: object) -> None:
        super().__init__(*args, skip_bias_add=False, **kwargs)
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


class Swiglu:
    """silu(first half) * second half, where each value is read and written once.

    It is not a torch module, because it has no state to save.
    """

    def __init__(self, *, config: object) -> None:
        pass

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _Swiglu.apply(gate_up)


class JointMLP:
    """An MLP that computes norm, matrix products and GELU in one Transformer Engine module, with the GELU fused.

    The original MLP keeps the weights, and loads, saves and reduces them. So this class is not a torch module:
    otherwise the model would have the weights twice.

    Args:
        mlp: an MLP with the layers `NormColumnLinear` and `RowLinear`.
    """

    def __init__(self, mlp: MLP) -> None:
        self._fc1, self._fc2 = mlp.linear_fc1, mlp.linear_fc2
        config = mlp.config
        self._module = LayerNormMLP(
            config.hidden_size,
            config.ffn_hidden_size,
            eps=config.layernorm_epsilon,
            activation="gelu",
            params_dtype=config.params_dtype,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            device="meta",
        )
        self._module.bias_gelu_nvfusion = False  # else the module prefers a separate kernel between the products

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map (T, 1, D) before the norm to (T, 1, D), and None, as no bias remains to be added."""
        module, fc1, fc2 = self._module, self._fc1, self._fc2
        module.fuse_wgrad_accumulation = fc1.fuse_wgrad_accumulation
        parameters_of(module).update(  # in every call, because the MLP's parameters may be replaced between calls
            layer_norm_weight=fc1.layer_norm_weight,
            layer_norm_bias=fc1.layer_norm_bias,
            fc1_weight=fc1.weight,
            fc1_bias=fc1.bias,
            fc2_weight=fc2.weight,
            fc2_bias=fc2.bias,
        )
        return module(hidden), None


def can_join(mlp: MLP) -> bool:
    """Whether `JointMLP` can compute an MLP.

    cuBLAS's GELU is the tanh approximation, and needs rows of a multiple of 16 bytes. Only bfloat16 is joined: float32
    is for exact comparisons and stays unfused. Several ranks are excluded, because they must sum before the second bias
    is added.
    """
    config, gelu = mlp.config, mlp.activation_func
    ours = type(mlp.linear_fc1) is NormColumnLinear and type(mlp.linear_fc2) is RowLinear
    by_tanh = isinstance(gelu, partial) and gelu.func is F.gelu and gelu.keywords == {"approximate": "tanh"}
    plain = config.normalization == "LayerNorm" and config.add_bias_linear and not config.gated_linear_unit
    fits = config.params_dtype is torch.bfloat16 and config.ffn_hidden_size % 8 == 0
    return ours and by_tanh and plain and fits and mlp.linear_fc1.tp_size == 1


class FusedModules(TESpecProvider):
    """megatron-core's set of Transformer Engine modules, with some replaced by ours.

    Args:
        fast_attention: the class of attention cores in place of Transformer Engine's.
        cp: ranks that divide the tokens of a segment. They keep Transformer Engine's attention, which passes keys and
            values from rank to rank; ours would keep those of all ranks.
    """

    def __init__(self, fast_attention: type | None = None, cp: int = 1) -> None:
        super().__init__()
        self._fast_attention, self._cp = fast_attention, cp

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnLinear

    def row_parallel_linear(self) -> type:
        return RowLinear

    def core_attention(self, head_dim: int = 0, *, causal: bool = True) -> type:
        passes_keys = causal and self._cp > 1 and head_dim <= CUDNN_HEAD_DIM
        if self._fast_attention and not passes_keys:
            return self._fast_attention
        return PackedAttention if head_dim <= CUDNN_HEAD_DIM else FlashAttention

    def activation_func(self) -> type:
        return Swiglu
