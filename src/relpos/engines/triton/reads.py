"""How the kernels read numbers of a bias, in the layout of the product that they are added to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from relpos.engines.triton.grid_tiles import coordinate
from relpos.engines.triton.limits import interpreting

DIRECT = tl.constexpr(torch.version.hip is None and not interpreting())
"""Whether a bias can be read by an NVIDIA instruction."""


@triton.jit
def read(where):
    """Numbers from any addresses, loaded in the layout of their consumer.

    Triton gives a load a layout for neighbouring addresses, and converts it to the product's through shared memory. Its
    passes take inline assembly for arithmetic, which gets the layout of its consumer.
    """
    if DIRECT and where.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [where.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    elif DIRECT and where.dtype.element_ty == tl.int32:
        return tl.inline_asm_elementwise(
            "ld.global.nc.s32 $0, [$1];", "=r,l", [where.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.load(where)


@triton.jit
def read_lattice(
    at, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIGN: tl.constexpr, OF_ROWS: tl.constexpr, OF_COLUMNS: tl.constexpr
):
    """Numbers of a table, in row r and column c the one at SIGN * (coordinate(r) - coordinate(c)).

    A thread's numbers have constant distances, so it needs one address and constant offsets in its loads. The compiler
    sees that only if columns are written as 8 a + b and the part without a is hidden from it. Otherwise it moves all
    sums of addresses out of the loop and keeps them, in 64 of a thread's 255 registers. Coordinates of 8 columns are
    consecutive.
    """
    if DIRECT and at.dtype.element_ty == tl.float32:
        row, column = coordinate(tl.arange(0, ROWS), OF_ROWS).to(tl.int64), tl.arange(0, 8).to(tl.int64)
        near = at.to(tl.int64) + (4 * SIGN) * (row[:, None] - column[None, :])
        near = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [near], dtype=tl.int64, is_pure=True, pack=1)
        far = (4 * SIGN) * coordinate(8 * tl.arange(0, COLUMNS // 8), OF_COLUMNS).to(tl.int64)
        where = tl.reshape(near[:, None, :] - far[None, :, None], [ROWS, COLUMNS])
        return read(where.to(at.dtype))
    else:
        row, column = coordinate(tl.arange(0, ROWS), OF_ROWS), coordinate(tl.arange(0, COLUMNS), OF_COLUMNS)
        return tl.load(at + SIGN * (row[:, None] - column[None, :]))
