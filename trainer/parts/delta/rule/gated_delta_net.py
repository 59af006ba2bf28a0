"""The gated delta net of Qwen3.5 between its projections, in torch; on Hopper in bf16, in Triton kernels.

T = tokens of a bin, HK = key heads, H = value heads, d = head dim.
"""

from dataclasses import dataclass

import torch

from trainer.data.packed_chunks import PackedChunks
from trainer.layers.kernels.dispatch import can_import, hopper_kernels_run
from trainer.layers.segments import Places
from trainer.parts.delta.rule import plain

if can_import():
    from trainer.parts.delta.rule.convolution import convolve_heads
    from trainer.parts.delta.rule.gated_norm import gated_norm
    from trainer.parts.delta.rule.gates import delta_gates
    from trainer.parts.delta.rule.kernel_rule import gated_delta_rule


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    key: int
    value: int
    dim: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of q, k and v, in their order in the projection and the convolution."""
        return self.key * self.dim, self.key * self.dim, self.value * self.dim


def kernels_fit(mixed: torch.Tensor, heads: DeltaHeads) -> bool:
    """Whether to use the kernels: they are tested on Hopper, in bf16, for head dim 128. All else uses plain torch."""
    return mixed.dtype == torch.bfloat16 and heads.dim == 128 and hopper_kernels_run(mixed.device)


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    conv_weight: torch.Tensor  # (channels, 4); the last tap is for the token itself
    a_log: torch.Tensor  # (H,)
    dt_bias: torch.Tensor  # (H,)
    norm_weight: torch.Tensor  # (d,), centred at one
    eps: float = 1e-6  # of the norm


def gated_delta_net(
    mixed: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    parameters: DeltaParameters,
    heads: DeltaHeads,
    chunks: PackedChunks,
    places: Places | None = None,
) -> torch.Tensor:
    """Compute the input of the output projection; state and convolution restart at each segment.

    Args:
        mixed: (T, [q | k | v]); rows of mixed, z, b and a may be slices of one projection's rows.
        z: (T, H * d), the gate of the norm.
        b: (T, H), beta before its sigmoid.
        a: (T, H), the decay before dt_bias is added.
        places: memory for the output and for the gradients of mixed, z, b and a, which the kernels then write into.

    Returns:
        (T, H * d).
    """
    gate = z.unflatten(1, (heads.value, heads.dim))
    weight, a_log, dt_bias = parameters.conv_weight, parameters.a_log, parameters.dt_bias
    if kernels_fit(mixed, heads):
        out, grads = places or (None, ())
        of_mixed, of_gate, of_b, of_a = grads or (None,) * 4
        q, k, v = convolve_heads(mixed, weight, chunks, (heads.key, heads.value, heads.dim), of_mixed)
        decay, beta = delta_gates(a, b, a_log, dt_bias, chunks, (of_a, of_b) if grads else None)
        o = gated_delta_rule(q, k, v, decay, beta, chunks)
        return gated_norm(o, gate, parameters.norm_weight, parameters.eps, (out, of_gate)).flatten(1)
    q, k, v = plain.split_heads(plain.convolve(mixed, weight, chunks), heads.key, heads.value, heads.dim)
    g, beta = plain.gates(a, b, a_log, dt_bias)
    exact = g.dtype
    o = plain.gated_delta_rule(q.to(exact), k.to(exact), v.to(exact), g, beta, chunks)
    return (
        plain.gated_norm(o, gate.to(exact), parameters.norm_weight.to(exact), parameters.eps).to(mixed.dtype).flatten(1)
    )
