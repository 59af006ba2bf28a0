"""The gated delta rule and the operations around it in torch, for CPUs, float32 and float64, with autograd's gradients.

The Triton kernels are tested against this code.

T = tokens of a bin, N = its chunks of C = 64, HK = key heads, H = value heads (a multiple of HK), d = head dim.
Formulas: Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024), in the chunk form of Yang et al. 2024,
"Parallelizing linear transformers with the delta rule".
"""

import torch
import torch.nn.functional as F

from trainer.data.packed_chunks import CHUNK, PackedChunks

L2_EPS = 1e-6


def convolve(mixed: torch.Tensor, weight: torch.Tensor, chunks: PackedChunks) -> torch.Tensor:
    """Apply a causal depthwise convolution, then silu; no tap crosses the start of a segment.

    Args:
        mixed: (T, channels).
        weight: (channels, taps); the last tap is for the token itself.
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
    """Split (T, [q | k | v]) into q, k (T, HK, d) of unit length, q times d ** -0.5, and v (T, H, d)."""
    widths = [key_heads * head_dim, key_heads * head_dim, value_heads * head_dim]
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in convolved.split(widths, 1))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    return q * head_dim**-0.5, k, v


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log of the decay (<= 0) and beta, both (T, H), at least float32, from a and b, both (T, H)."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype)), b.to(dtype).sigmoid()


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply an RMS norm to each head of o (T, H, d), then the gate silu(z), z (T, H, d); weight (d,) centred at one."""
    return weight * o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * F.silu(z)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunks: PackedChunks
) -> torch.Tensor:
    """Apply the delta rule: for each token, update the state S (d, d) of each value head and read the output o.

    S <- exp(g) S; S <- S + k (beta (v - k S)); o = q S. S is zero at the start of every segment.

    Every segment is cut into chunks of 64 tokens, the last chunk padded with zeros. Computations inside a chunk run for
    all chunks in parallel; the states advance from chunk to chunk, for all segments in parallel. So the outputs of a
    bin equal the outputs of its segments computed one by one.

    Maps q, which is scaled, and k (T, HK, d), v (T, H, d), g and beta (T, H) to (T, H, d).
    """
    repeat = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    cells = cells_of(chunks)
    q, k, v, g, beta = (to_chunks(x, cells, chunks.chunks) for x in (q, k, v, g, beta))
    decay = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # Mask before exp: above the diagonal exp and its gradient would overflow.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    scores = (q @ k.mT) * between
    system = (k @ k.mT) * between * beta.unsqueeze(-1)
    right = torch.cat([v, k * decay.exp().unsqueeze(-1)], -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    # Inside a chunk the new values solve (I + L) u = beta v; w takes the state's part of them away.
    o = _over_chunks(q, k, decay, scores, *solved.split(v.shape[-1], -1), chunks)
    return o.transpose(1, 2).flatten(0, 1)[cells]


def _over_chunks(q, k, decay, scores, u, w, chunks: PackedChunks) -> torch.Tensor:
    """Run the recurrence over chunks, for all segments in parallel: inputs (N, H, C, ...) -> (N, H, C, d)."""
    spans = [span[:2] for span in chunks.spans.tolist()]  # longest first, so that unfinished segments are a prefix
    into_end = (decay[..., -1:] - decay).exp().unsqueeze(-1) * k
    from_start = decay.exp().unsqueeze(-1) * q
    through = decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(len(spans), *q.shape[1:2], q.shape[-1], u.shape[-1])
    # `order` has the chunk of each row of `outs`: step by step, and inside a step by segment.
    order, outs = [], []
    for step in range(spans[0][1] - spans[0][0]):
        at = [first + step for first, last in spans if first + step < last]
        state = state[: len(at)]  # of the segments that go on
        new = u[at] - w[at] @ state
        outs.append(from_start[at] @ state + scores[at] @ new)
        state = through[at] * state + into_end[at].mT @ new
        order += at
    place = torch.empty(len(order), dtype=torch.long)
    place[order] = torch.arange(len(order))
    return torch.cat(outs)[place]


def cells_of(chunks: PackedChunks) -> torch.Tensor:
    """Return (T,) the row of each token if every chunk has 64 rows."""
    positions = torch.cat([torch.arange(n) for n in chunks.lengths()])
    # (segments,) the first chunk of each: the number of chunks of all segments before it.
    firsts = torch.tensor([-(-n // CHUNK) for n in chunks.lengths()]).cumsum(0).roll(1)
    firsts[0] = 0
    return (firsts.repeat_interleave(torch.tensor(chunks.lengths())) * CHUNK + positions).to(chunks.starts.device)


def to_chunks(x: torch.Tensor, cells: torch.Tensor, count: int) -> torch.Tensor:
    """Arrange (T, heads, ...) as (N, heads, C, ...), with zeros where a chunk has no token."""
    padded = x.new_zeros(count * CHUNK, *x.shape[1:]).index_copy(0, cells, x)
    return padded.unflatten(0, (count, CHUNK)).transpose(1, 2)
