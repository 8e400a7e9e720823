"""The Gluon kernels' results in plain torch, of the same operands in the same layouts: what tests hold them
to, and what stands in for them where there is no Hopper GPU (tests of everything around them).

Rounds where the kernels round: a ``dtype`` of bf16 rounds what they round to bf16, float32 nothing.
Sizes: M sorted rows with padding, N expert width, E experts, B blocks of 128.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.kernels.gluon.fp8_swiglu_grad import SwigluGrad
from fsdmoe.kernels.triton.fp8_panels import _STRIDE as STRIDE
from fsdmoe.kernels.triton.fp8_rows import Codes
from fsdmoe.kernels.triton.fp8_scale import BLOCK, FP8
from fsdmoe.kernels.triton.grouped_gemm import LowRankTerm
from fsdmoe.kernels.triton.row_map import RowMap
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantize import SMALLEST_SCALE, block_scales, inverse_of


def project(
    a: Codes, weight: Codes, row_map: RowMap, *, dtype: torch.dtype, term: LowRankTerm | None = None
) -> Tensor:
    """``fp8_launch.project``."""
    rows, n = rows_of(a), weight.codes.shape[1]
    out_MN = torch.full((row_map.capacity, n), torch.nan, device=rows.device)
    for expert, segment in enumerate(segments_of(row_map)):
        out_MN[segment] = rows[segment] @ weights_of(weight)[expert].t()
        if term is not None:
            out_MN[segment] += term.narrow_MQ[segment].float() @ term.factor[expert].float().t()
    return out_MN.to(dtype)


def gate_up(
    x: Codes,
    weights_RK: Tensor,
    weight: Codes,
    row_map: RowMap,
    *,
    keep: str,
    power_of_two: bool,
    dtype: torch.dtype,
    term: LowRankTerm | None = None,
) -> tuple[Tensor | Codes | None, Codes]:
    """``fp8_launch.gate_up``."""
    pre_M2N = project(x, weight, row_map, dtype=dtype, term=term)
    act = quantized_rows(weighted_swiglu(pre_M2N, weights_RK, row_map), power_of_two)
    if keep == "nothing":
        return None, act
    pre_2MN = torch.stack(pre_M2N.chunk(2, dim=1))
    if keep == "values":
        return pre_2MN, act
    return quantized_rows(pre_2MN.flatten(0, 1).float(), power_of_two), act


def weighted_swiglu(pre_M2N: Tensor, weights_RK: Tensor, row_map: RowMap) -> Tensor:
    """The activation as the dtype of the pre-activation holds it, in float32."""
    gate, up = pre_M2N.float().chunk(2, dim=1)
    # Padding, and what lies past the last segment, takes the zero behind all weights.
    sources, last = row_map.source_M.long(), weights_RK.numel()
    is_row = (sources >= 0) & (sources < last)
    weights_M = F.pad(weights_RK.flatten().float(), (0, 1))[torch.where(is_row, sources, last)]
    return (F.silu(gate) * up * weights_M[:, None]).to(pre_M2N.dtype).float()


def weight_grad(
    left: Codes,
    right: Codes,
    row_map: RowMap,
    out_EAB: Tensor,
    *,
    accumulate: bool,
    first_expert: int = 0,
) -> None:
    """``fp8_launch.weight_grad``."""
    left_PA, right_PB = left.codes.float() * left.scales[:, :, None], right.codes.float()
    segments = segments_of(row_map)[first_expert : first_expert + len(out_EAB)]
    for number, segment in enumerate(segments):
        panels = slice(segment.start // BLOCK, segment.stop // BLOCK)
        product = torch.einsum("pat,pbt->ab", left_PA[panels], right_PB[panels])
        product = product * right.scales[first_expert + number].repeat_interleave(BLOCK)
        out_EAB[number] = product + out_EAB[number] if accumulate else product


def swiglu_grad(
    pre_2MN: Tensor,
    dact_MN: Tensor,
    weights_M: Tensor,
    act_scales: Tensor,
    row_map: RowMap,
    *,
    power_of_two: bool,
) -> SwigluGrad:
    """``fp8_swiglu_grad.swiglu_grad``."""
    parts, act, dpre = plain_swiglu_grad(pre_2MN, dact_MN, weights_M)
    act_scales_PN = act_scales[panel_experts(row_map)].repeat_interleave(BLOCK, 1)
    act_codes = to_fp8(panels_of(act), act_scales_PN[:, :, None])
    panels = panels_of(dpre)
    scales = clamped_scales(panels.abs().amax(2), power_of_two)
    return SwigluGrad(
        quantized_rows(dpre, power_of_two),
        Codes(to_fp8(panels, scales[:, :, None]), scales),
        Codes(act_codes, act_scales),
        parts,
    )


def plain_swiglu_grad(pre_2MN: Tensor, dact_MN: Tensor, weights_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Not quantised: the routing weights' gradient in sums of 128 columns, the activation, and the gradient
    of the pre-activation ``[M, 2N]``; both rounded to its type."""
    dtype, (gate, up), weights = pre_2MN.dtype, pre_2MN.float(), weights_M[:, None]
    sigma = torch.sigmoid(gate)
    silu, dact = gate * sigma, dact_MN.float()
    parts = (dact * silu * up).view(len(dact), -1, BLOCK).sum(2).t().contiguous()
    act = (silu * up * weights).to(dtype).float()
    dact = dact * weights
    dpre = torch.cat((dact * up * (sigma + silu * (1 - sigma)), dact * silu), 1).to(dtype).float()
    return parts, act, dpre


def clamped_scales(amax: Tensor, power_of_two: bool) -> Tensor:
    scaling = Scaling(E4M3, (1, BLOCK), "power_of_two" if power_of_two else "float32")
    return block_scales(amax, scaling).clamp(min=SMALLEST_SCALE)


def to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """Saturating, as the hardware does; a NaN stays one."""
    return (values * inverse_of(scales)).clamp(-448, 448).to(FP8)


def quantized_rows(values_MC: Tensor, power_of_two: bool) -> Codes:
    """``[M, C]`` with 1 x 128 scales ``[C/128, M]``."""
    blocks = values_MC.view(len(values_MC), -1, BLOCK)
    scales = clamped_scales(blocks.abs().amax(2), power_of_two)
    return Codes(to_fp8(blocks, scales[:, :, None]).view(values_MC.shape), scales.t().contiguous())


def rows_of(operand: Codes) -> Tensor:
    """The values of codes ``[M, C]`` with scales ``[C/128, M]``."""
    return operand.codes.float() * operand.scales.t().repeat_interleave(BLOCK, 1)


def weights_of(operand: Codes) -> Tensor:
    """The values of codes ``[E, A, B]`` with scales ``[E, A/128, B/128]``."""
    scales = operand.scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return operand.codes.float() * scales


def panels_of(values_MC: Tensor) -> Tensor:
    """``[M/128, C, 128]``, tokens in the order of panels."""
    return order_tokens(values_MC.view(-1, BLOCK, values_MC.shape[1]).transpose(1, 2)).contiguous()


def segments_of(row_map: RowMap) -> list[slice]:
    """Of each expert's sorted rows; waits for the device."""
    offsets = row_map.offsets[: row_map.num_experts + 1].tolist()
    return [slice(first, last) for first, last in pairwise(offsets)]


def panel_experts(row_map: RowMap) -> Tensor:
    """Of each panel; any of those past the last segment."""
    return row_map.tile_expert.clamp(0, row_map.num_experts - 1).long()


def order_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """``[..., 128]`` tokens in the order of a panel."""
    return tokens.unflatten(-1, (-1, STRIDE.value)).transpose(-1, -2).flatten(-2)


def restore_tokens(panel: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`order_tokens`."""
    return panel.unflatten(-1, (STRIDE.value, -1)).transpose(-1, -2).flatten(-2)
