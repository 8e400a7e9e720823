"""What the GEMMs that add up in the matrix unit, and SwiGLU's backward beside them, compute, in plain torch;
see ``fp8_reference``. Sums are in fp32: the matrix unit's own have about 14 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdmoe.kernels.gluon.fp8_reference import (
    panel_experts,
    panels_of,
    plain_swiglu_grad,
    segments_of,
    to_fp8,
    weighted_swiglu,
)
from fsdmoe.kernels.gluon.fp8_swiglu_grad import SwigluGrad
from fsdmoe.kernels.triton.fp8_rows import Codes
from fsdmoe.kernels.triton.fp8_scale import BLOCK
from fsdmoe.kernels.triton.row_map import RowMap


def project(a: Codes, weight: Codes, row_map: RowMap, *, dtype: torch.dtype) -> Tensor:
    """``fp8_fast_launch.project``."""
    out_MN = torch.full((row_map.capacity, weight.codes.shape[1]), torch.nan, device=a.codes.device)
    scales_E = weight.scales.flatten()
    by_row = a.scales.shape == (1, row_map.capacity)
    for expert, segment in enumerate(segments_of(row_map)):
        rows = a.scales[0, segment, None] if by_row else a.scales.flatten()[expert]
        product = a.codes[segment].float() @ weight.codes[expert].float().t()
        out_MN[segment] = product * (rows * scales_E[expert])
    return out_MN.to(dtype)


def gate_up(
    x: Codes,
    weights_RK: Tensor,
    weight: Codes,
    act_scales_E: Tensor,
    row_map: RowMap,
    *,
    keep: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Codes, Tensor]:
    """``fp8_fast_launch.gate_up``."""
    pre_M2N = project(x, weight, row_map, dtype=dtype)
    act_MN = weighted_swiglu(pre_M2N, weights_RK, row_map)
    codes = to_fp8(act_MN, act_scales_E[panel_experts(row_map)].repeat_interleave(BLOCK)[:, None])
    pre_2MN = torch.stack(pre_M2N.chunk(2, dim=1)) if keep else None
    return pre_2MN, Codes(codes, act_scales_E), _peaks(act_MN)


def weight_grad(left: Codes, right: Codes, row_map: RowMap, out_EAB: Tensor, *, accumulate: bool) -> None:
    """``fp8_fast_launch.weight_grad``."""
    scales_E = left.scales.flatten() * right.scales.flatten()
    for expert, segment in enumerate(segments_of(row_map)):
        panels = slice(segment.start // BLOCK, segment.stop // BLOCK)
        product = torch.einsum("pat,pbt->ab", left.codes[panels].float(), right.codes[panels].float())
        product = product * scales_E[expert]
        out_EAB[expert] = product + out_EAB[expert] if accumulate else product


def swiglu_grad(
    pre_2MN: Tensor,
    dact_MN: Tensor,
    weights_M: Tensor,
    act_scales: Tensor,
    row_map: RowMap,
    *,
    dpre_scales_E: Tensor,
) -> SwigluGrad:
    """``fp8_swiglu_grad.swiglu_grad`` with scales of d pre."""
    parts, act, dpre = plain_swiglu_grad(pre_2MN, dact_MN, weights_M)
    experts = panel_experts(row_map)
    of_act, of_dpre = (
        scales[experts].repeat_interleave(BLOCK)[:, None] for scales in (act_scales, dpre_scales_E)
    )
    rows = to_fp8(dpre, of_dpre)
    return SwigluGrad(
        Codes(rows, dpre_scales_E),
        Codes(_panels_of(rows), dpre_scales_E),
        Codes(_panels_of(to_fp8(act, of_act)), act_scales),
        parts,
        torch.maximum(*map(_peaks, dpre.chunk(2, dim=1))),
    )


def _panels_of(codes_MC: Tensor) -> Tensor:
    return panels_of(codes_MC.view(torch.uint8)).view(codes_MC.dtype)


def _peaks(values_MC: Tensor) -> Tensor:
    """The largest magnitudes of rows and blocks of 128 columns, ``[C/128, M]``."""
    return values_MC.abs().view(len(values_MC), -1, BLOCK).amax(2).t().contiguous()
