"""The delta rule inside a chunk (Triton): the inputs of the recurrence over chunks, for all chunks in parallel.

N = chunks of C = 64 tokens, H = value heads, HK = key heads, D = head dim. With decay G (the cumulative log inside
the chunk), P_ij = exp(G_i - G_j) for i >= j:
    R = (I + L)^-1 diag(beta),  L_ij = beta_i (k_i k_j) P_ij for i > j      (C, C)
    u = R v,  w = R diag(exp G) k,  A_ij = (q_i k_j) P_ij for i >= j
Values are passed on transposed, (D, C): so they are the left factor of a later product and stay in registers.
"""

import triton
import triton.language as tl


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
