"""Experts whose products are emulated on a GPU: operands rounded by ``round_kernels``, multiplied in bf16.

    out[m] = (a[m] @ w[e]^T) · f[m] · g[e]        factors: the scales that were kept out of the operands

Sums are float32, and factors are applied to them. All else is as in ``swiglu_mlp``: rows are sorted by expert
without waiting for the device, every segment is a whole number of tiles.

Legend: R rows in, K choices a row, D hidden size, N expert width, E experts, M sorted rows with padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fsdmoe.kernels.expert_autograd import Given, Gradient, compute_experts
from fsdmoe.kernels.expert_operands import ExpertWeights, Rows
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, has_bulk_copies
from fsdmoe.kernels.triton.permute_kernels import permute_rows
from fsdmoe.kernels.triton.round_kernels import (
    ALIGN,
    Rounded,
    Segments,
    mapped,
    round_operand,
    supports_scaling,
)
from fsdmoe.kernels.triton.row_map import RowMap
from fsdmoe.kernels.triton.swiglu import activated
from fsdmoe.kernels.triton.swiglu_mlp import FusedProducts
from fsdmoe.kernels.triton.tiles import LayerTiles, grad_tile
from fsdmoe.kernels.triton.weight_grad import weight_grad
from fsdmoe.precision.formats import Product, Recipe

_BLOCK_N = tl.constexpr(128)
_BLOCK_K = tl.constexpr(64)
# Of an activation that a program computes.
_ROWS = tl.constexpr(8)
_COLUMNS = tl.constexpr(256)


@QuickLaunch
@triton.jit(do_not_specialize=["num_experts"])
def _product_kernel(
    a_ptr,
    w_ptr,
    out_ptr,
    row_factors_ptr,
    column_factors_ptr,
    offsets_ptr,
    tile_expert_ptr,
    n,
    k,
    expert_stride,
    n_stride,
    k_stride,
    factors_stride,
    num_experts,
    BLOCK_M: tl.constexpr,
    ROW_FACTORS: tl.constexpr,
    COLUMN_FACTORS: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M
    if row < tl.load(offsets_ptr + num_experts):
        expert = tl.load(tile_expert_ptr + tl.program_id(1))
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = tl.program_id(0) * _BLOCK_N + tl.arange(0, _BLOCK_N)
        depth, inside = tl.arange(0, _BLOCK_K), columns < n
        a_ptrs = a_ptr + rows[:, None] * k + depth[None, :]
        w_ptrs = w_ptr + expert.to(tl.int64) * expert_stride + depth[:, None] * k_stride
        w_ptrs += columns[None, :] * n_stride
        acc = tl.zeros([BLOCK_M, _BLOCK_N], tl.float32)
        for _ in tl.range(0, k, _BLOCK_K):
            acc = tl.dot(tl.load(a_ptrs), tl.load(w_ptrs, mask=inside[None, :], other=0.0), acc)
            a_ptrs += _BLOCK_K
            w_ptrs += _BLOCK_K * k_stride
        if ROW_FACTORS:
            acc *= tl.load(row_factors_ptr + rows)[:, None]
        if COLUMN_FACTORS:
            place = column_factors_ptr + expert * factors_stride + columns
            acc *= tl.load(place, mask=inside, other=0.0)[None, :]
        out_ptrs = out_ptr + rows[:, None] * n + columns[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside[None, :])


@QuickLaunch
@triton.jit(do_not_specialize=["capacity", "num_experts"])
def _activate_kernel(
    pre_ptr,
    act_ptr,
    weights_ptr,
    source_ptr,
    offsets_ptr,
    n,
    capacity,
    num_experts,
):
    first = tl.program_id(0) * _ROWS
    if first < tl.load(offsets_ptr + num_experts):
        rows = first + tl.arange(0, _ROWS)
        columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
        source = tl.load(source_ptr + rows)
        weight = tl.load(weights_ptr + source, mask=source >= 0, other=0.0).to(tl.float32)[:, None]
        inside = (columns < n)[None, :]
        at = rows.to(tl.int64)[:, None] * n + columns[None, :]
        gate = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(pre_ptr + capacity.to(tl.int64) * n + at, mask=inside, other=0.0).to(tl.float32)
        phi, _, linear, _ = activated(gate, up, "swiglu", 0.0)
        tl.store(act_ptr + at, (phi * linear * weight).to(act_ptr.dtype.element_ty), mask=inside)


def supports_rounded(
    recipe: Recipe, x_RD: torch.Tensor, gate_up_E2ND: torch.Tensor, down_EDN: torch.Tensor, activation: str
) -> bool:
    """Whether experts of these tensors can be emulated here: in bf16 on Hopper or later, SwiGLU, widths that
    are multiples of 64, and scales that bf16 or a factor can hold."""
    tensors = (x_RD, gate_up_E2ND, down_EDN)
    if activation != "swiglu" or any(each.dtype != torch.bfloat16 for each in tensors):
        return False
    if x_RD.is_cuda and not has_bulk_copies(x_RD.device):
        return False
    if x_RD.numel() == 0 or down_EDN.shape[1] % ALIGN or down_EDN.shape[2] % ALIGN:
        return False
    is_contiguous = gate_up_E2ND.is_contiguous() and down_EDN.is_contiguous()
    return is_contiguous and all(map(_takes, (recipe.forward, recipe.dgrad, recipe.wgrad)))


def _takes(product: Product) -> bool:
    return supports_scaling(product.first) and supports_scaling(product.second)


def supports_matmul(first_MC: torch.Tensor, second_NC: torch.Tensor, product: Product) -> bool:
    """Whether :func:`rounded_matmul` takes this product of two matrices."""
    operands = (first_MC, second_NC)
    if any(each.dtype != torch.bfloat16 or each.dim() != 2 or not each.numel() for each in operands):
        return False
    if any(not each.is_contiguous() and not each.mT.is_contiguous() for each in operands):
        return False
    return _takes(product)


def rounded_matmul(first_MC: torch.Tensor, second_NC: torch.Tensor, product: Product) -> torch.Tensor:
    """``first @ second.T`` of rounded operands in float32; either may be a transposed view."""
    assert product.second is not None
    rotation = product.first.hadamard
    values, factors = [], []
    for operand, scaling in ((first_MC, product.first), (second_NC, product.second)):
        transposed = not operand.is_contiguous()
        lying = operand.mT if transposed else operand
        if rotation:  # a group is rotated whole, also the last
            rest = -operand.shape[1] % rotation
            lying = F.pad(lying, (0, 0, 0, rest) if transposed else (0, rest)) if rest else lying
        all_rows = Segments(1, len(lying))
        rounded = round_operand(lying, scaling, all_rows, transposed=transposed, rotation=rotation)
        values.append(rounded.values_MC.mT if transposed else rounded.values_MC)
        factors.append(rounded.factors)
    if first_MC.is_cuda:
        out_MN = torch.mm(values[0], values[1].mT, out_dtype=torch.float32)
    else:  # the interpreter's
        out_MN = values[0].float() @ values[1].float().mT
    if factors[0] is not None:
        out_MN *= factors[0].reshape(-1, 1)
    return out_MN if factors[1] is None else out_MN.mul_(factors[1].reshape(1, -1))


def experts_mlp_rounded(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    recipe: Recipe,
) -> torch.Tensor:
    """The experts' output for every row, its products as the recipe rounds them; see
    :mod:`fsdmoe.kernels.expert_mlp`."""
    rows = Rows(x_RD.contiguous(), weights_RK.contiguous(), ids_RK.contiguous())
    return compute_experts(RoundedProducts(recipe=recipe), rows, ExpertWeights(gate_up_E2ND, down_EDN))


@dataclass(frozen=True, kw_only=True)
class RoundedProducts(FusedProducts):
    """Those of :class:`FusedProducts`, of rounded operands."""

    recipe: Recipe

    def _rows(self, x_RD: torch.Tensor, row_map: RowMap, *, gathered: bool) -> torch.Tensor:
        return permute_rows(x_RD, row_map)

    def _first(
        self,
        given: Given,
        rows: Any,
        x_MQ: torch.Tensor | None,
        row_map: RowMap,
        tiles: LayerTiles,
        *,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = given.down_EDN.shape[2]
        x = _rounded(rows, self.recipe.forward, row_map)
        first = _rounded_weight(given.gate_up_E2ND, self.recipe.forward, transposed=False)
        pre_2MN = given.x_RD.new_empty(2, row_map.capacity, n)
        for plane, columns in ((0, slice(0, n)), (1, slice(n, 2 * n))):
            part = first.values_MC[:, columns], None if first.factors is None else first.factors[:, columns]
            _product(x, Rounded(*part), row_map, pre_2MN[plane])
        return pre_2MN, _activate(pre_2MN, given.weights_RK, row_map)

    def _down(self, act_MN: torch.Tensor, down_EDN: torch.Tensor, row_map: RowMap, *_: Any) -> torch.Tensor:
        second = _rounded_weight(down_EDN, self.recipe.forward, transposed=False)
        y_MD = act_MN.new_empty(row_map.capacity, down_EDN.shape[1])
        _product(_rounded(act_MN, self.recipe.forward, row_map), second, row_map, y_MD)
        return y_MD

    def _back(self, dy_MO: torch.Tensor, weight_EOI: torch.Tensor, row_map: RowMap, *_: Any) -> torch.Tensor:
        dx_MI = dy_MO.new_empty(row_map.capacity, weight_EOI.shape[2])
        weight = _rounded_weight(weight_EOI, self.recipe.dgrad, transposed=True)
        _product(_rounded(dy_MO, self.recipe.dgrad, row_map), weight, row_map, dx_MI)
        return dx_MI

    def _weight_grad(
        self, left_MA: torch.Tensor, right_MB: torch.Tensor, row_map: RowMap, gradient: Gradient
    ) -> None:
        gradient.put(_weight_grad(left_MA, right_MB, self.recipe.wgrad, row_map))


def _rounded(a_MC: torch.Tensor, product: Product, row_map: RowMap) -> Rounded:
    return round_operand(
        a_MC, product.first, mapped(row_map), transposed=False, rotation=product.first.hadamard
    )


def _rounded_weight(weight_EAB: torch.Tensor, product: Product, *, transposed: bool) -> Rounded:
    """For products over the last dim, or ``transposed`` over the one before it: ``[E, columns of the result,
    contracted]``, and the factors of its columns."""
    assert product.second is not None
    num_experts, num_rows, num_columns = weight_EAB.shape
    segments = Segments(num_experts, num_experts * num_rows)
    values, factors = round_operand(
        weight_EAB.view(-1, num_columns), product.second, segments,
        transposed=transposed, rotation=product.first.hadamard,
    )  # fmt: skip
    values = values.view(weight_EAB.shape)
    factors = None if factors is None else factors.reshape(num_experts, -1)
    return Rounded(values.mT if transposed else values, factors)


def _product(a: Rounded, weight: Rounded, row_map: RowMap, out_MN: torch.Tensor) -> None:
    n, k = weight.values_MC.shape[1:]
    assert out_MN.is_contiguous()
    tiles = row_map.tile_expert.shape[0]
    _product_kernel[(cdiv(n, _BLOCK_N.value), tiles)](
        a.values_MC,
        weight.values_MC,
        out_MN,
        out_MN if a.factors is None else a.factors,
        out_MN if weight.factors is None else weight.factors,
        row_map.offsets,
        row_map.tile_expert,
        n,
        k,
        *weight.values_MC.stride(),
        n if weight.factors is None else weight.factors.stride(0),
        row_map.num_experts,
        BLOCK_M=row_map.capacity // tiles,
        ROW_FACTORS=a.factors is not None,
        COLUMN_FACTORS=weight.factors is not None,
        num_warps=8,
        num_stages=3,
    )


def _activate(pre_2MN: torch.Tensor, weights_RK: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    _, capacity, n = pre_2MN.shape
    act_MN = torch.empty_like(pre_2MN[0])
    _activate_kernel[(capacity // _ROWS.value, cdiv(n, _COLUMNS.value))](
        pre_2MN, act_MN, weights_RK, row_map.source_M, row_map.offsets, n, capacity, row_map.num_experts,
        num_warps=4,
    )  # fmt: skip
    return act_MN


def _weight_grad(
    left_MA: torch.Tensor, right_MB: torch.Tensor, product: Product, row_map: RowMap
) -> torch.Tensor:
    """``[E, A, B]`` in float32."""
    assert product.second is not None
    rotation, segments = product.first.hadamard, mapped(row_map)
    left = round_operand(left_MA, product.first, segments, transposed=True, rotation=rotation)
    right = round_operand(right_MB, product.second, segments, transposed=True, rotation=rotation)
    shape = row_map.num_experts, left_MA.shape[1], right_MB.shape[1]
    out_EAB = torch.empty(shape, device=left_MA.device, dtype=torch.float32)
    tile = grad_tile(out_EAB, accumulate=False)
    weight_grad(left.values_MC, right.values_MC, row_map, out_EAB, accumulate=False, tile=tile)
    if left.factors is not None:
        out_EAB *= left.factors.unsqueeze(2)
    return out_EAB if right.factors is None else out_EAB.mul_(right.factors.unsqueeze(1))
