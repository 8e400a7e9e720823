"""The expert layer as custom operators: for ``torch.compile`` one opaque node, and no break of the graph.

Forward hands out what backward needs (pre-activation and row map); backward returns weight gradients as
tensors: a compiled graph cannot see gradient sinks.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from fsdmoe.kernels.triton import layer
from fsdmoe.kernels.triton.layer import WeightGrad
from fsdmoe.kernels.triton.row_map import RowMap, capacity_of


@torch.library.custom_op("fsdmoe::experts_mlp", mutates_args=())
def _forward_op(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    max_rows: Optional[int],  # noqa: UP045 (the schema parser of torch 2.11 knows this spelling)
) -> list[torch.Tensor]:
    y_RD, pre_2MN, row_map = layer.forward(
        x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN, keep=True, max_rows=max_rows
    )
    assert pre_2MN is not None
    return [y_RD, pre_2MN, *row_map]


@_forward_op.register_fake
def _(x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN, max_rows):
    num_rows, top_k = ids_RK.shape
    num_experts, _, n = down_EDN.shape
    align = layer.layer_tiles(ids_RK, down_EDN).align
    num_assignments = num_rows * top_k if max_rows is None else min(max_rows, num_rows * top_k)
    capacity = capacity_of(num_assignments, num_experts, align)

    def indices(*shape: int) -> torch.Tensor:
        return ids_RK.new_empty(shape, dtype=torch.int32)

    return [
        torch.empty_like(x_RD),
        x_RD.new_empty(2, capacity, n),
        indices(num_rows, top_k),
        indices(capacity),
        indices(num_experts + 2),
        indices(num_experts),
        indices(capacity // align),
    ]


@torch.library.custom_op("fsdmoe::experts_mlp_backward", mutates_args=())
def _backward_op(
    dy_RD: torch.Tensor,
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    pre_2MN: torch.Tensor,
    row_map: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    into = (WeightGrad(torch.empty_like(gate_up_E2ND), False), WeightGrad(torch.empty_like(down_EDN), False))
    grads = layer.backward(
        dy_RD.contiguous(), x_RD, weights_RK, (gate_up_E2ND, down_EDN), pre_2MN, RowMap(*row_map), into
    )
    assert grads.x_RD is not None
    return grads.x_RD, grads.weights_RK, into[0].buffer, into[1].buffer


@_backward_op.register_fake
def _(dy_RD, x_RD, weights_RK, gate_up_E2ND, down_EDN, pre_2MN, row_map):
    return (
        torch.empty_like(x_RD),
        torch.empty_like(weights_RK, dtype=torch.float32),
        torch.empty_like(gate_up_E2ND),
        torch.empty_like(down_EDN),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x_RD, weights_RK, _, gate_up_E2ND, down_EDN, _ = inputs
    ctx.save_for_backward(x_RD, weights_RK, gate_up_E2ND, down_EDN, *output[1:])


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    x_RD, weights_RK, gate_up_E2ND, down_EDN, pre_2MN, *row_map = ctx.saved_tensors
    dx, dweights, dgate_up, ddown = _backward_op(
        grads[0], x_RD, weights_RK, gate_up_E2ND, down_EDN, pre_2MN, list(row_map)
    )
    return dx, dweights.to(weights_RK.dtype), None, dgate_up, ddown, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def experts_mlp_op(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    max_rows: int | None,
) -> torch.Tensor:
    return _forward_op(x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN, max_rows)[0]
