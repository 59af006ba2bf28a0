"""Self-attention in the pieces of a PackedLayer: queries and keys are rotated by explicit angles.

A PackedLayer calls `prepare` (projection, norms of queries and keys, rotation), `attend` (the core, over each segment
alone), and `linear_proj`, the output projection. On a GPU of our kernels, `prepare` is the projection and one kernel
(qkv_kernel.py; with gates gated_kernel.py).

T = tokens (or patches) of the bin, h = query heads, g = key-value heads, d = head dim, D = hidden size.
"""

from functools import partial

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from trainer.layers.kernel_support import can_import, kernels_run
from trainer.layers.recompute import recomputed
from trainer.layers.segments import PackedSegments, ResultBuffers, Rotation
from trainer.parts.attention.part import Attention

if can_import():
    from trainer.parts.attention.gated_kernel import gated, split_gated_heads
    from trainer.parts.attention.qkv_kernel import split_norm_rotate


def spec(part: Attention, modules: BackendSpecProvider) -> ModuleSpec:
    """Return the spec of a decoder layer's attention: causal, with norms of queries and keys."""
    return attention_spec(modules, head_dim=part.head_dim, causal=True, qk_norm=True, gated=part.gated)


def attention_spec(
    modules: BackendSpecProvider, *, head_dim: int, causal: bool, qk_norm: bool, gated: bool = False
) -> ModuleSpec:
    """Return the spec of a layer's attention, built from this set of modules.

    Args:
        causal: whether a token sees only itself and the tokens before it in its segment, not the whole segment.
        qk_norm: whether to normalise queries and keys. `TransformerConfig.qk_layernorm` must have the same value: only
            if it is true does megatron-core sum the gradients of these norms over the tensor-parallel ranks.
        gated: whether each head has a gate. `TransformerConfig.attention_output_gate` must have the same value.
    """
    norm = modules.layer_norm() if qk_norm else None
    return ModuleSpec(
        module=GatedSelfAttention if gated else RotarySelfAttention,
        params={"attn_mask_type": AttnMaskType.causal if causal else AttnMaskType.no_mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.column_parallel_linear(),
            core_attention=modules.core_attention(head_dim, causal=causal),
            linear_proj=modules.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


class RotarySelfAttention(SelfAttention):
    """megatron-core's self-attention for packed training, in the pieces of a PackedLayer: this class applies the angles
    itself."""

    def forward(self, *_: object, **__: object):
        raise NotImplementedError("a PackedLayer calls prepare, attend and linear_proj")

    def prepare(self, hidden_states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        """Map (T, 1, D) to rotated queries (T, h, d), rotated keys (T, g, d) and values (T, g, d)."""
        # The kernel rotates whole heads alone.
        turns_whole_head = 2 * rotation.cos.size(-1) == self.hidden_size_per_attention_head
        if turns_whole_head and kernels_run(hidden_states.device):
            mixed, _ = self.get_query_key_value_tensors(hidden_states, split_qkv=False)
            return split_norm_rotate(
                mixed.reshape(len(mixed), -1),
                *rotation,
                self.num_query_groups_per_partition,
                self.hidden_size_per_attention_head,
                None if self.q_layernorm is None else self.q_layernorm.weight,
                None if self.k_layernorm is None else self.k_layernorm.weight,
                self.config.layernorm_epsilon,
            )
        query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden_states))
        # megatron-core 0.16.1 guesses from a length which of two meanings the angles of a packed sequence have, and its
        # fused rotation uses the first angles for every segment. Both are wrong for positions with three axes.
        return rotation.rotate(query), rotation.rotate(key), value

    def attend(self, query, key, value, segments: PackedSegments) -> torch.Tensor:
        """Attend, given the results of `prepare` and the segments; return (T, 1, h * d)."""
        core = partial(recomputed, self.core_attention) if self.checkpoint_core_attention else self.core_attention
        out = core(query, key, value, None, attn_mask_type=self.attn_mask_type, packed_seq_params=segments)
        return out.view(out.size(0), 1, -1)

    def modules_of_prepare(self) -> list[torch.nn.Module]:
        modules = (self.linear_qkv, self.q_layernorm, self.k_layernorm)
        return [module for module in modules if module is not None]

    @property
    def attended_width(self) -> int:
        return self.num_attention_heads_per_partition * self.hidden_size_per_attention_head

    def partial_gradients(self) -> list[torch.nn.Parameter]:
        """Return no parameter: megatron-core sums the gradients of the norms over the tensor-parallel ranks."""
        return []


class GatedSelfAttention(RotarySelfAttention):
    """Self-attention that multiplies each head's output by the sigmoid of the head's gate. `linear_qkv` computes the
    gates along with the queries."""

    def prepare(self, hidden_states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        """Map (T, 1, D) to rotated queries (T, h, d), rotated keys (T, g, d), values (T, g, d), gates (T, h, d)."""
        # The kernel does not gather groups of heads that several ranks share.
        if kernels_run(hidden_states.device) and self.config.num_query_groups >= self.world_size:
            mixed, _ = self.linear_qkv(hidden_states)
            groups = self.num_query_groups_per_partition
            return split_gated_heads(
                mixed.squeeze(1),
                *rotation,
                (groups, self.num_attention_heads_per_partition // groups, self.hidden_size_per_attention_head),
                (self.q_layernorm.weight, self.k_layernorm.weight),
                self.config.layernorm_epsilon,
                zero_centred=self.config.layernorm_zero_centered_gamma,
            )
        projected = self.get_query_key_value_tensors(hidden_states, output_gate=True)
        query, key, value, gate = (x.squeeze(1) for x in projected)
        return rotation.rotate(query), rotation.rotate(key), value, gate

    def attend(self, query, key, value, gate, segments: PackedSegments) -> torch.Tensor:
        """Attend, given the results of `prepare` and the segments; return (T, 1, h * d)."""
        # The buffer of the output is for the gated one, and the last of the gradients' for the gate; the core gets the
        # other three.
        out, grads = segments.buffers or (None, (None,) * 4)
        segments.buffers = ResultBuffers(None, grads[:3]) if segments.buffers else None
        return _gated(super().attend(query, key, value, segments), gate, (out, grads[3]))


def _gated(
    attended: torch.Tensor, gate: torch.Tensor, buffers: tuple[torch.Tensor | None, torch.Tensor | None]
) -> torch.Tensor:
    """Return attended (T, 1, h * d) times the sigmoid of gate (T, h, d)."""
    if kernels_run(gate.device):
        return gated(attended, gate, buffers)
    return attended * gate.sigmoid().flatten(1)[:, None]
