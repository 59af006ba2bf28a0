"""The encoder's layers as spans: all that lies between two attentions is one function with a backward pass of its own.

Autograd would compute the sum of a residual's gradients and the gradient of each bias in passes of their own. Here the
kernel that ends a half's gradient computes both: it already holds the numbers. The results of norms and of the GELU are
not kept: backward computes them again, the norms in the kernel of their gradients.

P = patches, D = hidden size, F = inner size of the MLP, h = heads, d = head dim, E = d or more (`Heads`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch.autograd.function import once_differentiable

from trainer.layers.kernel_support import can_import, kernels_run
from trainer.layers.packed_layer import PackedLayer
from trainer.layers.segments import PackedSegments, Rotation

if can_import():
    from trainer.parts.attention.qkv_kernel import Heads, split_forward, split_gradients
    from trainer.parts.vision.norm_kernel import add_norm, add_norm_gradients
if HAVE_TE:
    from trainer.layers.modules.engine import (
        ColumnLinear,
        RowLinear,
        gelu_product,
        gelu_product_gradient,
        product,
        product_gradient,
        weight_gradient,
    )


def can_join(layers: Sequence[PackedLayer]) -> bool:
    """Whether spans compute these layers: in bfloat16 on a GPU of our kernels, with Transformer Engine's products,
    without adapters, and not if several ranks share a layer."""
    config, weight = layers[0].config, layers[0].self_attention.linear_qkv.weight
    gelu = config.activation_func
    # cuBLAS's GELU is the tanh approximation, and needs rows of a multiple of 16 bytes.
    by_tanh = isinstance(gelu, partial) and gelu.func is F.gelu and gelu.keywords == {"approximate": "tanh"}
    fits = config.params_dtype is torch.bfloat16 and config.ffn_hidden_size % 8 == 0
    return HAVE_TE and by_tanh and fits and kernels_run(weight.device) and all(_is_ours(layer) for layer in layers)


def _is_ours(layer: PackedLayer) -> bool:
    columns = layer.self_attention.linear_qkv, layer.mlp.linear_fc1
    rows = layer.self_attention.linear_proj, layer.mlp.linear_fc2
    kinds = {type(x) for x in columns} == {ColumnLinear} and {type(x) for x in rows} == {RowLinear}
    return kinds and columns[0].tp_size == 1


def joined_layers(
    layers: Sequence[PackedLayer], hidden: torch.Tensor, rotation: Rotation, segments: PackedSegments
) -> Iterator[torch.Tensor]:
    """Yield the output of each layer, (P, 1, D), given the first one's input (P, 1, D)."""
    hidden, *qkv = _run(Span(None, layers[0]), hidden.squeeze(1), rotation)
    for layer, following in zip(layers, [*layers[1:], None]):
        attended = layer.attend(*qkv, segments)
        hidden, *qkv = _run(Span(layer, following), hidden, rotation, attended.squeeze(1))
        yield hidden[:, None]


def joined_layer(
    layer: PackedLayer, hidden: torch.Tensor, rotation: Rotation, segments: PackedSegments
) -> torch.Tensor:
    return next(joined_layers([layer], hidden, rotation, segments))


@dataclass
class Span:
    """The end of a layer after its attention, the beginning of the next one up to its attention, or both."""

    ending: PackedLayer | None  # the layer whose attention comes before the span
    beginning: PackedLayer | None  # the layer whose attention comes after it

    @property
    def heads(self) -> "Heads":
        """The heads of the next attention, as wide as its core takes them."""
        attention = self.beginning.self_attention
        groups, head_dim = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        per_group = attention.num_attention_heads_per_partition // groups
        return Heads(groups, per_group, head_dim, getattr(attention.core_attention, "head_width", head_dim))

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The linear layers and norms, in the order of their use; each has a weight and a bias."""
        modules = []
        if self.ending:
            attention, norm, mlp = self.ending.self_attention, self.ending.pre_mlp_layernorm, self.ending.mlp
            modules += [attention.linear_proj, norm, mlp.linear_fc1, mlp.linear_fc2]
        if self.beginning:
            modules += [self.beginning.input_layernorm, self.beginning.self_attention.linear_qkv]
        return modules

    @property
    def eps(self) -> float:
        """The epsilon of the norms' variances."""
        return (self.ending or self.beginning).config.layernorm_epsilon


def _run(span: Span, hidden: torch.Tensor, rotation: Rotation, *attended: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Map (P, D) and the previous attention's output (P, h * d) to (P, D) and the next attention's q, k, v."""
    params = [param for module in span.modules for param in (module.weight, module.bias)]
    return _Span.apply(span, hidden, *(attended or (None,)), *rotation, *params)


class _Span(torch.autograd.Function):
    """The parameters are weight and bias of each of `Span.modules`, so the end of a layer has the first eight and the
    beginning of the next the last four; the gradients come in the same order."""

    @staticmethod
    def forward(ctx, span, hidden, attended, cos, sin, *params):
        kept, ctx.span, eps = [], span, span.eps
        norm, norm_bias, *_ = params[-4:]  # those of the next attention, if there is one
        statistics = None
        if span.ending:
            proj, proj_bias, mlp_norm, mlp_norm_bias, fc1, fc1_bias, fc2, fc2_bias = params[:8]
            # The sum after attention, and its norm.
            middle, normed, mlp_statistics = add_norm(
                *(hidden, product(attended, proj), proj_bias, mlp_norm, mlp_norm_bias, eps)
            )
            inner, before_gelu = gelu_product(normed, fc1, fc1_bias)
            kept = [attended, middle, mlp_statistics, before_gelu]
            if span.beginning:
                # The sum after the MLP, with fc2's bias, and the norm of the next layer.
                hidden, normed, statistics = add_norm(*(middle, product(inner, fc2), fc2_bias, norm, norm_bias, eps))
            else:
                hidden = product(inner, fc2, fc2_bias).add_(middle)
        elif span.beginning:  # the first layer: nothing to add
            hidden, normed, statistics = add_norm(hidden, None, None, norm, norm_bias, eps)
        qkv = ()
        if span.beginning:
            kept += [cos, sin, hidden, statistics]
            qkv = split_forward(product(normed, *params[-2:]), cos, sin, span.heads)
        ctx.save_for_backward(*kept, *params)
        ctx.num_kept = len(kept)
        return hidden, *qkv

    @staticmethod
    @once_differentiable
    def backward(ctx, d_hidden, *d_qkv):
        saved = ctx.saved_tensors  # read once: a recomputed layer gives them once
        kept, params = saved[: ctx.num_kept], saved[ctx.num_kept :]
        span, modules, needed = ctx.span, ctx.span.modules, ctx.needs_input_grad[5:]
        d_hidden, d_attended, grads = d_hidden.contiguous(), None, []
        fc2_bias_grad = None
        if span.beginning:
            cos, sin, hidden, statistics = kept[-4:]
            norm, norm_bias, qkv, _ = params[-4:]
            d_mixed, qkv_bias_grad = split_gradients(d_qkv, cos, sin, span.heads)
            d_hidden, normed, sums = add_norm_gradients(
                *(d_hidden, product_gradient(d_mixed, qkv), hidden, statistics, norm, norm_bias)
            )
            qkv_grad = _of_weight(modules[-1], needed[-2], d_mixed, normed)
            *norm_grads, fc2_bias_grad = sums  # fc2's bias was added before the norm, by the same kernel
            grads = [*norm_grads, qkv_grad, qkv_bias_grad]
        if span.ending:
            attended, middle, statistics, before_gelu = kept[:4]
            proj, _, norm, norm_bias, fc1, fc1_bias, fc2, _ = params[:8]
            if fc2_bias_grad is None:  # the last layer
                fc2_bias_grad = d_hidden.sum(0, dtype=torch.float32)
            d_inner = gelu_product_gradient(d_hidden, fc2, before_gelu)
            # The forward pass took the GELU of numbers that were not yet rounded to `before_gelu`.
            inner = F.gelu(before_gelu, approximate="tanh")
            fc2_grad = _of_weight(modules[3], needed[6], d_hidden, inner)
            d_hidden, normed, sums = add_norm_gradients(
                *(d_hidden, product_gradient(d_inner, fc1), middle, statistics, norm, norm_bias)
            )
            fc1_grad, fc1_bias_grad = _of_weight_and_bias(modules[2], needed[4:6], d_inner, normed, fc1_bias)
            *norm_grads, proj_bias_grad = sums
            d_attended = product_gradient(d_hidden, proj)
            proj_grad = _of_weight(modules[0], needed[0], d_hidden, attended)
            of_mlp = [fc1_grad, fc1_bias_grad, fc2_grad, fc2_bias_grad]
            grads = [proj_grad, proj_bias_grad, *norm_grads, *of_mlp, *grads]
        grads = [grad if grad is None else grad.to(param.dtype) for grad, param in zip(grads, params)]
        return None, d_hidden, d_attended, None, None, *grads


def _of_weight_and_bias(
    linear: torch.nn.Module, needed: Sequence[bool], grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of a linear layer's weight and bias, the latter None if `bias` is."""
    weight = linear.weight
    if not any(needed):
        return None, None
    if not (needed[0] and linear.fuse_wgrad_accumulation):
        return weight_gradient(grad, x, bias)
    of_bias = weight_gradient(grad, x, bias, out=weight.main_grad)[1]
    weight.grad_added_to_main_grad = True
    # The weight's gradient is in its float32 buffer. This tensor is never read, but data parallelism waits for a
    # gradient.
    return torch.empty_like(weight), of_bias


def _of_weight(linear: torch.nn.Module, needed: bool, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    return _of_weight_and_bias(linear, [needed], grad, x, None)[0]
