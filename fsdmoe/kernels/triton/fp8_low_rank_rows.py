"""The narrow product of experts in fp8 with low-rank updates, whose rows are codes.

    narrow_of_codes   codes [M, C] and their scales x A [E, Q, C] -> [M, Q]

Sizes: M sorted rows with padding, C columns, E experts, Q the rank of an update.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.fp8_rows import Codes
from fsdmoe.kernels.triton.fp8_scale import as_bytes
from fsdmoe.kernels.triton.launch import QuickLaunch
from fsdmoe.kernels.triton.row_map import RowMap
from fsdmoe.kernels.triton.tiles import rank_block

_ROWS = 64  # of a program's narrow product: half of what an expert's rows are a multiple of


@QuickLaunch
@triton.jit(do_not_specialize=["capacity", "num_experts"])
def _narrow_kernel(
    codes_ptr,
    scales_ptr,
    factor_ptr,
    out_ptr,
    offsets_ptr,
    tile_expert_ptr,
    num_columns,
    rank,
    capacity,
    num_experts,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(offsets_ptr + num_experts):
        expert = tl.load(tile_expert_ptr + first // 128)
        rows = first + tl.arange(0, ROWS)
        ranks = tl.arange(0, RANK)
        columns = tl.arange(0, 128)
        codes_at = codes_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        factor_at = (
            factor_ptr + (expert * rank + ranks).to(tl.int64)[None, :] * num_columns + columns[:, None]
        )
        total = tl.zeros([ROWS, RANK], tl.float32)
        for block in range(num_columns // 128):
            codes = tl.load(codes_at + block * 128).to(tl.float8e4nv, bitcast=True)
            factor = tl.load(factor_at + block * 128, mask=(ranks < rank)[None, :], other=0.0)
            scales = tl.load(scales_ptr + block * capacity + rows)
            total += tl.dot(codes.to(factor.dtype), factor) * scales[:, None]
        out_at = out_ptr + rows.to(tl.int64)[:, None] * rank + ranks[None, :]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(ranks < rank)[None, :])


def narrow_of_codes(rows: Codes, factor_EQC: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """``A x`` for every row, ``[M, Q]``, of rows that are codes with 1 x 128 scales ``[C/128, M]``."""
    _, rank, num_columns = factor_EQC.shape
    out_MQ = torch.empty(row_map.capacity, rank, device=factor_EQC.device, dtype=factor_EQC.dtype)
    _narrow_kernel[(row_map.capacity // _ROWS,)](
        as_bytes(rows.codes),
        rows.scales,
        factor_EQC,
        out_MQ,
        row_map.offsets,
        row_map.tile_expert,
        num_columns,
        rank,
        row_map.capacity,
        row_map.num_experts,
        ROWS=_ROWS,
        RANK=rank_block(rank),
        num_warps=4,
        num_stages=4,
    )
    return out_MQ
