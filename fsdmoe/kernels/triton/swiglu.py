"""Activation × router weight, backward: everything recomputed from the stored pre-activation.

    act = p · φ(gate) · linear(up)        φ and linear: by the activation's name (``kernels/activations.py``)

    reads   gate, up (bf16), the gradient of act
    writes  the gradient of the pre-activation [M, 2N] (gate columns first: the layout of the weight), the
            gradient of p of every assignment, and unless it was kept act itself over its gradient (for the
            second projection's weight gradient); on request the gradient of the pre-activation as fp8 codes
            too, with 1 x 128 scales [2N/128, M]

One pass; the sum over columns that the weight's gradient needs stays in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.activations import GELU_CUBE, GELU_SCALE, GPT_OSS_ALPHA, GPT_OSS_LIMIT
from fsdmoe.kernels.triton.fp8_scale import BLOCK, as_bytes, block_scale, to_codes
from fsdmoe.kernels.triton.launch import QuickLaunch
from fsdmoe.kernels.triton.row_map import RowMap

_ALPHA = tl.constexpr(GPT_OSS_ALPHA)
_GELU_TWICE = tl.constexpr(2 * GELU_SCALE)
_GELU_CUBE = tl.constexpr(GELU_CUBE)
_GELU_SLOPE = tl.constexpr(3 * GELU_CUBE)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_NORMAL_PEAK = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """φ(gate) and its derivative, linear(up) and its derivative. What a kernel does not use is not computed.

    Limits by selection: a minimum of a NaN and the limit would be the limit.
    """
    linear = up
    dlinear = tl.full(up.shape, 1.0, tl.float32)
    if ACTIVATION == "gpt_oss" or ACTIVATION == "swiglu_clamped" or ACTIVATION == "swiglu_clamped_after":
        linear = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        dlinear = tl.where(tl.abs(up) > LIMIT, 0.0, dlinear)
    within = gate
    if ACTIVATION == "gpt_oss" or ACTIVATION == "swiglu_clamped":
        within = tl.where(gate > LIMIT, LIMIT, gate)
    if ACTIVATION == "geglu":
        cdf = 0.5 + 0.5 * tl.erf(gate * _ROOT_HALF)
        phi = gate * cdf
        dphi = cdf + gate * tl.exp(-0.5 * gate * gate) * _NORMAL_PEAK
    elif ACTIVATION == "geglu_tanh":
        square = gate * gate
        cdf = tl.sigmoid(gate * _GELU_TWICE * (square * _GELU_CUBE + 1))  # (1 + tanh(u)) / 2
        phi = gate * cdf
        dphi = cdf + phi * (1 - cdf) * _GELU_TWICE * (square * _GELU_SLOPE + 1)
    elif ACTIVATION == "gpt_oss":
        sigmoid = tl.sigmoid(within * _ALPHA)
        phi = within * sigmoid
        dphi = sigmoid + phi * _ALPHA * (1 - sigmoid)
        linear = linear + 1
    else:
        sigmoid = tl.sigmoid(within)
        phi = within * sigmoid
        dphi = sigmoid + phi * (1 - sigmoid)
    if ACTIVATION == "gpt_oss" or ACTIVATION == "swiglu_clamped":
        dphi = tl.where(gate > LIMIT, 0.0, dphi)
    if ACTIVATION == "swiglu_clamped_after":
        dphi = tl.where(phi > LIMIT, 0.0, dphi)
        phi = tl.where(phi > LIMIT, LIMIT, phi)
    return phi, dphi, linear, dlinear


@triton.jit
def _block_grads(pre_ptr, dact_ptr, at, plane, wanted, weight, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """Of some elements: the gradients of gate and up, the activation times the weight, and what they add to
    the weight's gradient. ``plane``: from gates to ups."""
    # Padding rows must come out as zeros whatever their pre-activation holds: read them as zeros.
    gate = tl.load(pre_ptr + at, mask=wanted, other=0.0).to(tl.float32)
    up = tl.load(pre_ptr + plane + at, mask=wanted, other=0.0).to(tl.float32)
    dact = tl.load(dact_ptr + at, mask=wanted, other=0.0).to(tl.float32)
    phi, dphi, linear, dlinear = activated(gate, up, ACTIVATION, LIMIT)
    weighted = dact * weight
    return weighted * linear * dphi, weighted * phi * dlinear, phi * linear * weight, dact * phi * linear


@triton.jit
def _store_codes(values, codes_at, scales_at, POWER_OF_TWO: tl.constexpr):
    scales = block_scale(tl.max(tl.abs(values), 1), POWER_OF_TWO)
    tl.store(scales_at, scales)
    tl.store(codes_at, to_codes(values * tl.div_rn(1.0, scales)[:, None]))


@QuickLaunch
@triton.jit(do_not_specialize=["capacity", "num_experts"])
def _swiglu_backward_kernel(
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
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    STORE_ACT: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(offsets_ptr + num_experts):
        places = first + tl.arange(0, ROWS)
        source = tl.load(source_ptr + places)
        is_row = source >= 0
        weight = tl.load(weights_ptr + source, mask=is_row, other=0.0).to(tl.float32)[:, None]
        rows = places.to(tl.int64)
        dtype = dpre_ptr.dtype.element_ty
        dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, n, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = (columns < n)[None, :]
            at = rows[:, None] * n + columns[None, :]
            wanted = inside & is_row[:, None]
            plane = capacity.to(tl.int64) * n
            dgate, dup, act, part = _block_grads(
                pre_ptr, dact_ptr, at, plane, wanted, weight, ACTIVATION, LIMIT
            )
            dweight += part
            at_pair = rows[:, None] * (2 * n) + columns[None, :]
            dgate = dgate.to(dtype)
            dup = dup.to(dtype)
            tl.store(dpre_ptr + at_pair, dgate, mask=inside)
            tl.store(dpre_ptr + at_pair + n, dup, mask=inside)
            if CODES:  # of what is stored: whoever reads either has the same values
                scales_at = scales_ptr + start // 128 * capacity + places
                _store_codes(dgate.to(tl.float32), codes_ptr + at_pair, scales_at, POWER_OF_TWO)
                scales_at += n // 128 * capacity
                _store_codes(dup.to(tl.float32), codes_ptr + at_pair + n, scales_at, POWER_OF_TWO)
            if STORE_ACT:
                tl.store(dact_ptr + at, act.to(dact_ptr.dtype.element_ty), mask=inside)
        tl.store(dweights_ptr + source, tl.sum(dweight, 1), mask=is_row)


class WantedCodes(NamedTuple):
    """Codes of the gradient of a pre-activation, to be written."""

    codes: torch.Tensor
    """``[M, 2N]``."""
    scales: torch.Tensor
    """``[2N/128, M]``."""
    power_of_two: bool


def swiglu_backward_(
    pre_2MN: torch.Tensor,
    dact_MN: torch.Tensor,
    weights_RK: torch.Tensor,
    row_map: RowMap,
    dweights_RK: torch.Tensor,
    *,
    activation: str = "swiglu",
    limit: float = GPT_OSS_LIMIT,
    wants_act: bool = True,
    codes: WantedCodes | None = None,
) -> torch.Tensor:
    """The gradient of the pre-activation, ``[M, 2N]``; ``dact_MN`` becomes the activation if ``wants_act``,
    ``dweights_RK`` (fp32) the gradient of the weights, and ``codes`` are written.

    Assignments to experts that are not computed here have no row that would write their ``d weights``: they
    must be zero there already."""
    _, capacity, n = pre_2MN.shape
    dpre_M2N = torch.empty(capacity, 2 * n, device=pre_2MN.device, dtype=pre_2MN.dtype)
    # A program takes 1024 elements at a time: of one row where rows are long, else of four; with codes of as
    # many rows as have one block of them each.
    rows = 1 if n % 1024 == 0 else 4
    into, scales, power_of_two = dpre_M2N, dpre_M2N, False
    if codes is not None:
        rows = 1024 // BLOCK
        into, scales, power_of_two = as_bytes(codes.codes), codes.scales, codes.power_of_two
    _swiglu_backward_kernel[(capacity // rows,)](
        pre_2MN,
        dact_MN,
        weights_RK,
        row_map.source_M,
        row_map.offsets,
        dpre_M2N,
        into,
        scales,
        dweights_RK,
        n,
        capacity,
        row_map.num_experts,
        ROWS=rows,
        COLUMNS=1024 // rows,
        ACTIVATION=activation,
        LIMIT=limit,
        STORE_ACT=wants_act,
        CODES=codes is not None,
        POWER_OF_TWO=power_of_two,
        num_warps=4,
    )
    return dpre_M2N
