"""The private parts of FlashAttention 4 (the package flash-attn-4) that the trainer uses: its forward and its backward
pass. Imported only if it is installed.

Its public function would keep padded queries, keys, values and outputs for the backward pass.

`tests/trainer/layers/test_attention_gpu.py` compares them with float32.

h = query heads, g = key-value heads, d = head dim, e = d, or `padded(d)` with zeros after the first d components.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch.autograd.function import once_differentiable

from dataset_builders.known_version import check_version

KNOWN = "==4.0.0b36"
check_version("flash-attn-4", KNOWN, __name__, "attention may be wrong", refuses=True)

# Its compiler warns of one of its own arguments when it first compiles a kernel.
warnings.filterwarnings("ignore", message="Argument .* cannot be converted to a JitArgument")
# Head dims are padded to a multiple of this: with heads of 72 the gradient of the queries is wrong by its own size.
_WIDTH = 32


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, head_dim, call, buffers):
        out, grads = (None, ()) if buffers is None or padded(head_dim) > head_dim else buffers
        ctx.buffers = dict(zip(("dq", "dk", "dv"), grads))
        out = None if out is None else out.view(query.shape)
        out, lse, *_ = _flash_attn_fwd(*_padded(query, key, value), **call, return_lse=True, out=out)
        out = out[..., :head_dim].contiguous()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        grads = _flash_attn_bwd(*_padded(query, key, value, out, grad), lse, **ctx.call, **ctx.buffers)
        return *(x[..., : query.size(-1)] for x in grads), *(None,) * 3


def padded(head_dim: int) -> int:
    """Return the width to which heads are padded."""
    return head_dim + -head_dim % _WIDTH


def _padded(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [F.pad(x, (0, missing)) if (missing := -x.size(-1) % _WIDTH) else x for x in tensors]


def attend_in_segments(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bounds: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    *,
    head_dim: int,
    causal: bool,
    scale: float | None,
    buffers: tuple[torch.Tensor | None, Sequence[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Return softmax(scale q k^T) v of each segment: (queries, h, d) bfloat16.

    Args:
        qkv: (queries, h, e), (keys, g, e) and (keys, g, e) bfloat16.
        bounds: (segments + 1,) int32 cumulative numbers of queries, and of keys.
        longest: queries of the longest segment, and keys.
        causal: whether the last query of a segment sees all its keys, the query before it one key fewer, and so on.
        buffers: memory for the output and for the gradients of queries, keys and values; used unless heads are padded.
    """
    call = {
        "cu_seqlens_q": bounds[0],
        "cu_seqlens_k": bounds[1],
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
        "softmax_scale": head_dim**-0.5 if scale is None else scale,
        "causal": causal,
    }
    return _Attend.apply(*qkv, head_dim, call, buffers)
