"""Weights as servers store them, and the rounding that they mean: what ``precision.qat`` trains for.

Rows of a matrix are cut into blocks along the contraction, each with a scale:

=======  ========================  ============  =============================================================
format   codes                     block         scales
=======  ========================  ============  =============================================================
int4     whole numbers, -8 to 7    32            in the dtype of the weight
mxfp4    E2M1                      32            powers of two
nvfp4    E2M1                      16            E4M3, divided by one float32 for each matrix (of an expert)
fp8      E4M3                      a whole row   in the dtype of the weight
=======  ========================  ============  =============================================================

Nothing here depends on other rows, apart from nvfp4's float32: a matrix may be cut between rows or stacked,
and has the same codes. Training (:func:`round_weight_`) and export (:func:`encode`) share this file, so what
is written is what forward saw. Sizes: R rows, C contracted elements, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsdmoe.precision.formats import E2M1, E4M3, DeployedFormat, Scaling
from fsdmoe.precision.quantize import block_scales, round_to

BLOCKS: dict[DeployedFormat, int | None] = {"int4": 32, "mxfp4": 32, "nvfp4": 16, "fp8": None}
"""Elements of a row that share a scale; None: all of them."""
_MXFP4 = Scaling(E2M1, (1, 32), "power_of_two")
_SMALLEST_POWER = 2.0**-126
_CHUNK = 1 << 24  # elements at a time: what is computed from them is small compared with a layer's experts


class WeightRounding(NamedTuple):
    """How a parameter is rounded before its products."""

    format: DeployedFormat
    dtype: torch.dtype
    """What it is computed in, and rounded from."""
    transposed: bool = False
    """The contraction is the last dim but one."""


def round_for_products(layer: nn.Module, name: str, rounding: WeightRounding) -> None:
    """Ask for the rounding of a weight that is sharded later, wherever it is gathered."""
    vars(layer).setdefault("weight_roundings", {})[name] = rounding


def weight_rounding(places: Iterable[tuple[nn.Module, str]]) -> WeightRounding | None:
    """What :func:`round_for_products` asked for, of a weight that is registered at ``places``."""
    found = (vars(layer).get("weight_roundings", {}).get(name) for layer, name in places)
    return next((rounding for rounding in found if rounding is not None), None)


def all_roundings(model: nn.Module) -> dict[str, WeightRounding]:
    """Of all weights of a model, by name."""
    return {
        f"{module}.{name}": rounding
        for module, layer in model.named_modules()
        for name, rounding in vars(layer).get("weight_roundings", {}).items()
    }


class Coded(NamedTuple):
    """A weight in a deployed format."""

    codes_RC: Tensor
    """float32, on the grid of the format."""
    scales_RB: Tensor
    """As they are stored, those of E4M3 and powers of two in float32."""
    divisor: Tensor | None = None
    """nvfp4: float32 ``[..., 1, 1]``, what scales are divided by."""


def encode(weight_RC: Tensor, kind: DeployedFormat) -> Coded:
    """Codes and scales of matrices ``[..., R, C]``. What is not finite stays so."""
    blocks = weight_RC.float().unflatten(-1, (-1, BLOCKS[kind] or weight_RC.shape[-1]))
    amax = blocks.abs().amax(-1)
    divisor = None
    if kind == "int4":
        # The smallest that clips nothing. The largest code is -8 or 7 then, so that rounding a second time
        # finds the same scale: an exported model can be trained further.
        scales = torch.maximum(blocks.amax(-1) / 7, blocks.amin(-1) / -8).to(weight_RC.dtype)
    elif kind == "fp8":
        scales = (amax / E4M3.largest).to(weight_RC.dtype)
    elif kind == "mxfp4":
        scales = block_scales(amax, _MXFP4).clamp(min=_SMALLEST_POWER)
    else:
        divisor = E2M1.largest * E4M3.largest / amax.amax((-2, -1), keepdim=True)
        divisor = divisor.masked_fill(divisor.isinf(), 1.0)
        scales = round_to(amax / E2M1.largest * divisor, E4M3)
    effective = scales.float() if divisor is None else scales / divisor
    codes = blocks / effective.masked_fill(effective == 0, 1.0).unsqueeze(-1)
    if kind == "int4":
        codes = codes.round().clamp(-8, 7)
    else:
        codes = round_to(codes, E4M3 if kind == "fp8" else E2M1)
    return Coded(codes.flatten(-2), scales, divisor)


def decode(coded: Coded, dtype: torch.dtype) -> Tensor:
    """The values that codes stand for: exact in float32, rounded once to ``dtype``."""
    codes_RC, scales_RB, divisor = coded
    scales = scales_RB.float() if divisor is None else scales_RB / divisor
    blocks = codes_RC.unflatten(-1, (scales.shape[-1], -1))
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)


@torch.no_grad()
def round_weight_(weight: Tensor, rounding: WeightRounding) -> None:
    """Replace values by what their deployed form stands for."""
    matrices_RC = weight.mT if rounding.transposed else weight
    matrices_RC = matrices_RC.unsqueeze(0) if weight.dim() == 2 else matrices_RC
    for some_RC in matrices_RC.split(max(1, _CHUNK // max(1, matrices_RC[0].numel()))):
        some_RC.copy_(decode(encode(some_RC, rounding.format), weight.dtype))
