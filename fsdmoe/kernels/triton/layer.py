"""The expert layer's local compute, forward and backward, as calls of the kernels; no autograd here.

    forward    map rows -> [permute x] -> gate_up (SwiGLU × weight) -> down -> combine
    backward   permute dy -> d act -> SwiGLU backward -> d down; permute x -> d gate_up; d x -> combine

Kept between the two: x, the router weights, the pre-activation and the map. Legend: R rows in, K choices a
row, D hidden size, N expert width, E experts, M sorted rows with padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsdmoe.kernels.triton.grouped_gemm import gate_up, project
from fsdmoe.kernels.triton.permute import combine_rows, permute_rows
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu import swiglu_backward_
from fsdmoe.kernels.triton.tiles import LayerTiles, grad_tile, tiles_for
from fsdmoe.kernels.triton.weight_grad import weight_grad


class WeightGrad(NamedTuple):
    """Where a weight gradient goes."""

    buffer: torch.Tensor
    accumulate: bool


class InputGrads(NamedTuple):
    x_RD: torch.Tensor | None
    weights_RK: torch.Tensor


def layer_tiles(ids_RK: torch.Tensor, down_EDN: torch.Tensor) -> LayerTiles:
    num_experts, d, n = down_EDN.shape
    return tiles_for(ids_RK.shape[0] * ids_RK.shape[1], num_experts, d, n)


def forward(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    *,
    keep: bool,
    max_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, RowMap]:
    """``(y [R, D], pre-activation [2, M, N] if ``keep``, map)``."""
    tiles = layer_tiles(ids_RK, down_EDN)
    row_map = build_row_map(ids_RK, down_EDN.shape[0], align=tiles.align, max_rows=max_rows)
    gathered = tiles.gathered and x_RD.shape[0] > 0
    rows = x_RD if gathered else permute_rows(x_RD, row_map)
    pre_2MN, act_MN = gate_up(
        rows, weights_RK, gate_up_E2ND, row_map, gathered=gathered, store_pre=keep, tile=tiles.gate_up
    )
    del rows
    y_MD = project(act_MN, down_EDN, row_map, transposed=True, tile=tiles.project)
    return combine_rows(y_MD, row_map), pre_2MN, row_map


def _write_weight_grad(
    left: torch.Tensor, right: torch.Tensor, row_map: RowMap, into: WeightGrad | None
) -> None:
    if into is not None:
        tile = grad_tile(into.buffer, into.accumulate)
        weight_grad(left, right, row_map, into.buffer, accumulate=into.accumulate, tile=tile)


def backward(
    dy_RD: torch.Tensor,
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    pre_2MN: torch.Tensor,
    row_map: RowMap,
    into: tuple[WeightGrad | None, WeightGrad | None],
    *,
    want_x: bool = True,
) -> InputGrads:
    """Gradients of x and of the router weights; those of gate_up and down are written to ``into``."""
    gate_up_E2ND, down_EDN = weights
    tiles = layer_tiles(row_map.position_RK, down_EDN)
    dweights_RK = torch.empty(weights_RK.shape, device=weights_RK.device, dtype=torch.float32)
    dy_MD = permute_rows(dy_RD, row_map, clear_RK=dweights_RK)
    dact_MN = project(dy_MD, down_EDN, row_map, transposed=False, tile=tiles.project)
    dpre_M2N = swiglu_backward_(pre_2MN, dact_MN, weights_RK, row_map, dweights_RK)
    act_MN = dact_MN  # which it has become
    del dact_MN
    _write_weight_grad(dy_MD, act_MN, row_map, into[1])
    del dy_MD, act_MN
    if into[0] is not None:
        x_MD = permute_rows(x_RD, row_map)
        _write_weight_grad(dpre_M2N, x_MD, row_map, into[0])
        del x_MD
    if not want_x:
        return InputGrads(None, dweights_RK)
    dx_MD = project(dpre_M2N, gate_up_E2ND, row_map, transposed=False, tile=tiles.project)
    return InputGrads(combine_rows(dx_MD, row_map), dweights_RK)
