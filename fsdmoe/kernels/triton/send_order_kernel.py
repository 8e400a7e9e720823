"""The order in which rows are sent, and their labels, in one launch: see ``fsdmoe/kernels/send_order.py``.

A lane has one choice of one token. The first choice that a rank has of a token writes the token's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2

_LANES = 256


@QuickLaunch
@triton.jit(do_not_specialize=["num_lanes", "per_rank"])
def _order_rows_kernel(
    weights_ptr,
    ids_ptr,
    index_ptr,
    counts_ptr,
    slots_ptr,
    sources_ptr,
    labels_ptr,
    num_lanes,
    per_rank,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    LANES: tl.constexpr,
):
    ranks = tl.arange(0, RANKS)
    rows = tl.load(counts_ptr + ranks, mask=ranks < NUM_RANKS, other=0)
    starts = tl.cumsum(rows, 0) - rows
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lanes < num_lanes
    tokens = lanes // NUM_IDS
    choices = lanes % NUM_IDS
    chosen = tl.load(ids_ptr + lanes, mask=inside, other=-1).to(tl.int32)
    owners = tl.where(chosen >= 0, chosen // per_rank, 0)
    has_row = chosen >= 0
    for other in tl.static_range(NUM_IDS):
        theirs = tl.load(ids_ptr + tokens * NUM_IDS + other, mask=inside, other=-1).to(tl.int32)
        has_row = has_row & ((theirs < 0) | (theirs // per_rank != owners) | (choices <= other))
    index = tl.load(index_ptr + tokens * NUM_RANKS + owners, mask=has_row, other=0)
    slots = tl.gather(starts, owners, 0) + index
    tl.store(slots_ptr + lanes, tl.where(has_row, slots, -1), mask=inside)
    tl.store(sources_ptr + slots, lanes, mask=has_row)
    first_label = labels_ptr + slots.to(tl.int64) * (2 * NUM_IDS)
    for other in tl.static_range(NUM_IDS):
        theirs = tl.load(ids_ptr + tokens * NUM_IDS + other, mask=has_row, other=-1).to(tl.int32)
        local = tl.where((theirs >= 0) & (theirs // per_rank == owners), theirs - owners * per_rank, -1)
        weight = tl.load(weights_ptr + tokens * NUM_IDS + other, mask=has_row, other=0.0)
        tl.store(first_label + other, weight.to(tl.int32, bitcast=True), mask=has_row)
        tl.store(first_label + NUM_IDS + other, local, mask=has_row)


def order_rows_triton(
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    index_TP: torch.Tensor,
    counts_C: torch.Tensor,
    experts_per_rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots ``[T, K]``, their sources ``[M]`` and labels ``[M, 2K]``."""
    num_tokens, num_ids = ids_TK.shape
    num_ranks = index_TP.shape[1]
    most = num_tokens * min(num_ids, num_ranks)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=ids_TK.device, dtype=torch.int32)

    slots_TK, sources_M, labels_ML = empty(num_tokens, num_ids), empty(most), empty(most, 2 * num_ids)
    _order_rows_kernel[(cdiv(ids_TK.numel(), _LANES),)](
        weights_TK, ids_TK, index_TP, counts_C, slots_TK, sources_M, labels_ML, ids_TK.numel(),
        experts_per_rank, NUM_RANKS=num_ranks, RANKS=max(next_power_of_2(num_ranks), 2), NUM_IDS=num_ids,
        LANES=_LANES, num_warps=4,
    )  # fmt: skip
    return slots_TK, sources_M, labels_ML
