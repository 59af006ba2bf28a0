"""A check of the delta rule's kernels against the plain rule, on the GPU in use; it refuses a wrong compiler.

Triton 3.4 to 3.7.0 silently compiled flash-linear-attention's gated backward pass to wrong gradients on Hopper
(flash-linear-attention issue 640). Our kernels differ from theirs and are right with 3.6.0; this check measures them
with any other version.
"""

from functools import cache

import torch
import triton

from trainer.data.packed_chunks import PackedChunks
from trainer.parts.delta.rule import plain
from trainer.parts.delta.rule.gates import delta_gates
from trainer.parts.delta.rule.kernel_rule import gated_delta_rule

TOLERANCE = 0.03  # relative to the norm; bf16 operands give errors of 0.003 to 0.004 here
_BOUNDS = (0, 1, 64, 128, 193, 320, 700)
_NAMES = ("o", "dq", "dk", "dv", "da", "db", "dA_log", "ddt_bias")


@cache
def prove_kernels(device: int) -> dict[str, float]:
    """Check the kernels, once per process and device.

    Returns:
        |kernels - plain rule in float64| / |plain rule| of the outputs and of each gradient.
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
    chunks = PackedChunks.of(_BOUNDS).to(device)
    draw = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    tokens, key_heads, value_heads, dim = _BOUNDS[-1], 2, 4, 128
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
    return {name: ((x - y).norm() / y.norm()).item() for name, x, y in zip(_NAMES, got, expected)}
