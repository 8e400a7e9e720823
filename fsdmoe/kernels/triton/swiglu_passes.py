"""The two passes of the expert layer in bf16, launch by launch; ``swiglu_mlp`` makes them one function.

    forward    map rows -> [permute x] -> gate_up (SwiGLU × weight) -> down -> combine
    backward   [permute dy] -> d act -> SwiGLU backward -> d down; [permute x] -> d gate_up; d x -> combine

Where experts are narrow, the first projection fetches its rows through the map, and on Hopper so do the
products of backward (weight gradients: ``gluon/bf16_weight_grad.py``). Then nothing is permuted, unless
experts have few rows or sizes that are not whole tiles.

Legend: R rows in, K choices a row, D hidden size, N expert width, E experts, M sorted rows with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fsdmoe.kernels.backend import fetching_for
from fsdmoe.kernels.triton.grouped_gemm import GateUp, gate_up, project
from fsdmoe.kernels.triton.permute_kernels import combine_rows, permute_rows
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu import swiglu_backward_
from fsdmoe.kernels.triton.tiles import LayerTiles, grad_tile, tiles_for
from fsdmoe.kernels.triton.weight_grad import WeightGrad, bias_grad, weight_grad


class InputGrads(NamedTuple):
    x_RD: torch.Tensor | None
    weights_RK: torch.Tensor
    gate_up_bias: torch.Tensor | None = None


def layer_tiles(ids_RK: torch.Tensor, down_EDN: torch.Tensor, spare_sms: int = 0) -> LayerTiles:
    num_experts, d, n = down_EDN.shape
    return tiles_for(ids_RK.shape[0] * ids_RK.shape[1], num_experts, d, n, spare_sms)


def forward(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    first: GateUp,
    down_EDN: torch.Tensor,
    *,
    keep: bool,
    max_rows: int | None = None,
    spare_sms: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None, RowMap]:
    """``(y [R, D], pre-activation [2, M, N] if ``keep``, map)``."""
    tiles = layer_tiles(ids_RK, down_EDN, spare_sms)
    row_map = build_row_map(ids_RK, down_EDN.shape[0], align=tiles.align, max_rows=max_rows)
    pre_2MN, act_MN = first_product(x_RD, weights_RK, first, row_map, tiles, keep=keep)
    y_MD = project(act_MN, down_EDN, row_map, transposed=True, tile=tiles.project)
    return combine_rows(y_MD, row_map), pre_2MN, row_map


def first_product(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    first: GateUp,
    row_map: RowMap,
    tiles: LayerTiles,
    *,
    keep: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The pre-activation if ``keep``, and the weighted activation."""
    gathered = tiles.gathered and x_RD.shape[0] > 0
    rows = x_RD if gathered else permute_rows(x_RD, row_map)
    return gate_up(rows, weights_RK, first, row_map, gathered=gathered, store_pre=keep, tile=tiles.gate_up)


Into = tuple[WeightGrad | None, WeightGrad | None]
"""Where the gradients of gate_up and down go."""


class Operands(NamedTuple):
    """What weight gradients are computed from."""

    down: list[torch.Tensor]
    """Gradients of outputs, sorted unless they are fetched, and activations; given up once they have been
    used."""
    dpre_M2N: torch.Tensor
    x_RD: torch.Tensor
    row_map: RowMap
    fetching: Any
    """The package whose weight gradients fetch rows; None where rows are sorted."""


def write_weight_grads(operands: Operands, into: Into, spare_sms: int = 0) -> None:
    """The gradients of gate_up and down."""
    fetching, row_map = operands.fetching, operands.row_map

    def write(left: torch.Tensor, right: torch.Tensor, target: WeightGrad, *, fetch_left: bool) -> None:
        buffer, accumulate = target
        given = left, right, row_map, buffer
        if fetching is None:
            weight_grad(*given, accumulate=accumulate, tile=grad_tile(buffer, accumulate, spare_sms))
        else:
            fetching.weight_grad_fetched(
                *given, fetch_left=fetch_left, accumulate=accumulate, spare_sms=spare_sms
            )

    if into[1] is not None:
        write(operands.down[0], operands.down[1], into[1], fetch_left=True)
    operands.down.clear()
    if into[0] is not None:
        x = permute_rows(operands.x_RD, row_map) if fetching is None else operands.x_RD
        write(operands.dpre_M2N, x, into[0], fetch_left=False)


def _fetching(dy_RD: torch.Tensor, down_EDN: torch.Tensor, tiles: LayerTiles) -> Any:
    """The package whose weight gradients fetch rows, where that is faster than sorting them beforehand."""
    _, d, n = down_EDN.shape
    package = fetching_for(dy_RD) if tiles.fetched and dy_RD.shape[0] > 0 else None
    return package if package is not None and package.supports_fetching(d, n) else None


def backward(
    dy_RD: torch.Tensor,
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    weights: tuple[GateUp, torch.Tensor],
    kept: tuple[torch.Tensor, RowMap],
    write: Callable[[Operands], None],
    *,
    want_x: bool = True,
    spare_sms: int = 0,
) -> InputGrads:
    """Gradients of x, of the router weights and of a bias. ``write`` sees to those of gate_up and down; what
    it does not keep is given up before the last product."""
    (first, down_EDN), (pre_2MN, row_map) = weights, kept
    del kept
    tiles = layer_tiles(row_map.position_RK, down_EDN, spare_sms)
    fetching = _fetching(dy_RD, down_EDN, tiles)
    dweights_RK = torch.empty(weights_RK.shape, device=weights_RK.device, dtype=torch.float32)
    if fetching is None:
        dy = permute_rows(dy_RD, row_map, clear_RK=dweights_RK)
    else:
        dy = dy_RD
        dweights_RK.zero_()
    gathered = fetching is not None
    dact_MN = project(dy, down_EDN, row_map, transposed=False, tile=tiles.project, gathered=gathered)
    dpre_M2N = swiglu_backward_(pre_2MN, dact_MN, weights_RK, row_map, dweights_RK, clamped=first.clamped)
    operands = Operands([dy, dact_MN], dpre_M2N, x_RD, row_map, fetching)  # by now the activation itself
    del dy, dact_MN
    write(operands)
    del operands
    dbias_E2N = None if first.bias_E2N is None else bias_grad(dpre_M2N, row_map)
    if not want_x:
        return InputGrads(None, dweights_RK, dbias_E2N)
    dx_MD = project(dpre_M2N, first.weight_E2ND, row_map, transposed=False, tile=tiles.project)
    return InputGrads(combine_rows(dx_MD, row_map), dweights_RK, dbias_E2N)
