"""Rows grouped by where they go: the permutation shared by the experts and by the dispatchers.

A table ``ids_RK`` says to which of G groups (experts, or ranks) each row of ``x_RD`` is assigned, up to K
times; -1 assigns it nowhere. A :class:`RowPermutation` lays the assignments out group by group in M *slots*,
in row order within a group::

    ids_RK = [[1, 0],          slots      0   1   2   3   4   5
              [1, -1],         group      0 | 1   1   1 |  tail
              [1, -1]]         source     1 | 0   2   4 |  -   -     (row * K + k; row = source // K)
                               ends_G     1           4

M is a bound known on the host (``R*K``, or less where the caller knows better), so nothing here waits for the
device. Slots past ``ends_G[-1]`` are the *tail*, whose contents never reach a result: a grouped matrix
product leaves them uninitialised.

Sizes: R rows, K assignments a row, G groups, M slots, D width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.backend import triton_for

_MAX_GROUPS = 1024  # counts that one program of the fused kernel holds


class RowPermutation(NamedTuple):
    """Both directions of the layout drawn above."""

    slots_RK: Tensor
    """int32: the slot of each assignment, -1 where there is none."""
    sources_M: Tensor
    """int32: the assignment ``row * K + k`` that each slot holds, -1 in the tail."""
    ends_G: Tensor
    """int32: the slot after each group's last (``offs`` of a grouped matrix product)."""

    @property
    def num_slots(self) -> int:
        return self.sources_M.shape[0]

    def groups_M(self) -> Tensor:
        """The group of each slot; the tail counts to the last group."""
        slots = torch.arange(self.num_slots, device=self.ends_G.device, dtype=torch.int32)
        groups = torch.searchsorted(self.ends_G, slots, right=True, out_int32=True)
        return groups.clamp_(max=self.ends_G.shape[0] - 1)


def group_assignments(
    ids_RK: Tensor, num_groups: int, *, max_assignments: int | None = None
) -> RowPermutation:
    """The permutation of ``ids_RK``; ``max_assignments`` is a promise that no more of them are >= 0."""
    fused = triton_for(ids_RK) if max_assignments is None else None
    if fused is not None and num_groups <= _MAX_GROUPS:
        found = fused.build_group_map(ids_RK.contiguous(), num_groups)
        return RowPermutation(found.position_RK, found.source_M, found.offsets[1 : num_groups + 1])
    flat = ids_RK.reshape(-1)
    groups, order = flat.masked_fill(flat < 0, num_groups).sort(stable=True)  # what goes nowhere comes last
    nowhere = groups == num_groups
    slots = torch.arange(flat.numel(), device=flat.device, dtype=torch.int32).masked_fill_(nowhere, -1)
    numbers = torch.arange(num_groups, device=flat.device, dtype=groups.dtype)
    return RowPermutation(
        slots_RK=torch.empty_like(slots).scatter_(0, order, slots).view(ids_RK.shape),
        sources_M=order.int().masked_fill_(nowhere, -1)[:max_assignments],
        ends_G=torch.searchsorted(groups, numbers, right=True, out_int32=True),
    )


def take_rows(x_RD: Tensor, permutation: RowPermutation) -> Tensor:
    """``x_MD``: each slot's row; unspecified in the tail."""
    num_assignments = permutation.slots_RK.shape[1]
    fused = triton_for(x_RD) if num_assignments else None
    if fused is not None:
        return fused.take_rows_triton(x_RD, permutation.slots_RK, permutation.num_slots)
    return x_RD.index_select(0, permutation.sources_M.clamp(min=0) // max(num_assignments, 1))


def sum_rows(y_MD: Tensor, permutation: RowPermutation, weights_RK: Tensor | None = None) -> Tensor:
    """``y_RD``: for each row the (weighted) sum over its slots, accumulated in fp32 in the order of k."""
    slots_RK = permutation.slots_RK
    num_rows, num_assignments = slots_RK.shape
    if permutation.num_slots == 0 or num_assignments == 0:
        return y_MD.new_zeros((num_rows, y_MD.shape[1]))
    fused = triton_for(y_MD) if weights_RK is None else None
    if fused is not None:
        return fused.sum_rows_triton(y_MD, slots_RK)
    is_copy = num_assignments == 1 and weights_RK is None
    wide = y_MD.dtype if is_copy else torch.promote_types(y_MD.dtype, torch.float32)
    found = slots_RK.clamp(min=0).unbind(1)
    nowhere = (slots_RK < 0).unsqueeze(-1).unbind(1)
    terms = (
        _term(y_MD, found[k], nowhere[k], None if weights_RK is None else weights_RK[:, k], wide)
        for k in range(num_assignments)
    )
    return functools.reduce(Tensor.add_, terms).to(y_MD.dtype)


def _term(
    y_MD: Tensor, slots_R: Tensor, nowhere_R1: Tensor, weights_R: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A fresh ``[R, D]``: each row's slot, weighted; zero where it has none."""
    term = y_MD.index_select(0, slots_R).to(dtype)
    if weights_R is not None:
        term *= weights_R.unsqueeze(-1)
    return term.masked_fill_(nowhere_R1, 0)


def take_assignments(values_RK: Tensor, permutation: RowPermutation) -> Tensor:
    """``values_M``: what a ``[R, K]`` table says of each slot, 0 in the tail."""
    if permutation.num_slots == 0:
        return values_RK.new_empty(0)
    sources = permutation.sources_M
    values_M = values_RK.reshape(-1).index_select(0, sources.clamp(min=0))
    return values_M.masked_fill_(sources < 0, 0)


def put_assignments(values_M: Tensor, permutation: RowPermutation) -> Tensor:
    """``values_RK``: the inverse of :func:`take_assignments`, 0 where a row is assigned nowhere."""
    slots = permutation.slots_RK
    if permutation.num_slots == 0:
        return values_M.new_zeros(slots.shape)
    values = values_M.index_select(0, slots.clamp(min=0).view(-1)).view(slots.shape)
    return values.masked_fill_(slots < 0, 0)


def unpermute(y_MD: Tensor, permutation: RowPermutation) -> Tensor:
    """:func:`sum_rows` without weights, differentiable; keeps the indices alone."""
    return _Unpermute.apply(y_MD, *permutation)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_MD, *permutation):
        # Not saved: a layer that is run again in backward would have to come as far as here to find them, and
        # send the experts' outputs back a second time for a few indices.
        ctx.permutation = RowPermutation(*permutation)
        return sum_rows(y_MD, ctx.permutation)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_RD):
        return take_rows(dy_RD, ctx.permutation), None, None, None
