"""The gated delta rule on a GPU, forward and backward, for a packed bin (Triton). Formulas: see the
other kernel files of this folder.

The forward pass keeps only its inputs; the backward pass computes the rest again, unless `keep_states`.
"""

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from trainer.data.packed_chunks import CHUNK, PackedChunks
from trainer.parts.delta.rule.chunk_kernel import prepare_chunks
from trainer.parts.delta.rule.gradient_kernel import chunk_gradients
from trainer.parts.delta.rule.state_kernels import backward_states, forward_states

# Launch settings of each kernel, the fastest on an H200: warps, loads in flight, value dims per program.
PRECISION = "tf32"  # of the inverse; with tf32x3 it took 422 us in place of 218
PREPARE = {"num_warps": 4, "maxnreg": 168}  # three programs per multiprocessor, at the price of 15 spilled registers
FORWARD = {"PART": 64, "num_warps": 4, "STAGES": 3}
RECOMPUTE = {"PART": 64, "num_warps": 4, "STAGES": 3}
BACKWARD = {"PART": 64, "num_warps": 4, "STAGES": 3}
# With PART=32 the kernel ended in an illegal access, which is not explained.
GRADIENTS = {"PART": 64, "num_warps": 4}


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
    """A, R (None if not requested), transposed u, and -w of every chunk; see chunk_kernel.py."""

    scores: torch.Tensor
    solved: torch.Tensor | None
    u_turned: torch.Tensor
    w_negative: torch.Tensor

    def room_for_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the states and for n; n overwrites u, as a program reads its part of u before writing n."""
        dim = self.u_turned.shape[2]
        return self.u_turned.new_empty(*self.u_turned.shape[:2], dim, dim), self.u_turned


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, decay, beta, chunks: PackedChunks, keep_states: bool):
        q, k = q[:, :, 0], k[:, :, 0]
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
        dq, dk = (x.unflatten(1, (problem.k.shape[1], -1)) for x in (dq, dk))
        return dq, dk, dv, d_decay, d_log_beta / problem.beta.clamp_min(1e-30), None, None


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
