"""The gradients of the delta rule (Triton), for all chunks in parallel, from states and new values of both passes.

With X = (do n^T) P, dv = R^T dn and M = -(dv n^T) P below the diagonal (other symbols: see chunk_kernel.py,
state_kernels.py):
    dq = exp(G) do S^T + X k
    dk = k_row + k_col,  k_row = M k - exp(G) dv S^T,  k_col = X^T q + M^T k + E n dS^T
Key i is in a row where it reads (with beta_i exp(G_i)) and in a column where it writes (with exp(-G_i)). So the
gradients of G and of log(beta) need no more products:
    dG_i = q_i dq_i + k_i k_row_i - k_i k_col_i; for the last G, add the contribution through the next state
    d log(beta_i) = v_i dv_i + k_i k_row_i
"""

import triton
import triton.language as tl

from trainer.parts.delta.rule.chunk_kernel import chunk_decay


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
