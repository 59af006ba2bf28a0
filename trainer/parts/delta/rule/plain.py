"""The gated delta rule and what stands around it, in torch: on CPUs, in float32 and float64, with autograd's gradients.
Also the rule by which the Triton kernels are judged.

T = tokens of a bin, N = its chunks of C = 64, HK = key heads, H = value heads (a multiple of HK), d = head dim.
The formulas are those of Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024), in the chunk form of Yang et al. 2024,
"Parallelizing linear transformers with the delta rule".
"""

import torch
import torch.nn.functional as F

from trainer.data.packed_chunks import CHUNK, PackedChunks

L2_EPS = 1e-6


def convolve(mixed: torch.Tensor, weight: torch.Tensor, chunks: PackedChunks) -> torch.Tensor:
    """Causal depthwise convolution, then silu; no tap reaches over a segment's start.

    Args:
        mixed: (T, channels).
        weight: (channels, taps); the last tap is the token's own.
    """
    taps = weight.shape[1]
    total = mixed * weight[:, -1]
    for back in range(1, min(taps, len(mixed))):
        shifted = F.pad(mixed[:-back], (0, 0, back, 0))
        inside = (chunks.positions >= back).unsqueeze(1)
        total = total + shifted * inside * weight[:, taps - 1 - back]
    return F.silu(total)


def split_heads(
    convolved: torch.Tensor, key_heads: int, value_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(T, [q | k | v]) -> q, k (T, HK, d) of unit length, q times d ** -0.5, and v (T, H, d)."""
    widths = [key_heads * head_dim, key_heads * head_dim, value_heads * head_dim]
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in convolved.split(widths, 1))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    return q * head_dim**-0.5, k, v


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) twice -> the log of the decay (<= 0) and beta, (T, H), in float32 at the least."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype)), b.to(dtype).sigmoid()


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over each head, then the gate: (T, H, d) twice and (d,), centred at one -> (T, H, d)."""
    return weight * o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * F.silu(z)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunks: PackedChunks
) -> torch.Tensor:
    """What the state S (d, d) of each value head answers, token by token; S is zero at every segment's start:
    S <- exp(g) S; S <- S + k (beta (v - k S)); o = q S.

    Every segment is cut into chunks of 64, the last one filled with zeros. What stays inside a chunk is computed for
    all chunks at once; the states go from chunk to chunk, those of all segments together. So a bin's answers are those
    of its segments alone.

    Args:
        q: (T, HK, d), scaled.
        k: (T, HK, d).
        v: (T, H, d).
        g: (T, H).
        beta: (T, H).

    Returns:
        (T, H, d).
    """
    repeat = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    cells = cells_of(chunks)
    q, k, v, g, beta = (to_chunks(x, cells, chunks.chunks) for x in (q, k, v, g, beta))
    decay = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # exp of the masked difference: above the diagonal it would overflow, and its gradient with it
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    scores = (q @ k.mT) * between
    system = (k @ k.mT) * between * beta.unsqueeze(-1)
    right = torch.cat([v, k * decay.exp().unsqueeze(-1)], -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    o = _over_chunks(q, k, decay, scores, *solved.split(v.shape[-1], -1), chunks)
    return o.transpose(1, 2).flatten(0, 1)[cells]


def _over_chunks(q, k, decay, scores, u, w, chunks: PackedChunks) -> torch.Tensor:
    """The recurrence over the chunks of all segments side by side: (N, H, C, .) each -> (N, H, C, d)."""
    spans = [span[:2] for span in chunks.spans.tolist()]  # the longest first: those still running are the first ones
    into_end = (decay[..., -1:] - decay).exp().unsqueeze(-1) * k
    from_start = decay.exp().unsqueeze(-1) * q
    through = decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(len(spans), *q.shape[1:2], q.shape[-1], u.shape[-1])
    order, outs = [], []
    for step in range(spans[0][1] - spans[0][0]):
        at = [first + step for first, last in spans if first + step < last]
        state = state[: len(at)]
        new = u[at] - w[at] @ state
        outs.append(from_start[at] @ state + scores[at] @ new)
        state = through[at] * state + into_end[at].mT @ new
        order += at
    place = torch.empty(len(order), dtype=torch.long)
    place[order] = torch.arange(len(order))
    return torch.cat(outs)[place]


def cells_of(chunks: PackedChunks) -> torch.Tensor:
    """(T,) the row of each token where every chunk has 64 rows."""
    positions = torch.cat([torch.arange(n) for n in chunks.lengths()])
    firsts = torch.tensor([-(-n // CHUNK) for n in chunks.lengths()]).cumsum(0).roll(1)
    firsts[0] = 0
    return (firsts.repeat_interleave(torch.tensor(chunks.lengths())) * CHUNK + positions).to(chunks.starts.device)


def to_chunks(x: torch.Tensor, cells: torch.Tensor, count: int) -> torch.Tensor:
    """(T, heads, ...) -> (N, heads, C, ...), zeros where a chunk has no token."""
    padded = x.new_zeros(count * CHUNK, *x.shape[1:]).index_copy(0, cells, x)
    return padded.unflatten(0, (count, CHUNK)).transpose(1, 2)
