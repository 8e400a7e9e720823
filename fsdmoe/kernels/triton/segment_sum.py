"""Rows added up by their ids, in float32 and in the same order every time: the gradient of an embedding.

Ids are sorted first (stable), so that the rows of one are a *segment*. A program takes 64 sorted rows::

    rows      a a a b | b b b b | b c c d        three programs (of four rows here)
    written   a         -         c              segments inside of a program, or that end it: into out
    head              - b b b b   b              the sum of a segment that began before, by program
    tail            b | -         d (ends: out)  that of a segment that goes on, by the program it began in

A second launch adds to each tail the heads behind it. Every row of ``out`` is written by one program of one
launch. Sizes: T tokens, D columns, V ids, B programs along tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv

_ROWS = tl.constexpr(64)
_COLUMNS = tl.constexpr(256)
_HEADS = tl.constexpr(16)
"""Heads that the second launch reads at a time."""


@triton.jit
def _add_to(ptr, values, inside):
    before = tl.load(ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(ptr, (before + values).to(ptr.dtype.element_ty), mask=inside)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _sum_segments_kernel(
    rows_ptr, ids_ptr, order_ptr, out_ptr, heads_ptr, tails_ptr, num_rows, num_columns, row_stride
):
    block = tl.program_id(0)
    columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    inside = columns < num_columns
    first = block * _ROWS
    last = tl.minimum(first + _ROWS, num_rows)
    began_before = (first > 0) & (tl.load(ids_ptr + tl.maximum(first - 1, 0)) == tl.load(ids_ptr + first))
    total = tl.zeros([_COLUMNS], tl.float32)
    for at in range(first, last):
        source = tl.load(order_ptr + at)
        total += tl.load(rows_ptr + source * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(ids_ptr + at)
        following = tl.load(ids_ptr + tl.minimum(at + 1, num_rows - 1))
        ends = (at + 1 == num_rows) | (following != own)
        if ends | (at + 1 == last):
            if began_before:
                tl.store(heads_ptr + block.to(tl.int64) * num_columns + columns, total, mask=inside)
            elif ends:
                _add_to(out_ptr + own * num_columns + columns, total, inside)
            else:
                tl.store(tails_ptr + block.to(tl.int64) * num_columns + columns, total, mask=inside)
            total = tl.zeros([_COLUMNS], tl.float32)
            began_before = began_before & False


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _join_segments_kernel(ids_ptr, out_ptr, heads_ptr, tails_ptr, num_rows, num_columns):
    block = tl.program_id(0)
    first = block * _ROWS
    end = first + _ROWS
    own = tl.load(ids_ptr + tl.minimum(end, num_rows) - 1)
    goes_on = (end < num_rows) & (tl.load(ids_ptr + tl.minimum(end, num_rows - 1)) == own)
    began_here = (first == 0) | (tl.load(ids_ptr + tl.maximum(first - 1, 0)) != own)
    if goes_on & began_here:
        columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
        inside = columns < num_columns
        total = tl.load(tails_ptr + block.to(tl.int64) * num_columns + columns, mask=inside, other=0.0)
        following = block + 1
        while goes_on:
            # A block whose first row is of this segment has its head.
            blocks = following + tl.arange(0, _HEADS)
            starts = blocks.to(tl.int64) * _ROWS
            ids = tl.load(ids_ptr + tl.minimum(starts, num_rows - 1))
            is_ours = (starts < num_rows) & (ids == own)
            at = blocks.to(tl.int64)[:, None] * num_columns + columns[None, :]
            total += tl.sum(tl.load(heads_ptr + at, mask=is_ours[:, None] & inside[None, :], other=0.0), 0)
            goes_on = tl.min(is_ours.to(tl.int32), 0) > 0
            following += _HEADS
        _add_to(out_ptr + own * num_columns + columns, total, inside)


def add_rows_by_id_triton(out_VD: torch.Tensor, ids_T: torch.Tensor, rows_TD: torch.Tensor) -> None:
    """``out[ids[t]] += rows[t]`` for all t; ``out`` is contiguous."""
    num_rows, num_columns = rows_TD.shape
    if not num_rows:
        return
    rows_TD = rows_TD if rows_TD.stride(1) == 1 else rows_TD.contiguous()
    sorted_T, order_T = torch.sort(ids_T, stable=True)
    blocks = cdiv(num_rows, _ROWS.value)
    heads_BD = torch.empty(blocks, num_columns, device=rows_TD.device, dtype=torch.float32)
    tails_BD = torch.empty_like(heads_BD)
    grid = blocks, cdiv(num_columns, _COLUMNS.value)
    _sum_segments_kernel[grid](
        rows_TD, sorted_T, order_T, out_VD, heads_BD, tails_BD, num_rows, num_columns, rows_TD.stride(0),
        num_warps=2,
    )  # fmt: skip
    _join_segments_kernel[grid](sorted_T, out_VD, heads_BD, tails_BD, num_rows, num_columns, num_warps=2)
