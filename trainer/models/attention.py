"""Self-attention over a packed bin: rotation by explicit angles, and a plain torch core for machines without CUDA.

T = tokens (or patches) of the bin, h = query heads, g = key-value heads, d = head dim, n = segments.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import fused_apply_rotary_pos_emb  # None without TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType

__all__ = ["PackedSegments", "RotarySelfAttention", "Rotation", "SelfAttentionSubmodules", "TorchVarlenAttention"]


class Rotation:
    """Rotary embedding by one angle a token and pair: x * cos + (-x2, x1) * sin in float32, back in x's dtype.

    On CUDA by Transformer Engine's kernel for one unpacked sequence, which takes the angle of each place as it is; its
    kernel for packed sequences would begin anew at each segment.

    Args:
        angles: (T, d) float32, the halves of d equal.
    """

    def __init__(self, angles: torch.Tensor) -> None:
        self.angles = angles

    @cached_property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each (T, 1, d)."""
        return self.angles.cos()[:, None], self.angles.sin()[:, None]

    def __call__(self, x_Thd: torch.Tensor) -> torch.Tensor:
        if x_Thd.is_cuda and fused_apply_rotary_pos_emb is not None:
            return fused_apply_rotary_pos_emb(x_Thd[:, None], self.angles[:, None, None])[:, 0]
        x, (cos, sin) = x_Thd.float(), self.cos_sin
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x * cos + turned * sin).to(x_Thd.dtype)


class RotarySelfAttention(SelfAttention):
    """megatron-core's self-attention for packed training, with the angles applied by us.

    megatron-core 0.16.1 guesses from a length which of two meanings the angles of a packed sequence have, and its
    fused rotation takes the first angles for every segment; both are wrong for positions with three axes.
    """

    def forward(self, hidden_states, attention_mask=None, *, rotary_pos_emb, packed_seq_params, **_: object):
        """(T, 1, D) -> ((T, 1, D), bias). `rotary_pos_emb` is a Rotation."""
        query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden_states))
        query, key = rotary_pos_emb(query), rotary_pos_emb(key)
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(
                query, key, value, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params
            )
        else:
            out = self.core_attention(
                query, key, value, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params
            )
        return self.linear_proj(out.reshape(out.size(0), 1, -1))


@dataclass
class PackedSegments(PackedSeqParams):
    """PackedSeqParams that also knows its segments in groups of like length, for the plain torch core."""

    @classmethod
    def of(
        cls, cu_seqlens: torch.Tensor, max_seqlen: int, cu_seqlens_padded: torch.Tensor | None = None
    ) -> "PackedSegments":
        """Without `cu_seqlens_padded` the segments touch. Say so: Transformer Engine else compares the two on the
        host, once a layer, and the host waits for the device."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens_padded,
            cu_seqlens_kv_padded=cu_seqlens_padded,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
        )

    @cached_property
    def groups(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each group of n segments no longer than m (m a power of two): places and mask, both (n, m).

        A place is the token's number in T, 0 where the mask is False. At most half of a row is filling.
        """
        bounds = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        starts, stops = bounds[:-1].long(), bounds[1:].long()
        lengths = stops - starts
        width = torch.pow(2, torch.ceil(torch.log2(lengths.clamp(min=1).double()))).long()
        groups = []
        for size in width.unique().tolist():
            chosen = width == size
            longest = int(lengths[chosen].max())
            offsets = torch.arange(longest, device=lengths.device)
            mask = offsets < lengths[chosen][:, None]
            groups.append(((starts[chosen][:, None] + offsets) * mask, mask))
        return groups


class TorchVarlenAttention(torch.nn.Module):
    """Core attention by torch's scaled_dot_product_attention, one call a group of segments of like length."""

    def __init__(self, *, config, attn_mask_type: AttnMaskType, softmax_scale: float | None = None, **_) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.causal = attn_mask_type == AttnMaskType.causal

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedSegments, **_):
        """(T, h, d), (T, g, d), (T, g, d) -> (T, h * d)."""
        out = query.new_zeros(query.shape)
        for places, mask in packed_seq_params.groups:
            q, k, v = (x[places].transpose(1, 2) for x in (query, key, value))
            # With a causal mask the filling comes after every real token, which therefore never sees it.
            seen = None if self.causal or bool(mask.all()) else mask[:, None, None]
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=self.causal, scale=self.scale, enable_gqa=True
            )
            out = out.index_put((places[mask],), o.transpose(1, 2)[mask])
        return out.reshape(len(out), -1)
