"""Unpack float8 (e4m3) to bfloat16 or float32, times one factor per row, in one pass (Triton, CUDA only).

Per value one byte is read and two or four are written. torch takes two passes, which move 7 bytes per bfloat16 value.

The kernel decodes the bits itself, because Triton supports the type only on Hopper and Ada.
"""

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _WARPS = 16, 256, 8  # rows and columns per program; narrow rows would waste a wide program


@triton.jit
def _unpack(codes, scale, out, width, rows, count, STRIDE, ROW_STRIDE, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < count)[:, None] & (column < width)
    code = tl.load(codes + row.to(tl.int64)[:, None] * width + column, mask=inside, other=0).to(tl.int32)
    magnitude = code & 127
    # The exponent's bias is 7 in e4m3 and 127 in float32; below 8 there is no leading one, and 8 is 2^-6.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value *= tl.load(scale + row, mask=row < count, other=0.0)[:, None] * tl.where(code > 127, -1.0, 1.0)
    place = (row // rows).to(tl.int64) * STRIDE + (row % rows).to(tl.int64) * ROW_STRIDE
    tl.store(out + place[:, None] + column, value.to(out.dtype.element_ty), mask=inside)


def unpack_rows(codes: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> None:
    """Unpack uint8 e4m3 codes, times the float32 factor of each row. The code of NaN is not supported.

    Args:
        codes: (matrices, rows, width), contiguous.
        scale: (matrices * rows,).
        into: (matrices, rows, width) gets the values; its rows may be apart.
    """
    matrices, rows, width = codes.shape
    count = matrices * rows
    _unpack[(triton.cdiv(count, _ROWS), triton.cdiv(width, _COLUMNS))](
        *(codes, scale, into, width, rows, count, into.stride(0), into.stride(1)),
        **{"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _WARPS},
    )
