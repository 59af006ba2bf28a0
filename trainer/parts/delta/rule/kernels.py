"""The gated delta rule on a GPU, forward and backward, for a packed bin (Triton). `plain.py` has the rule in torch.

A bin's segments are cut into N chunks of C = 64 tokens. H = value heads, HK = key heads, D = head dim.

Inside a chunk (`prepare_chunks`), for all chunks in parallel. With decay G (the cumulative log inside the chunk),
P_ij = exp(G_i - G_j) for i >= j:
    R = (I + L)^-1 diag(beta),  L_ij = beta_i (k_i k_j) P_ij for i > j      (C, C)
    u = R v,  w = R diag(exp G) k,  A_ij = (q_i k_j) P_ij for i >= j

From chunk to chunk (`forward_states`): one program per segment, value head and part of the value dims. S = state,
n = the values that a chunk writes (the "new values"), E = exp of the decay to the chunk's end:
    n = u - w S;  o = exp(G) q S + A n;  S <- exp(G_last) S + k^T (E n)
The state is kept in float32 and transposed, (value dims, key dims); values are passed on transposed too, (D, C). So
both are the left factor of each product and never leave the registers.

Backward goes from the last chunk to the first (`backward_states`):
    dn = A^T do + E k dS;  dS <- exp(G_last) dS + q^T (exp(G) do) - w^T dn

The gradients (`chunk_gradients`) follow for all chunks in parallel, from states and new values of both passes. With
X = (do n^T) P, dv = R^T dn and M = -(dv n^T) P below the diagonal:
    dq = exp(G) do S^T + X k
    dk = k_row + k_col,  k_row = M k - exp(G) dv S^T,  k_col = X^T q + M^T k + E n dS^T
Key i is in a row where it reads (with beta_i exp(G_i)) and in a column where it writes (with exp(-G_i)). So the
gradients of G and of log(beta) need no more products:
    dG_i = q_i dq_i + k_i k_row_i - k_i k_col_i; for the last G, add the contribution through the next state
    d log(beta_i) = v_i dv_i + k_i k_row_i

The forward pass keeps only its inputs; the backward pass computes the rest again, unless `keep_states`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trainer.data.packed_chunks import CHUNK, PackedChunks

# Launch settings of each kernel, the fastest on an H200: warps, loads in flight, value dims per program.
PRECISION = "tf32"  # of the inverse; with tf32x3 it took 422 us in place of 218
PREPARE = {"num_warps": 4, "maxnreg": 168}  # three programs per multiprocessor, at the price of 15 spilled registers
FORWARD = {"PART": 64, "num_warps": 4, "STAGES": 3}
RECOMPUTE = {"PART": 64, "num_warps": 4, "STAGES": 3}
BACKWARD = {"PART": 64, "num_warps": 4, "STAGES": 3}
# With PART=32 the kernel ended in an illegal access, which is not explained.
GRADIENTS = {"PART": 64, "num_warps": 4}


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: PackedChunks,
    keep_states: bool = False,
) -> torch.Tensor:
    """Apply the causal delta rule; the state of each segment starts at zero.

    States are float32. Products are of the inputs' dtype and are summed in float32.

    Args:
        q: (T, HK, H / HK, D), scaled, the same for the H / HK value heads of a key head; D a power of two, at least 64.
        k: (T, HK, H / HK, D), of unit length, likewise.
        v: (T, H, D).
        decay: (N, H, 64) float32, the log of the decay cumulated inside each chunk, see gates.py. Where a chunk has no
            token, the chunk's last value.
        beta: (N, H, 64) float32 above 0; 0 where the chunk has no token.
        keep_states: whether to keep the states, so that the backward pass does not compute them again; until then this
            costs 80 KB per chunk and value head.

    Returns:
        (T, H, D).
    """
    return _DeltaRule.apply(q, k, v, decay, beta, chunks, keep_states)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, decay, beta, chunks: PackedChunks, keep_states: bool):
        q, k = q[:, :, 0], k[:, :, 0]  # the value heads of a key head share them
        problem = _Problem(*(x.contiguous() for x in (q, k, v, decay, beta)), chunks)
        prepared = _prepare(problem, solve=keep_states)
        o = torch.empty_like(problem.v)
        kept = prepared.room_for_states() if keep_states else (None, None)
        _forward(problem, prepared, FORWARD, o, *kept)
        ctx.chunks = chunks
        ctx.save_for_backward(*problem[:5], *((*prepared, *kept) if keep_states else ()))
        return o

    @staticmethod
    def backward(ctx, do):
        saved = ctx.saved_tensors  # read once only: under recomputation a second read fails
        problem, kept = _Problem(*saved[:5], ctx.chunks), saved[5:]
        do = do.contiguous()
        if kept:
            prepared, (states, news) = _Prepared(*kept[:4]), kept[4:]
        else:
            prepared = _prepare(problem, solve=True)
            states, news = prepared.room_for_states()
            _forward(problem, prepared, RECOMPUTE, None, states, news)
        d_states, d_news = _backward(problem, prepared, do)
        dq, dk, dv, d_decay, d_log_beta = _gradients(problem, prepared.solved, do, (states, d_states, news, d_news))
        # Each value head has its own gradient of the q and k that it shares; `convolve_heads` sums them while it reads.
        dq, dk = (x.unflatten(1, (problem.k.shape[1], -1)) for x in (dq, dk))
        # beta is 0 where a chunk has no token, and so is its gradient.
        return dq, dk, dv, d_decay, d_log_beta / problem.beta.clamp_min(1e-30), None, None


class _Problem(NamedTuple):
    """The inputs of the kernels: contiguous tensors, and the sizes that are constants for the compiler."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    chunks: PackedChunks

    def sizes(self) -> dict[str, int]:
        return {"H": self.v.shape[1], "HK": self.k.shape[1], "D": self.v.shape[2], "C": CHUNK}


class _Prepared(NamedTuple):
    """A, R (None if not requested), transposed u, and -w of every chunk."""

    scores: torch.Tensor
    solved: torch.Tensor | None
    u_turned: torch.Tensor
    w_negative: torch.Tensor

    def room_for_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the states and for n; n overwrites u, as a program reads its part of u before writing n."""
        dim = self.u_turned.shape[2]
        return self.u_turned.new_empty(*self.u_turned.shape[:2], dim, dim), self.u_turned


def _prepare(problem: _Problem, solve: bool) -> _Prepared:
    chunks, sizes = problem.chunks, problem.sizes()
    cells, heads, dim = chunks.chunks, sizes["H"], sizes["D"]
    scores = problem.q.new_empty(cells, heads, CHUNK, CHUNK)
    solved = torch.empty_like(scores) if solve else None
    prepared = _Prepared(
        scores, solved, scores.new_empty(cells, heads, dim, CHUNK), scores.new_empty(cells, heads, CHUNK, dim)
    )
    prepare_chunks[(heads, cells)](
        *(*problem[:5], chunks.starts, chunks.rows, *prepared),
        **sizes,
        PRECISION=PRECISION,
        WRITE_SOLVED=solve,
        **PREPARE,
    )
    return prepared


def _forward(problem: _Problem, prepared: _Prepared, launch: dict[str, int], o, states, news) -> None:
    """Write o, or states and news, or all three: every argument of these that is not None."""
    sizes, chunks, part = problem.sizes(), problem.chunks, launch["PART"]
    dim = sizes["D"]
    tokens = [_tiles(x, CHUNK, dim) for x in (problem.q, problem.k)]
    cells = [_tiles(prepared.scores, CHUNK, CHUNK), _tiles(prepared.u_turned, part, CHUNK)]
    forward_states[(dim // part, sizes["H"], len(chunks.spans))](
        *(*tokens, problem.decay, chunks.spans, *cells, _tiles(prepared.w_negative, CHUNK, dim), o, states, news),
        **sizes,
        **launch,
        WRITE_O=o is not None,
        WRITE_STATES=states is not None,
    )


def _backward(problem: _Problem, prepared: _Prepared, do: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of each chunk's final state and of n."""
    sizes, chunks, part = problem.sizes(), problem.chunks, BACKWARD["PART"]
    dim = sizes["D"]
    d_news = torch.empty_like(prepared.u_turned)
    d_states = d_news.new_empty(*d_news.shape[:2], dim, dim)
    tokens = [_tiles(problem.q, CHUNK, dim), _tiles(problem.k, CHUNK, dim), _tiles(do, CHUNK, part)]
    cells = [_tiles(prepared.scores, CHUNK, CHUNK), _tiles(prepared.w_negative, CHUNK, dim)]
    backward_states[(dim // part, sizes["H"], len(chunks.spans))](
        *(*tokens, problem.decay, chunks.spans, *cells, d_states, d_news), **sizes, **BACKWARD
    )
    return d_states, d_news


def _gradients(problem: _Problem, solved, do, both_passes: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q and k, both (T, H, D) for each value head, and of v, decay and log(beta), given states,
    d_states, news and d_news."""
    q, k, v, decay, _, chunks = problem
    parts = v.shape[2] // GRADIENTS["PART"]
    dq, dk, dv = (torch.empty_like(v) for _ in range(3))
    d_decay, d_log_beta = (decay.new_empty(parts, *decay.shape) for _ in range(2))
    chunk_gradients[(parts, v.shape[1], chunks.chunks)](
        *(q, k, v, do, decay, chunks.starts, chunks.rows, solved, *both_passes, dq, dk, dv, d_decay, d_log_beta),
        **problem.sizes(),
        **GRADIENTS,
    )
    return dq, dk, dv, d_decay.sum(0), d_log_beta.sum(0)


def _tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe the tiles of a tensor for Hopper's copy engine: tokens by all heads' dims, or cells' rows by columns."""
    width = x.shape[-1] if x.dim() == 4 else x[0].numel()
    return TensorDescriptor.from_tensor(x.view(-1, width), [rows, columns])


# The kernels: inside a chunk.


@triton.jit
def _merge(inverse, system, corner, PRECISION: tl.constexpr):
    """Return the inverse of blocks of twice the size.

    Args:
        inverse: inverse of the diagonal blocks.
        corner: mask of the corner blocks that join two diagonal blocks.
    """
    edge = tl.dot(inverse, tl.where(corner, system, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(edge, inverse, input_precision=PRECISION)


@triton.jit
def _invert_small(system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + system)^-1 for a strictly lower triangular (blocks, SIZE = 16, SIZE), as stable as substitution."""
    row = tl.arange(0, SIZE)[None, :, None]
    col = tl.arange(0, SIZE)[None, None, :]
    # Blocks of 2, then of 4, 8 and 16 by matrix products.
    inverse = tl.where(row == col, 1.0, 0.0) - tl.where((row == col + 1) & (row % 2 == 1), system, 0.0)
    inverse = _merge(inverse, system, (row // 4 == col // 4) & (row // 2 > col // 2), PRECISION)
    inverse = _merge(inverse, system, (row // 8 == col // 8) & (row // 4 > col // 4), PRECISION)
    return _merge(inverse, system, row // 8 > col // 8, PRECISION)


@triton.jit
def unit_lower_inverse(system, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + system)^-1 for a strictly lower triangular (C = 64, C), by diagonal blocks of 16, 32 and 64."""
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, BLOCKS)
    own = block[:, None, None, None] == block[None, None, :, None]
    small = tl.sum(tl.where(own, tl.reshape(system, (BLOCKS, 16, BLOCKS, 16)), 0.0), 2)
    small = _invert_small(small, 16, PRECISION)
    inverse = tl.reshape(tl.where(own, small[:, :, None, :], 0.0), (C, C))
    row = tl.arange(0, C)[:, None]
    col = tl.arange(0, C)[None, :]
    inverse = _merge(inverse, system, (row // 32 == col // 32) & (row // 16 > col // 16), PRECISION)
    return _merge(inverse, system, row // 32 > col // 32, PRECISION)


@triton.jit
def chunk_decay(decay, C: tl.constexpr):
    """Return exp(G_i - G_j) where i >= j, else 0: (C,) -> (C, C)."""
    row = tl.arange(0, C)[:, None]
    col = tl.arange(0, C)[None, :]
    # Masked before exp too, which would overflow above the diagonal.
    return tl.where(row >= col, tl.exp(tl.where(row >= col, decay[:, None] - decay[None, :], 0.0)), 0.0)


@triton.jit
def prepare_chunks(
    q, k, v, decay, beta, starts, rows, scores, solved, u_turned, w_negative,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, WRITE_SOLVED: tl.constexpr,
):  # fmt: skip
    """Write A (N, H, C, C), R (N, H, C, C) if WRITE_SOLVED, u transposed (N, H, D, C), and -w (N, H, C, D).

    Each program computes one chunk and value head.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(rows + chunk)
    key_head = head // (H // HK)
    token = tl.arange(0, C)
    dim = tl.arange(0, D)
    inside = (token < count)[:, None]
    at_key = (start + token)[:, None] * (HK * D) + key_head * D + dim[None, :]
    at_value = (start + token)[:, None] * (H * D) + head * D + dim[None, :]
    cell = chunk * H + head
    g = tl.load(decay + cell * C + token)
    b = tl.load(beta + cell * C + token)
    between = chunk_decay(g, C)
    square = cell * C * C + token[:, None] * C + token[None, :]
    keys = tl.load(k + at_key, mask=inside, other=0.0)
    queries = tl.load(q + at_key, mask=inside, other=0.0)
    tl.store(scores + square, (tl.dot(queries, tl.trans(keys)) * between).to(q.dtype.element_ty))
    strict = token[:, None] > token[None, :]
    system = tl.where(strict, tl.dot(keys, tl.trans(keys)) * between * b[:, None], 0.0)
    inverse = unit_lower_inverse(system, C, PRECISION)
    right = (inverse * b[None, :]).to(q.dtype.element_ty)
    if WRITE_SOLVED:
        tl.store(solved + square, right)
    w = tl.dot((inverse * (b * tl.exp(g))[None, :]).to(q.dtype.element_ty), keys)
    wide = cell * C * D + token[:, None] * D + dim[None, :]
    tl.store(w_negative + wide, (-w).to(q.dtype.element_ty))
    values = tl.load(v + at_value, mask=inside, other=0.0)
    turned = cell * C * D + dim[None, :] * C + token[:, None]
    tl.store(u_turned + turned, tl.dot(right, values).to(q.dtype.element_ty))


# The kernels: from chunk to chunk.


@triton.jit
def forward_states(
    q, k, decay, spans, scores, u_turned, w_negative, o, states, news,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
    WRITE_O: tl.constexpr, WRITE_STATES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write o (T, H, D); or, for the backward pass, each chunk's initial state (N, H, D, D) and n (N, H, D, C)."""
    part = tl.program_id(0) * PART + tl.arange(0, PART)
    head = tl.program_id(1)
    span = tl.program_id(2)
    first = tl.load(spans + span * 4)
    last = tl.load(spans + span * 4 + 1)
    begin = tl.load(spans + span * 4 + 2)
    end = tl.load(spans + span * 4 + 3)
    token = tl.arange(0, C)
    dim = tl.arange(0, D)
    # Scalars move the bases, so the offsets inside a tile are the same 32-bit values in every iteration.
    at_value = token[:, None] * (H * D) + part[None, :]
    turned = part[:, None] * C + token[None, :]
    key_column = (head // (H // HK)) * D
    state = tl.zeros((PART, D), tl.float32)
    for step in tl.range(0, last - first, num_stages=STAGES):
        chunk = first + step
        start = begin + (chunk - first) * C
        inside = (token < end - start)[:, None]
        cell = chunk.to(tl.int64) * H + head
        g = tl.load(decay + cell * C + token)
        g_last = tl.load(decay + cell * C + C - 1)
        narrow = state.to(q.dtype)
        w = w_negative.load([(chunk * H + head) * C, 0])
        u = u_turned.load([(chunk * H + head) * D + tl.program_id(0) * PART, 0])
        new = tl.dot(narrow, tl.trans(w), acc=u.to(tl.float32))
        if WRITE_STATES:
            tl.store(states + cell * D * D + part[:, None] * D + dim[None, :], narrow)
            tl.store(news + cell * C * D + turned, new.to(q.dtype))
        if WRITE_O:
            queries = q.load([start, key_column])
            across = scores.load([(chunk * H + head) * C, 0])
            out = tl.dot(narrow, tl.trans(queries)) * tl.exp(g)[None, :]
            out = tl.dot(new.to(q.dtype), tl.trans(across), acc=out)
            at = o + (start.to(tl.int64) * H + head) * D + at_value
            tl.store(at, tl.trans(out).to(o.dtype.element_ty), mask=inside)
        keys = k.load([start, key_column])
        into_end = (new * tl.exp(g_last - g)[None, :]).to(q.dtype)
        state = tl.dot(into_end, keys, acc=state * tl.exp(g_last))


@triton.jit
def backward_states(
    q, k, do, decay, spans, scores, w_negative, d_states, d_news,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, C: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of each chunk's final state (N, H, D, D) and of its n (N, H, D, C), both transposed.

    The loop runs from the last chunk to the first:
        dn = A^T do + E k dS;  dS <- exp(G_last) dS + q^T (exp(G) do) - w^T dn
    """
    part = tl.program_id(0) * PART + tl.arange(0, PART)
    head = tl.program_id(1)
    span = tl.program_id(2)
    first = tl.load(spans + span * 4)
    last = tl.load(spans + span * 4 + 1)
    begin = tl.load(spans + span * 4 + 2)
    end = tl.load(spans + span * 4 + 3)
    token = tl.arange(0, C)
    dim = tl.arange(0, D)
    # Scalars move the bases, so the offsets inside a tile are the same 32-bit values in every iteration.
    turned = part[:, None] * C + token[None, :]
    key_column = (head // (H // HK)) * D
    d_state = tl.zeros((PART, D), tl.float32)
    for step in tl.range(0, last - first, num_stages=STAGES):
        chunk = last - 1 - step
        start = begin + (chunk - first) * C
        cell = chunk.to(tl.int64) * H + head
        g = tl.load(decay + cell * C + token)
        g_last = tl.load(decay + cell * C + C - 1)
        narrow = d_state.to(q.dtype)
        tl.store(d_states + cell * D * D + part[:, None] * D + dim[None, :], narrow)
        keys = k.load([start, key_column])
        d_new = tl.dot(narrow, tl.trans(keys)) * tl.exp(g_last - g)[None, :]
        d_out = tl.trans(do.load([start, head * D + tl.program_id(0) * PART]))
        across = scores.load([(chunk * H + head) * C, 0])
        d_new = tl.dot(d_out, across, acc=d_new)
        d_new = d_new.to(q.dtype)
        tl.store(d_news + cell * C * D + turned, d_new)
        w = w_negative.load([(chunk * H + head) * C, 0])
        d_state = tl.dot(d_new, w, acc=d_state * tl.exp(g_last))
        queries = q.load([start, key_column])
        # the tile may include tokens after the segment's end, which belong to another segment
        from_start = (d_out.to(tl.float32) * tl.where(token < end - start, tl.exp(g), 0.0)[None, :]).to(narrow.dtype)
        d_state = tl.dot(from_start, queries, acc=d_state)


# The kernels: the gradients.


@triton.jit
def chunk_gradients(
    q, k, v, do, decay, starts, rows, solved, states, d_states, news, d_news, dq, dk, dv, d_decay, d_log_beta,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write all gradients; each program computes one chunk, value head and PART of the key dims. The gradients of G and
    log(beta), sums over the key dims, are written as partial sums (D / PART, N, H, C). dq and dk are (T, H, D): the
    caller sums over the value heads that share a key head."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    cell = chunk * H + head
    start = tl.load(starts + chunk).to(tl.int64)
    token = tl.arange(0, C)
    inside = (token < tl.load(rows + chunk))[:, None]
    dim = tl.arange(0, D)
    own = part * PART + tl.arange(0, PART)
    dtype = q.dtype.element_ty
    at_value = token[:, None] * (H * D) + dim[None, :]
    at_own = token[:, None] * (H * D) + own[None, :]
    at_key = token[:, None] * (HK * D) + own[None, :]
    turned = dim[:, None] * C + token[None, :]
    at_state = dim[:, None] * D + own[None, :]
    value_base = (start * H + head) * D
    key_base = (start * HK + head // (H // HK)) * D
    sums = (part * tl.num_programs(2) * H + cell) * C + token
    g = tl.load(decay + cell * C + token)
    g_last = tl.load(decay + cell * C + C - 1)
    between = chunk_decay(g, C)
    d_new = tl.load(d_news + cell * C * D + turned)
    value_grad = tl.dot(tl.trans(tl.load(solved + cell * C * C + token[:, None] * C + token[None, :])), tl.trans(d_new))
    log_beta = tl.zeros((C,), tl.float32)
    if part == 0:
        values = tl.load(v + value_base + at_value, mask=inside, other=0.0)
        log_beta = tl.sum(values.to(tl.float32) * value_grad, 1)
        tl.store(dv + value_base + at_value, value_grad.to(dtype), mask=inside)
    value_grad = value_grad.to(dtype)
    new = tl.load(news + cell * C * D + turned)
    system = tl.where(token[:, None] > token[None, :], -tl.dot(value_grad, new) * between, 0.0).to(dtype)
    state = tl.load(states + cell * D * D + at_state)
    from_start = tl.exp(g)[:, None]
    keys = tl.load(k + key_base + at_key, mask=inside, other=0.0)
    row_grad = tl.dot(system, keys, acc=-tl.dot(value_grad, state) * from_start)
    row_part = tl.sum(keys.to(tl.float32) * row_grad, 1)
    tl.store(d_log_beta + sums, log_beta + row_part)
    d_out = tl.load(do + value_base + at_value, mask=inside, other=0.0)
    across = (tl.dot(d_out, new) * between).to(dtype)
    query_grad = tl.dot(across, keys, acc=tl.dot(d_out, state) * from_start)
    tl.store(dq + value_base + at_own, query_grad.to(dtype), mask=inside)
    queries = tl.load(q + key_base + at_key, mask=inside, other=0.0)
    d_g = row_part + tl.sum(queries.to(tl.float32) * query_grad, 1)

    d_state = tl.load(d_states + cell * D * D + at_state)
    d_last = tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0) * tl.exp(g_last)
    column_grad = tl.dot(tl.trans(new), d_state) * tl.exp(g_last - g)[:, None]
    d_last += tl.sum(tl.sum(keys.to(tl.float32) * column_grad, 1), 0)
    column_grad = tl.dot(tl.trans(across), queries, acc=column_grad)
    column_grad = tl.dot(tl.trans(system), keys, acc=column_grad)
    tl.store(dk + value_base + at_own, (row_grad + column_grad).to(dtype), mask=inside)
    d_g += tl.where(token == C - 1, d_last, 0.0) - tl.sum(keys.to(tl.float32) * column_grad, 1)
    tl.store(d_decay + sums, d_g)
