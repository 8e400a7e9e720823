"""The order in which a rank sends its rows, worked out on the device, with what is written on each.

A token is one row for each EP rank that holds one of its experts. Rows are sent rank after rank, in order of
tokens; with a row go its labels, all K routing weights and all K ids as the receiver counts its experts::

    token t, K = 4, owners of its experts  [2, 0, 2, -]   ->   rows (t, rank 0), (t, rank 2)
    slots of t                             [s2, s0, -1, -1]    the first choice of a rank has the row
    labels of row s2                       [w0 w1 w2 w3 | id0 -1 id2 -1]    weights by their bits, int32

How many rows there are, only the device knows: sizes here are the most there can be. Slots past the last row
are not written.

Sizes: T tokens, K choices a token, P EP ranks, M slots, C counts (see :mod:`fsdmoe.kernels.exchange_plan`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.permute import RowPermutation


class SendOrder(NamedTuple):
    """See the module's drawing."""

    permutation: RowPermutation
    """Without its ends."""
    labels_ML: Tensor
    """int32, L = 2K."""

    def first(self, num_rows: int) -> SendOrder:
        """Of so many slots."""
        slots_TK, sources_M, _ = self.permutation
        return SendOrder(RowPermutation(slots_TK, sources_M[:num_rows], _), self.labels_ML[:num_rows])

    def labels(self) -> tuple[Tensor, Tensor]:
        """Weights and ids of each row."""
        weights_MK, ids_MK = self.labels_ML.split(self.labels_ML.shape[1] // 2, dim=1)
        return weights_MK.view(torch.float32), ids_MK


def index_rows(ids_TK: Tensor, num_ranks: int, experts_per_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """``index_TP``: each token's row in the range for an EP rank, -1 where it needs none; ``routes_TC2``:
    the same as pairs of a rank and a row of its range, a pair for each rank or, if those are fewer, for
    each choice, -1 and -1 where nothing is sent; and this rank's counts. All int32."""
    fused = triton_for(ids_TK)
    if fused is not None:
        return fused.index_rows_triton(ids_TK, num_ranks, experts_per_rank)
    owners_TK = torch.where(ids_TK < 0, num_ranks, ids_TK // experts_per_rank).long()
    needed_TP = torch.zeros(len(ids_TK), num_ranks + 1, dtype=torch.bool, device=ids_TK.device)
    needed_TP = needed_TP.scatter_(1, owners_TK, True)[:, :num_ranks]
    index_TP = torch.where(needed_TP, needed_TP.cumsum(0) - 1, -1)
    pairs = owners_TK.new_zeros(num_ranks + 1).scatter_add_(
        0, owners_TK.flatten(), torch.ones_like(owners_TK.flatten())
    )
    sizes = [pairs.new_full((1,), size) for size in ids_TK.shape]
    counts_C = torch.cat((needed_TP.sum(0), pairs[:num_ranks], *sizes))
    return index_TP.int(), _routes(index_TP, owners_TK), counts_C.int()


def _routes(index_TP: Tensor, owners_TK: Tensor) -> Tensor:
    num_ranks = index_TP.shape[1]
    if owners_TK.shape[1] >= num_ranks:
        ranks_P = torch.arange(num_ranks, device=index_TP.device)
        return torch.stack((torch.where(index_TP >= 0, ranks_P, -1), index_TP), 2).int()
    is_repeated_TK = (owners_TK.unsqueeze(2) == owners_TK.unsqueeze(1)).tril(-1).any(2)
    ranks_TK = owners_TK.masked_fill(is_repeated_TK | (owners_TK == num_ranks), -1)
    index_TK = index_TP.gather(1, ranks_TK.clamp(min=0)).masked_fill(ranks_TK < 0, -1)
    return torch.stack((ranks_TK, index_TK), 2).int()


def order_rows(
    weights_TK: Tensor, ids_TK: Tensor, index_TP: Tensor, counts_C: Tensor, experts_per_rank: int
) -> SendOrder:
    """From what :func:`index_rows` says of ``ids_TK``."""
    num_ranks = index_TP.shape[1]
    fused = triton_for(ids_TK)
    if fused is not None and ids_TK.numel() > 0:
        given = weights_TK.contiguous(), ids_TK.contiguous(), index_TP, counts_C
        slots_TK, sources_M, labels_ML = fused.order_rows_triton(*given, experts_per_rank)
        return SendOrder(RowPermutation(slots_TK, sources_M, sources_M[:0]), labels_ML)
    num_tokens, num_ids = ids_TK.shape
    owners_TK = torch.where(ids_TK < 0, num_ranks, ids_TK // experts_per_rank).long()
    is_repeated_TK = (owners_TK.unsqueeze(2) == owners_TK.unsqueeze(1)).tril(-1).any(2)
    rows_P = counts_C[:num_ranks]
    start_P = F.pad(rows_P.cumsum(0) - rows_P, (0, 1))
    index_TK = F.pad(index_TP, (0, 1), value=-1).gather(1, owners_TK).masked_fill(is_repeated_TK, -1)
    slots_TK = torch.where(index_TK < 0, -1, index_TK + start_P[owners_TK]).int()
    most = num_tokens * min(num_ids, num_ranks)
    places = torch.where(slots_TK < 0, most, slots_TK).flatten().long()
    sources = torch.arange(places.numel(), device=places.device)
    sources_M = sources.new_zeros(most + 1).scatter_(0, places, sources)[:most]
    tokens_M = sources_M // max(num_ids, 1)
    first_M1 = owners_TK.flatten()[sources_M].unsqueeze(1) * experts_per_rank
    local_MK = ids_TK[tokens_M] - first_M1
    local_MK = local_MK.masked_fill((local_MK < 0) | (local_MK >= experts_per_rank), -1)
    labels_ML = torch.cat([weights_TK[tokens_M].view(torch.int32), local_MK.int()], dim=1)
    return SendOrder(RowPermutation(slots_TK, sources_M.int(), slots_TK.new_empty(0)), labels_ML)
