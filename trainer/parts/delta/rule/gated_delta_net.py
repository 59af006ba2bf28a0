"""The gated delta net of Qwen3.5 between its projections, in torch; on Hopper in bf16, in Triton kernels.

This file combines the operations, decides which of the two computes (`kernels_fit`), and checks the kernels on the GPU
in use (`check_kernels`).

T = tokens of a bin, HK = key heads, H = value heads, d = head dim.
"""

from dataclasses import dataclass
from functools import cache

import torch

from trainer.data.packed_chunks import PackedChunks
from trainer.layers.kernel_support import can_import, hopper_kernels_run
from trainer.layers.segments import ResultBuffers
from trainer.parts.delta.rule import plain

if can_import():
    import triton

    from trainer.parts.delta.rule.convolution import convolve_heads
    from trainer.parts.delta.rule.gates import delta_gates, gated_norm
    from trainer.parts.delta.rule.kernels import gated_delta_rule

TOLERANCE = 0.03  # of `check_kernels`, relative to the norm; bf16 operands give errors of 0.003 to 0.004 here


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    key: int
    value: int
    dim: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of q, k and v, in their order in the projection and the convolution."""
        return self.key * self.dim, self.key * self.dim, self.value * self.dim


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
    buffers: ResultBuffers | None = None,
) -> torch.Tensor:
    """Compute the input of the output projection; state and convolution restart at each segment.

    Args:
        mixed: (T, [q | k | v]); rows of mixed, z, b and a may be slices of one projection's rows.
        z: (T, H * d), the gate of the norm.
        b: (T, H), beta before its sigmoid.
        a: (T, H), the decay before dt_bias is added.
        buffers: memory for the output and for the gradients of mixed, z, b and a, which the kernels then write into.

    Returns:
        (T, H * d).
    """
    gate = z.unflatten(1, (heads.value, heads.dim))
    weight, a_log, dt_bias = parameters.conv_weight, parameters.a_log, parameters.dt_bias
    if kernels_fit(mixed, heads):
        out, grads = buffers or (None, ())
        of_mixed, of_gate, of_b, of_a = grads or (None,) * 4
        q, k, v = convolve_heads(mixed, weight, chunks, (heads.key, heads.value, heads.dim), of_mixed)
        decay, beta = delta_gates(a, b, a_log, dt_bias, chunks, (of_a, of_b) if grads else None)
        o = gated_delta_rule(q, k, v, decay, beta, chunks)
        return gated_norm(o, gate, parameters.norm_weight, parameters.eps, (out, of_gate)).flatten(1)
    q, k, v = plain.split_heads(plain.convolve(mixed, weight, chunks), heads.key, heads.value, heads.dim)
    g, beta = plain.gates(a, b, a_log, dt_bias)
    exact = g.dtype  # float32, or float64 if the inputs are
    o = plain.gated_delta_rule(q.to(exact), k.to(exact), v.to(exact), g, beta, chunks)
    return (
        plain.gated_norm(o, gate.to(exact), parameters.norm_weight.to(exact), parameters.eps).to(mixed.dtype).flatten(1)
    )


def kernels_fit(mixed: torch.Tensor, heads: DeltaHeads) -> bool:
    """Whether to use the kernels: they are tested on Hopper, in bf16, for head dim 128. All else uses plain torch."""
    return mixed.dtype == torch.bfloat16 and heads.dim == 128 and hopper_kernels_run(mixed.device)


@cache
def check_kernels(device: int) -> dict[str, float]:
    """Check the kernels against the plain rule on the GPU in use, once per process and device.

    Triton 3.4 to 3.7.0 silently compiled flash-linear-attention's gated backward pass to wrong gradients on Hopper
    (flash-linear-attention issue 640). Our kernels differ from theirs and are right with 3.6.0; this check measures
    them with any other version.

    Returns:
        |kernels - plain rule in float64| / |plain rule| of the outputs and of each gradient.

    Raises:
        RuntimeError: one of them is above TOLERANCE.
    """
    errors = _errors(torch.device("cuda", device))
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    if wrong:
        raise RuntimeError(
            f"the delta rule's kernels are wrong on {torch.cuda.get_device_name(device)} with Triton "
            f"{triton.__version__}: {wrong} of the norm, {TOLERANCE} is allowed; Triton 3.6.0 is known to be right"
        )
    return errors


def _errors(device: torch.device) -> dict[str, float]:
    bounds = (0, 1, 64, 128, 193, 320, 700)  # of segments: 1 token, one less and one more than a chunk, many chunks
    chunks = PackedChunks.of(bounds).to(device)
    draw = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    tokens, key_heads, value_heads, dim = bounds[-1], 2, 4, 128
    q, k = (torch.nn.functional.normalize(drawn(tokens, key_heads, dim), dim=-1) for _ in range(2))
    v, a, b = drawn(tokens, value_heads, dim), drawn(tokens, value_heads), drawn(tokens, value_heads)
    inputs = [x.bfloat16() for x in (q * dim**-0.5, k, v, a, b)]
    inputs += [drawn(value_heads), drawn(value_heads) - 3]
    gradient = drawn(tokens, value_heads, dim).bfloat16()
    fast = [x.detach().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    shared = [x.unsqueeze(2).expand(-1, -1, value_heads // key_heads, -1) for x in fast[:2]]
    got = gated_delta_rule(*shared, fast[2], *delta_gates(*fast[3:], chunks), chunks)
    expected = plain.gated_delta_rule(*exact[:3], *plain.gates(*exact[3:]), chunks)
    got = [got, *torch.autograd.grad(got, fast, gradient)]
    expected = [expected, *torch.autograd.grad(expected, exact, gradient.double())]
    names = ("o", "dq", "dk", "dv", "da", "db", "dA_log", "ddt_bias")
    return {name: ((x - y).norm() / y.norm()).item() for name, x, y in zip(names, got, expected)}
