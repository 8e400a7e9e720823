"""Where rows of a one-sided exchange stand, worked out on the device: nothing here is read by the host.

S ranks (``ep x etp``, ETP innermost) exchange rows; all ETP members of an EP rank get the same ones. A
token is one row for each EP rank that holds one of its experts. Every rank counts, the counts are gathered,
and the same sums on every rank then say where each row stands::

    sender      | rows to EP rank 0 | rows to EP rank 1 | ...       in order of tokens, one range an EP rank
                0                   start_P[1]
    receiver    | rows of source 0 | rows of source 1 | ... | free  up to ``Bounds.rows``
                0                  first_S[1]         ...   first_S[S]

A row of the range for EP rank ``p`` with index ``i`` stands in row ``start_P[p] + i`` of what its sender
keeps for it, and lands in row ``base_P[p] + i`` of the receiver. What comes back takes the same way: row
``r`` of source ``s`` belongs in row ``home_S[s] + r - first_S[s]`` there.

If anything does not fit (``Bounds``), on any rank, the flag is raised on all of them, and nothing is
exchanged.

Sizes: T tokens, K choices a token, P EP ranks, S sources; C counts of a source (rows to each EP rank, (row,
expert) pairs to each, its tokens, its choices a token), or copies of a token at most, the lesser of K and P.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Bounds(NamedTuple):
    """What fits, known to the host and the same on all ranks."""

    tokens: int
    """Of a rank."""
    num_ids: int
    """Choices of a token."""
    rows: int
    """That a rank receives."""
    pairs: int
    """(Row, expert) pairs that a rank computes."""
    rows_per_source: int = 0
    """That a rank receives from each source, where every source has a range of its own; 0 where they follow
    one another."""


class Places(NamedTuple):
    """The drawing's numbers, int32."""

    base_P: Tensor
    start_P: Tensor
    first_S: Tensor
    """S + 1 of them; all zero when the flag is raised."""
    home_S: Tensor
    flag: Tensor
    """``[1]``: not 0 if something does not fit."""

    @classmethod
    def of(cls, numbers: Tensor, num_ranks: int, num_sources: int) -> Places:
        """Views of one vector."""
        return cls(*numbers.split(cls.sizes(num_ranks, num_sources)))

    @staticmethod
    def sizes(num_ranks: int, num_sources: int) -> list[int]:
        return [num_ranks, num_ranks, num_sources + 1, num_sources, 1]


class Notes(NamedTuple):
    """What is kept of plans, on the device, until it is read."""

    flag: Tensor
    """int32 ``[1]``: not 0 if something did not fit."""
    fill: Tensor
    """float32 ``[1]``: how full this rank's buffers were at most; above 1 something did not fit."""

    @classmethod
    def on(cls, device: torch.device) -> Notes:
        return cls(torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, device=device))


class Who(NamedTuple):
    """A rank among those that exchange."""

    source: int
    ep_rank: int
    num_ranks: int
    """EP ranks."""
    num_sources: int

    @property
    def num_members(self) -> int:
        return self.num_sources // self.num_ranks

    @property
    def num_counts(self) -> int:
        return 2 * self.num_ranks + 2


def even_bounds(
    tokens: int, num_ids: int, *, factor: float, share: float, top_k: int, who: Who, by_source: bool = False
) -> Bounds:
    """Bounds for ``factor`` times what an even routing brings to a rank, never more than it can bring.

    ``share`` is a token's chance to need a given EP rank."""
    factor *= 1 - 1e-12  # or 1.1 * 10 would round up to 12
    from_each = max(1, min(tokens, math.ceil(factor * share * tokens)))
    rows = from_each * who.num_sources
    if not by_source:
        rows = max(1, min(tokens * who.num_sources, math.ceil(factor * share * tokens * who.num_sources)))
    even_pairs = tokens * who.num_sources * top_k / who.num_ranks
    pairs = max(1, min(rows * num_ids, math.ceil(factor * even_pairs)))
    return Bounds(tokens, num_ids, rows, pairs, from_each if by_source else 0)


def places_of(table_SC: Tensor, bounds: Bounds, who: Who) -> Places:
    """The places of one rank's rows, from everybody's counts."""
    rows_SP, pairs_SP, sizes_S2 = table_SC.split((who.num_ranks, who.num_ranks, 2), dim=1)
    over = (sizes_S2[:, 0] > bounds.tokens).any() | (sizes_S2[:, 1] > bounds.num_ids).any()
    over |= (rows_SP.sum(0) > bounds.rows).any() | (pairs_SP.sum(0) > bounds.pairs).any()
    if bounds.rows_per_source:
        over |= (rows_SP > bounds.rows_per_source).any()
    before_SP = rows_SP.cumsum(1) - rows_SP
    first_S = torch.cat((rows_SP.new_zeros(1), rows_SP[:, who.ep_rank].cumsum(0)))
    parts = (
        rows_SP[: who.source].sum(0),
        before_SP[who.source],
        first_S.masked_fill(over, 0),
        before_SP[:, who.ep_rank],
        over.view(1),
    )
    numbers = torch.cat([part.int() for part in parts])
    return Places.of(numbers, who.num_ranks, who.num_sources)


def take_notes(
    notes: Notes, table_SC: Tensor, places: Places, bounds: Bounds, who: Who, raises: bool
) -> None:
    """Keep how full this rank's buffers are, the fuller of rows and pairs, and the flag if it ``raises``
    one."""
    received = table_SC[:, who.ep_rank].sum() / bounds.rows
    computed = table_SC[:, who.num_ranks + who.ep_rank].sum() / bounds.pairs
    notes.fill.copy_(torch.maximum(notes.fill, torch.maximum(received, computed)))
    if raises:
        notes.flag.copy_(torch.maximum(notes.flag, places.flag))
