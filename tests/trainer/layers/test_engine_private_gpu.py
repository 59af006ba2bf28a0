"""Transformer Engine's private parts are as `trainer/layers/modules/engine.py` expects them."""

from collections.abc import Iterator

from tests.helpers.hardware import requires_engine, requires_gpus
from tests.helpers.private_parts import changed, differing, fail_if_changed, unmentioned

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
RECORDED = {
    f"{ATTENTION}.backends:FusedAttnFunc.forward": [
        *("ctx", "is_training", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv"),
        *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "page_table_k", "page_table_v", "q", "k", "v"),
        *("attn_bias", "attn_scale", "dropout_p", "fast_zero_fill", "qkv_layout", "attn_bias_type"),
        *("attn_mask_type", "softmax_type", "window_size", "rng_gen", "fused_attention_backend", "use_FAv2_bwd"),
        *("fp8", "fp8_meta", "quantizers", "deterministic", "softmax_offset", "fp8_output", "layer_number"),
        "return_max_logit",
    ],
    f"{ATTENTION}.context_parallel:attn_forward_func_with_cp": [
        *("is_training", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
        *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "dropout_p", "cp_group", "cp_global_ranks", "cp_stream"),
        *("cp_comm_type", "softmax_scale=None", "qkv_format='bshd'", "attn_mask_type='causal'"),
        *("attn_bias_type='no_bias'", "attn_bias=None", "deterministic=False", "use_fused_attention=False"),
        *("window_size=None", "fp8=False", "fp8_meta=None", "quantizers=None", "pad_between_seqs=False"),
        *("use_flash_attn_3=False", "softmax_type='vanilla'", "softmax_offset=None", "fp8_output=False"),
        *("layer_number=1", "return_max_logit=False"),
    ],
    "transformer_engine.pytorch.cpp_extensions.gemm:general_gemm": [
        *("A", "B", "out_dtype=None", "quantization_params=None", "gelu=False", "gelu_in=None", "alpha=1.0"),
        *("beta=None", "accumulate=False", "layout='TN'", "out=None", "bias=None", "use_split_accumulator=False"),
        *("grad=False", "ub=None", "ub_type=None", "extra_output=None", "bulk_overlap=False"),
    ],
    "transformer_engine_torch:swiglu": ["input", "quantizer"],
    "transformer_engine_torch:dswiglu": ["grad", "fwd_input", "quantizer"],
}
CHOICE, BACKEND = {"use_fused_attention", "fused_attention_backend"}, {"F16_arbitrary_seqlen"}


def changes() -> Iterator[str]:
    yield from changed(RECORDED)
    from megatron.core.extensions.transformer_engine import TELinear
    from transformer_engine.pytorch import DotProductAttention, Linear
    from transformer_engine.pytorch.attention.dot_product_attention import backends, dot_product_attention
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    attributes = {
        backends.FusedAttention: ("softmax_scale", "use_FAv2_bwd", "deterministic"),
        DotProductAttention: (
            *("fused_attention", "deterministic", "layer_number"),
            *("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"),
        ),
        Linear: ("gemm_bias_unfused_add",),
        TELinear: ("te_return_bias",),
    }
    for module, names in attributes.items():
        yield from unmentioned(module.__init__, *names)
    chosen = dot_product_attention._attention_backends.keys()
    yield from differing("dot_product_attention._attention_backends", chosen & CHOICE, CHOICE)
    yield from differing("FusedAttnBackend", FusedAttnBackend.keys() & BACKEND, BACKEND)


@requires_engine
@requires_gpus(1)
def test_transformer_engines_private_parts():
    fail_if_changed("transformer-engine", __name__)
