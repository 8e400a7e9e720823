"""Products of a matrix with its own transpose, for a batch: tiles of one triangle are computed and each is
written twice, as it is and mirrored.

    ``out = alpha * x @ x^T + beta * added + diagonal * 1``        or  ``x^T @ x``, for tall matrices

The three numbers may have a factor of each matrix's own.

``added`` is symmetric. The square of a symmetric matrix is such a product too. 128 × 128 tiles: of a matrix
with 768 rows 21 of 36 are computed. Two programs share a multiprocessor, so that one multiplies while the
other writes its two tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, describe, has_bulk_copies

TILE = 128
_DEPTH = 64
_ALIGN = 8  # elements of 2 bytes in what a bulk copy moves at least


@triton.jit
def _tile_of(number, tiles):
    """The rows and columns of a triangle's tile: the lower half of the triangle is folded up to the upper
    one's left, which makes it a rectangle."""
    shift = 1 - tiles % 2
    width = tiles + shift
    row = number // width
    column = number % width
    is_upper = column >= row + shift
    first = tl.where(is_upper, row, tiles - shift - row)
    second = tl.where(is_upper, column - shift, tiles - 1 - column)
    return first, second


@triton.jit
def _load(x_desc, matrix, side, depth, TILE: tl.constexpr, DEPTH: tl.constexpr, TALL: tl.constexpr):
    """A tile of rows, ``DEPTH`` deep."""
    if TALL:
        part = x_desc.load([matrix, depth, side]).reshape(DEPTH, TILE).T
    else:
        part = x_desc.load([matrix, side, depth]).reshape(TILE, DEPTH)
    return part


@QuickLaunch
@triton.jit
def _symmetric_kernel(
    x_desc,
    added_desc,
    out_desc,
    factors_ptr,
    tiles,
    depth,
    alpha,
    beta,
    diagonal,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    TALL: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
):
    triangle = tiles * (tiles + 1) // 2
    matrix = tl.program_id(0) // triangle
    first, second = _tile_of(tl.program_id(0) % triangle, tiles)
    row = first * TILE
    column = second * TILE
    acc = tl.zeros([TILE, TILE], tl.float32)
    for start in tl.range(0, depth, DEPTH):
        left = _load(x_desc, matrix, row, start, TILE, DEPTH, TALL)
        right = _load(x_desc, matrix, column, start, TILE, DEPTH, TALL)
        acc = tl.dot(left, right.T, acc)
    if HAS_FACTORS:
        alpha *= tl.load(factors_ptr + 3 * matrix)
        beta *= tl.load(factors_ptr + 3 * matrix + 1)
        diagonal *= tl.load(factors_ptr + 3 * matrix + 2)
    acc *= alpha
    if ADDS:
        acc += beta * added_desc.load([matrix, row, column]).reshape(TILE, TILE).to(tl.float32)
        places = tl.arange(0, TILE)
        is_diagonal = (row + places)[:, None] == (column + places)[None, :]
        acc += tl.where(is_diagonal, diagonal, 0.0)
    result = acc.to(out_desc.dtype)
    out_desc.store([matrix, row, column], result.reshape(1, TILE, TILE))
    if row != column:
        out_desc.store([matrix, column, row], result.T.reshape(1, TILE, TILE))


def supports_symmetric(x_NRC: torch.Tensor) -> bool:
    """Whether bulk copies can read these matrices and write their products."""
    if x_NRC.is_cuda and not has_bulk_copies(x_NRC.device):
        return False
    is_aligned = all(size % _ALIGN == 0 for size in x_NRC.shape[1:]) and x_NRC.data_ptr() % 16 == 0
    return x_NRC.dtype == torch.bfloat16 and is_aligned and x_NRC.is_contiguous() and x_NRC.numel() > 0


def symmetric_product_triton(
    x_NRC: torch.Tensor,
    *,
    is_tall: bool = False,
    alpha: float = 1.0,
    added: torch.Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    factors_N3: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`fsdmoe.kernels.newton_schulz.symmetric_product`."""
    count, rows, columns = x_NRC.shape
    size, depth = (columns, rows) if is_tall else (rows, columns)
    out = torch.empty(count, size, size, dtype=x_NRC.dtype, device=x_NRC.device)
    tiles = cdiv(size, TILE)
    _symmetric_kernel[(count * tiles * (tiles + 1) // 2,)](
        describe(x_NRC, (1, _DEPTH, TILE) if is_tall else (1, TILE, _DEPTH)),
        describe(out if added is None else added, (1, TILE, TILE)),
        describe(out, (1, TILE, TILE)),
        out if factors_N3 is None else factors_N3,
        tiles,
        depth,
        float(alpha),
        float(beta),
        float(diagonal),
        TILE=TILE,
        DEPTH=_DEPTH,
        TALL=is_tall,
        ADDS=added is not None,
        HAS_FACTORS=factors_N3 is not None,
        num_warps=4,
        num_stages=3,
    )
    return out
