"""The gradient of a router's input from the fp32 gradient of its logits, on tensor cores.

    dx = passed + dlogits @ weight      dlogits [T, E] fp32, weight [E, D] bf16, passed and dx [T, D] bf16

dlogits is taken apart into two bf16 numbers, ``high + low``, equal to it to 16 bits; both go through the
tensor cores into one fp32 accumulator. ``passed`` is the gradient that the experts have for the same x, added
before anything is rounded. The product moves more bytes than it computes, so adding here spares most of two
passes over [T, D]. The halves are handed out as well, for the weight's gradient.

A program keeps the halves of a few rows, all experts wide, and walks the columns of the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import (
    QuickLaunch,
    cdiv,
    describe,
    has_bulk_copies,
    next_power_of_2,
    num_programs,
)

_MAX_EXPERTS = 256
_MIN_DEPTH = 16  # of a product on tensor cores


# Measured on an H200: 48 µs at 16,384 x 128 x 2,048, where a product, a sum and what precedes them take 107.
_ROWS = _COLUMNS = 64


@QuickLaunch
@triton.jit(do_not_specialize=["columns_a_program"])
def _router_grad_kernel(
    dlogits_desc,
    weight_desc,
    passed_desc,
    dx_desc,
    halves_desc,
    d,
    columns_a_program,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS
    wide = dlogits_desc.load([row, 0])
    high = wide.to(halves_desc.dtype)
    low = (wide - high.to(tl.float32)).to(halves_desc.dtype)
    if tl.program_id(1) == 0:
        halves_desc.store([row, 0, 0], high.reshape(ROWS, 1, EXPERTS))
        halves_desc.store([row, 1, 0], low.reshape(ROWS, 1, EXPERTS))
    first = tl.program_id(1) * columns_a_program
    for column in tl.range(first, tl.minimum(first + columns_a_program, d), COLUMNS, num_stages=STAGES):
        weight = weight_desc.load([0, column])
        if HAS_PASSED:
            passed = passed_desc.load([row, column])
        acc = tl.dot(low, weight, tl.dot(high, weight))
        if HAS_PASSED:
            acc += passed.to(tl.float32)
        dx_desc.store([row, column], acc.to(dx_desc.dtype))


def supports_router_grad(weight_ED: torch.Tensor) -> bool:
    """Whether a router's bf16 weight can take this path: on Hopper or Blackwell, rows of whole 16 bytes."""
    num_experts, d = weight_ED.shape
    return (
        weight_ED.is_cuda
        and has_bulk_copies(weight_ED.device)
        and num_experts % 8 == 0
        and num_experts <= _MAX_EXPERTS
        and d % 8 == 0
        and weight_ED.data_ptr() % 16 == 0
    )


def router_input_grad(
    dlogits_TE: torch.Tensor, weight_ED: torch.Tensor, passed_TD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx [T, D], [high | low] of dlogits [T, 2E])``, both in the weight's dtype."""
    (num_rows, num_experts), d = dlogits_TE.shape, weight_ED.shape[1]
    dx_TD = torch.empty(num_rows, d, device=weight_ED.device, dtype=weight_ED.dtype)
    halves_T2E = torch.empty(num_rows, 2, num_experts, device=weight_ED.device, dtype=weight_ED.dtype)
    if num_rows > 0:
        experts = max(_MIN_DEPTH, next_power_of_2(num_experts))
        rows, columns = cdiv(num_rows, _ROWS), cdiv(d, _COLUMNS)
        # Two programs a multiprocessor: rows alone, or where they are few, rows and ranges of columns.
        ranges = min(columns, max(1, 2 * num_programs(weight_ED.device) // rows))
        block = (_ROWS, _COLUMNS)
        dx_desc = describe(dx_TD, block)
        _router_grad_kernel[(rows, ranges)](
            describe(_copyable(dlogits_TE), (_ROWS, experts)),
            describe(weight_ED.contiguous(), (experts, _COLUMNS)),
            dx_desc if passed_TD is None else describe(_copyable(passed_TD), block),
            dx_desc,
            describe(halves_T2E, (_ROWS, 1, experts)),
            d,
            cdiv(columns, ranges) * _COLUMNS,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            EXPERTS=experts,
            HAS_PASSED=passed_TD is not None,
            STAGES=4 if experts <= 128 else 3,
            num_warps=4,
        )
    return dx_TD, halves_T2E.flatten(1)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """As bulk copies need it; gradients come from anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
