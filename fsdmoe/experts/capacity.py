"""Capacity: the most tokens that an expert (or a device) takes, dropping the rest; and padding up to it.

A dropped choice has id -1 and weight 0: the token keeps its residual and its other experts. Weights are not
renormalised. Who competes with whom is the scope:

=============  ================================================  =========================  ==================
scope          tokens that compete                               communication              one process == any
=============  ================================================  =========================  ==================
sub_sequence   those of this rank's micro-batch, all together    none                       no: depends on who
                                                                                            stands together
sequence       those of one sequence, over all ranks of its      all-gather of 20 bytes a   yes
               cp x tp group                                     choice, one host sync
=============  ================================================  =========================  ==================

Each competitor's capacity is ``ceil(factor * counted tokens * top_k / experts)`` (devices instead of experts
when it is theirs). Padding tokens are not counted and are the first to be dropped.

Legend: T tokens, K choices a token, A = T * K choices of this rank, S sequences, B bins (sequence, expert or
device)."""

from __future__ import annotations

import math
from typing import NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.config import CapacityConfig
from fsdmoe.experts.context import RoutingContext


@overload
def even_share(num_choices: int, num_bins: int, factor: float) -> int: ...
@overload
def even_share(num_choices: Tensor, num_bins: int, factor: float) -> Tensor: ...
@overload
def even_share(num_choices: int | Tensor, num_bins: int, factor: float) -> int | Tensor: ...
def even_share(num_choices: int | Tensor, num_bins: int, factor: float) -> int | Tensor:
    """``ceil(factor * choices / bins)``; a small epsilon is subtracted first, or 1.1 * 10 would round up to
    12."""
    if isinstance(num_choices, Tensor):
        return (num_choices.double() * (factor / num_bins) * (1 - 1e-12)).ceil().long()
    return math.ceil(num_choices * (factor / num_bins) * (1 - 1e-12))


def within_capacity(
    ids_TK: Tensor, weights_TK: Tensor, num_experts: int, config: CapacityConfig, context: RoutingContext
) -> Tensor:
    """Which choices stay, bool ``[T, K]``; choices that were never made (-1) do not."""
    num_tokens, top_k = ids_TK.shape
    experts_per_target = 1 if config.per == "expert" else context.experts_per_device(num_experts)
    num_targets = num_experts // experts_per_target
    by_sequence = config.scope == "sequence" and context.sequence_ids_T is not None
    num_pools = context.num_sequences if by_sequence else 1
    pools_T = context.sequence_ids_T if by_sequence else ids_TK.new_zeros(num_tokens)
    assert pools_T is not None
    counted_T = ids_TK.new_ones(num_tokens, dtype=torch.bool)
    if context.token_mask_T is not None:
        counted_T = context.token_mask_T.bool()
    bins_TK = pools_T.unsqueeze(1) * num_targets + ids_TK // experts_per_target
    bins_TK = bins_TK.masked_fill(ids_TK < 0, num_pools * num_targets)  # a bin of capacity zero
    priority_TK = weights_TK.detach() if config.policy == "probability" else torch.zeros_like(weights_TK)
    priority_TK = priority_TK.masked_fill(~counted_T.unsqueeze(1), -1.0)
    tokens_S = ids_TK.new_zeros(num_pools).index_add_(0, pools_T, counted_T.long())
    choices = _Choices(bins_TK.flatten(), priority_TK.flatten(), _order(ids_TK, context))
    group = context.sequence_group if config.scope == "sequence" else None
    if group is not None and group.size() > 1:
        ranks_A = _ranks_over_group(choices, group, needs_positions=context.sequence_positions_T is None)
        dist.all_reduce(tokens_S, group=group)
    else:
        ranks_A = ranks_within_bins(choices)
    limit_S = even_share(tokens_S * top_k, num_targets, config.factor)
    limit_B = torch.cat((limit_S.repeat_interleave(num_targets), limit_S.new_zeros(1)))
    return (ranks_A < limit_B[choices.bins_A]).view(num_tokens, top_k)


class _Choices(NamedTuple):
    bins_A: Tensor
    priority_A: Tensor
    order_A: Tensor
    """Position in the sequence, then choice: breaks ties in the same way under every layout."""


def ranks_within_bins(choices: _Choices) -> Tensor:
    """How many choices of the same bin come before each: highest priority first, then in order."""
    by_order = choices.order_A.argsort(stable=True)
    by_priority = by_order[choices.priority_A[by_order].argsort(descending=True, stable=True)]
    sorted_A = by_priority[choices.bins_A[by_priority].argsort(stable=True)]
    sorted_bins_A = choices.bins_A[sorted_A]
    first_A = torch.searchsorted(sorted_bins_A, sorted_bins_A)  # where each one's bin begins
    ranks_A = torch.empty_like(sorted_A)
    ranks_A[sorted_A] = torch.arange(sorted_A.numel(), device=sorted_A.device) - first_A
    return ranks_A


def _ranks_over_group(choices: _Choices, group: dist.ProcessGroup, *, needs_positions: bool) -> Tensor:
    """The same over the choices of all ranks of the group, which may hold different numbers of them."""
    if needs_positions:
        raise AssertionError(
            "expected sequence_positions_T in the routing context: capacity over whole sequences compares "
            "tokens of several ranks; pass each token's index within its sequence"
        )
    own, rank, size = choices.bins_A.numel(), group.rank(), group.size()
    counts = choices.bins_A.new_zeros(size)
    counts[rank] = own
    dist.all_reduce(counts, group=group)
    longest = int(counts.max())
    gathered = _Choices(*(_all_gather_padded(values_A, longest, group) for values_A in choices))
    valid = torch.arange(longest, device=counts.device).expand(size, -1) < counts.unsqueeze(1)
    bins = gathered.bins_A.masked_fill(~valid.flatten(), torch.iinfo(torch.int64).max)  # after every real bin
    return ranks_within_bins(gathered._replace(bins_A=bins))[rank * longest : rank * longest + own]


def _all_gather_padded(values_A: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    padded = values_A.new_zeros(length)
    padded[: values_A.numel()] = values_A
    pieces = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat(pieces)


def _order(ids_TK: Tensor, context: RoutingContext) -> Tensor:
    num_tokens, top_k = ids_TK.shape
    positions_T = context.sequence_positions_T
    if positions_T is None or context.sequence_ids_T is None:
        positions_T = torch.arange(num_tokens, device=ids_TK.device)
    return (positions_T.unsqueeze(1) * top_k + torch.arange(top_k, device=ids_TK.device)).flatten()


def pad_to_capacity(
    ids_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Ids and weights with every expert at exactly ``capacity`` rows; columns follow from shapes alone.

    Free places of an expert are filled with choices of weight zero, written over dropped choices and into
    extra columns. The shapes here, and the rows that each expert computes, are then the same every time. What
    is sent is not: ``all_to_all`` sends a token once to each EP rank that holds any of its choices, so its
    rows still follow the routing, and every dispatcher over several ranks has the host read the counts. No
    expert may already hold more than ``capacity``."""
    num_tokens, top_k = ids_TK.shape
    columns = max(top_k, math.ceil(num_experts * capacity / max(1, num_tokens)))
    ids_TC = torch.nn.functional.pad(ids_TK, (0, columns - top_k), value=-1)
    weights_TC = torch.nn.functional.pad(weights_TK, (0, columns - top_k))
    empty_A = ids_TC.flatten() < 0
    held_E = ids_TK.new_zeros(num_experts + 1).index_add_(
        0, (ids_TC.flatten() + 1), torch.ones_like(ids_TC.flatten())
    )[1:]
    ends_E = (capacity - held_E).cumsum(0)  # free places, experts in turn: [ends[e - 1], ends[e]) are e's
    place_A = empty_A.cumsum(0) - 1
    fill_A = torch.searchsorted(ends_E, place_A, right=True)
    fill_A = fill_A.masked_fill(fill_A == num_experts, -1)  # more empty entries than free places
    return torch.where(empty_A, fill_A, ids_TC.flatten()).view_as(ids_TC), weights_TC
