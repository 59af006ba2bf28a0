"""The delta rule from chunk to chunk (Triton): one program per segment, value head and part of the value dims.

The state is kept in float32 and transposed, (value dims, key dims). So the state and the new values are the left factor
of each product and never leave the registers. S = state, n = the values that a chunk writes (the "new values"), E = exp
of the decay to the chunk's end; u, w, A, G: see chunk_kernel.py.
    n = u - w S;  o = exp(G) q S + A n;  S <- exp(G_last) S + k^T (E n)
"""

import triton
import triton.language as tl


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
