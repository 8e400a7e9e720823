"""SwiGLU × router weight, backward: everything recomputed from the stored pre-activation.

    act = p · silu(gate) · up                                  SwiGLU
    act = p · g · sigmoid(1.702 g) · (u + 1)                   gpt-oss: g = min(gate, 7), u = up within ±7

    reads   gate, up (bf16), the gradient of act
    writes  the gradient of the pre-activation [M, 2N] (gate columns first: the layout of the weight), act
            itself over its gradient (for the second projection's weight gradient), the gradient of p of
            every assignment

One pass; the sum over columns that the weight's gradient needs stays in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.activations import GPT_OSS_ALPHA, GPT_OSS_LIMIT
from fsdmoe.kernels.triton.launch import QuickLaunch
from fsdmoe.kernels.triton.row_map import RowMap

_ALPHA = tl.constexpr(GPT_OSS_ALPHA)
_LIMIT = tl.constexpr(GPT_OSS_LIMIT)


@triton.jit
def gated(gate, up, CLAMPED: tl.constexpr):
    """The gate's sigmoid, and the two factors of the activation."""
    if CLAMPED:
        # By selection: a minimum of a NaN and the limit would be the limit.
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        sigmoid = tl.sigmoid(gate * _ALPHA)
        linear = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1
    else:
        sigmoid = tl.sigmoid(gate)
        linear = up
    return sigmoid, gate * sigmoid, linear


@QuickLaunch
@triton.jit(do_not_specialize=["capacity", "num_experts"])
def _swiglu_backward_kernel(
    pre_ptr,
    dact_ptr,
    weights_ptr,
    source_ptr,
    offsets_ptr,
    dpre_ptr,
    dweights_ptr,
    n,
    capacity,
    num_experts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(offsets_ptr + num_experts):
        rows = first + tl.arange(0, ROWS)
        source = tl.load(source_ptr + rows)
        is_row = source >= 0
        weight = tl.load(weights_ptr + source, mask=is_row, other=0.0).to(tl.float32)[:, None]
        rows = rows.to(tl.int64)
        dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, n, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = (columns < n)[None, :]
            # Padding rows must come out as zeros whatever their pre-activation holds: read them as zeros.
            wanted = inside & is_row[:, None]
            at = rows[:, None] * n + columns[None, :]
            gate = tl.load(pre_ptr + at, mask=wanted, other=0.0).to(tl.float32)
            up = tl.load(pre_ptr + capacity.to(tl.int64) * n + at, mask=wanted, other=0.0).to(tl.float32)
            dact = tl.load(dact_ptr + at, mask=wanted, other=0.0).to(tl.float32)
            sigmoid, silu, linear = gated(gate, up, CLAMPED)
            dweight += dact * silu * linear
            dact *= weight
            dup = dact * silu
            if CLAMPED:
                dgate = dact * linear * (sigmoid + silu * _ALPHA * (1 - sigmoid))
                dgate = tl.where(gate > _LIMIT, 0.0, dgate)
                dup = tl.where(tl.abs(up) > _LIMIT, 0.0, dup)
            else:
                dgate = dact * linear * (sigmoid + silu * (1 - sigmoid))
            at_pair = rows[:, None] * (2 * n) + columns[None, :]
            tl.store(dpre_ptr + at_pair, dgate.to(dpre_ptr.dtype.element_ty), mask=inside)
            tl.store(dpre_ptr + at_pair + n, dup.to(dpre_ptr.dtype.element_ty), mask=inside)
            tl.store(dact_ptr + at, (silu * linear * weight).to(dact_ptr.dtype.element_ty), mask=inside)
        tl.store(dweights_ptr + source, tl.sum(dweight, 1), mask=is_row)


def swiglu_backward_(
    pre_2MN: torch.Tensor,
    dact_MN: torch.Tensor,
    weights_RK: torch.Tensor,
    row_map: RowMap,
    dweights_RK: torch.Tensor,
    *,
    clamped: bool = False,
) -> torch.Tensor:
    """The gradient of the pre-activation, ``[M, 2N]``; ``dact_MN`` becomes the activation, ``dweights_RK``
    (fp32) the gradient of the weights.

    Assignments to experts that are not computed here have no row that would write their ``d weights``: they
    must be zero there already."""
    _, capacity, n = pre_2MN.shape
    dpre_M2N = torch.empty(capacity, 2 * n, device=pre_2MN.device, dtype=pre_2MN.dtype)
    # A program takes 1024 elements at a time: of one row where rows are long, else of four.
    rows = 1 if n % 1024 == 0 else 4
    _swiglu_backward_kernel[(capacity // rows,)](
        pre_2MN,
        dact_MN,
        weights_RK,
        row_map.source_M,
        row_map.offsets,
        dpre_M2N,
        dweights_RK,
        n,
        capacity,
        row_map.num_experts,
        ROWS=rows,
        COLUMNS=1024 // rows,
        CLAMPED=clamped,
        num_warps=4,
    )
    return dpre_M2N
