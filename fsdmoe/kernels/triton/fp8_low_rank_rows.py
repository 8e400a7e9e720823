"""What experts in fp8 with low-rank updates compute row by row, around their grouped products.

    narrow_of_codes   codes [M, C] and their scales x A [E, Q, C] -> [M, Q]
    swiglu_grad_rows  SwiGLU x weight, backward: d pre in bf16 (for factors' gradients) and as codes (for d x)

Sizes: M sorted rows with padding, C columns, N expert width, E experts, Q the rank of an update.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.fp8_rows import Codes, empty_codes
from fsdmoe.kernels.triton.fp8_scale import as_bytes, block_scale, to_codes
from fsdmoe.kernels.triton.launch import QuickLaunch
from fsdmoe.kernels.triton.row_map import RowMap
from fsdmoe.kernels.triton.swiglu import block_grads
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


@triton.jit
def _store_codes(values, codes_at, scales_at, POWER_OF_TWO: tl.constexpr):
    scales = block_scale(tl.max(tl.abs(values), 1), POWER_OF_TWO)
    tl.store(scales_at, scales)
    tl.store(codes_at, to_codes(values * tl.div_rn(1.0, scales)[:, None]))


@QuickLaunch
@triton.jit(do_not_specialize=["capacity", "num_experts"])
def _swiglu_grad_rows_kernel(
    pre_ptr,
    dact_ptr,
    weights_ptr,
    source_ptr,
    offsets_ptr,
    dpre_ptr,
    codes_ptr,
    scales_ptr,
    dweights_ptr,
    n,
    capacity,
    num_experts,
    ROWS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(offsets_ptr + num_experts):
        places = first + tl.arange(0, ROWS)
        source = tl.load(source_ptr + places)
        is_row = source >= 0
        weight = tl.load(weights_ptr + source, mask=is_row, other=0.0).to(tl.float32)[:, None]
        rows = places.to(tl.int64)[:, None]
        dtype = dpre_ptr.dtype.element_ty
        dweight = tl.zeros([ROWS, 128], tl.float32)
        for block in range(n // 128):
            columns = block * 128 + tl.arange(0, 128)[None, :]
            at = rows * n + columns
            plane = capacity.to(tl.int64) * n
            dgate, dup, act, part = block_grads(
                pre_ptr, dact_ptr, at, plane, is_row[:, None], weight, "swiglu", 0.0
            )
            dweight += part
            tl.store(dact_ptr + at, act.to(dtype))
            # What is quantised is what bf16 holds: factors get gradients of the same values.
            dgate = dgate.to(dtype)
            dup = dup.to(dtype)
            at_pair = rows * (2 * n) + columns
            tl.store(dpre_ptr + at_pair, dgate)
            tl.store(dpre_ptr + at_pair + n, dup)
            scales_at = scales_ptr + block * capacity + places
            _store_codes(dgate.to(tl.float32), codes_ptr + at_pair, scales_at, POWER_OF_TWO)
            scales_at += n // 128 * capacity
            _store_codes(dup.to(tl.float32), codes_ptr + at_pair + n, scales_at, POWER_OF_TWO)
        tl.store(dweights_ptr + source, tl.sum(dweight, 1), mask=is_row)


def swiglu_grad_rows(
    pre_2MN: torch.Tensor,
    dact_MN: torch.Tensor,
    weights_RK: torch.Tensor,
    row_map: RowMap,
    dweights_RK: torch.Tensor,
    *,
    power_of_two: bool,
) -> tuple[torch.Tensor, Codes]:
    """The gradient of the pre-activation ``[M, 2N]``, as it is and as codes with scales ``[2N/128, M]``;
    ``dact_MN`` becomes the activation, ``dweights_RK`` (fp32) the gradient of the weights. As in
    ``swiglu.swiglu_backward_``, it must be zero where an assignment has no row here."""
    _, capacity, n = pre_2MN.shape
    dpre_M2N = torch.empty(capacity, 2 * n, device=pre_2MN.device, dtype=pre_2MN.dtype)
    codes = empty_codes(capacity, 2 * n, pre_2MN.device)
    rows = 8  # 1024 elements at a time
    _swiglu_grad_rows_kernel[(capacity // rows,)](
        pre_2MN,
        dact_MN,
        weights_RK,
        row_map.source_M,
        row_map.offsets,
        dpre_M2N,
        as_bytes(codes.codes),
        codes.scales,
        dweights_RK,
        n,
        capacity,
        row_map.num_experts,
        ROWS=rows,
        POWER_OF_TWO=power_of_two,
        num_warps=4,
    )
    return dpre_M2N, codes
