"""Packs the documents of a step into micro-batches and picks a context-parallel size for each.

Attention costs the square of a document's length, memory only its length, so no packing by tokens alone is
balanced, and a size that suits the longest document wastes time on all others. Longest first: a slot is
opened by the longest document left. Several durations are tried for it (that document on 1, 2, 4, … ranks;
and as long as memory allows). For each, the other documents join in falling order: on ranks of their own, as
few as memory and the duration permit, while there are free ones, then with the micro-batch that ends
earliest. The slot that wastes least is kept. Slots are ordered small, large, small, and micro-batches change
places inside their slots so that every rank gets the same attention work in the step; where that does not
suffice, planning starts over with a price on uneven slots.

A pure function of the lengths: every rank (or a data loader ahead of the step) computes the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdmoe.context_parallel.cost import CostModel
from fsdmoe.context_parallel.step_plan import MicroBatch, StepPlan, imbalance
from fsdmoe.core.errors import ConfigError

_ROUNDING = 1 + 1e-9
_PASSES = 8
"""How often micro-batches may change places."""
_PRICES = (0.5, 1.0, 2.0, 4.0)
"""Of unevenness, tried in turn: the gain in time that makes up for one mean rank's work left uneven."""


def group_sizes(num_ranks: int) -> tuple[int, ...]:
    """Every power of two that divides the ranks: the sizes whose aligned groups cover them all."""
    return tuple(1 << n for n in range(num_ranks.bit_length()) if num_ranks % (1 << n) == 0)


def check_fits(length: int, size: int, max_tokens: int) -> None:
    """Refuse a document that even the most ranks that may share one (``size``) cannot hold."""
    if length > size * max_tokens:
        raise ConfigError(
            f"context_parallel.max_tokens: a document of {length} tokens does not fit {size} ranks of "
            f"{max_tokens}; choose at least {-(-length // size)}, more ranks, or shorter documents "
            "(data.seq_len)"
        )


def plan_step(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    sizes: Sequence[int],
    max_tokens: int,
    cost: CostModel,
    max_imbalance: float = 0.05,
) -> StepPlan:
    """Pack documents for ``num_ranks`` ranks into micro-batches of at most ``max_tokens`` tokens a rank.

    ``sizes``: the context-parallel sizes to choose from: :func:`group_sizes` of the ranks that share one copy
    of the weights, or a single one (static context parallelism, as well packed as that can be).
    ``max_imbalance`` of the ranks' attention work is kept where the documents allow it; where they do not,
    the fastest plan is returned.
    """
    sizes = tuple(sorted(sizes))
    _check(lengths, num_ranks, sizes, max_tokens)
    tables = _Tables(lengths, num_ranks, sizes, max_tokens, cost)
    plans = []
    for price in _PRICES:
        plan = _plan(tables, price)
        if imbalance(plan.work_of_ranks()) <= max_imbalance:
            return plan
        plans.append(plan)
    return min(plans, key=lambda plan: plan.seconds(cost))


def _plan(tables: _Tables, price: float) -> StepPlan:
    lengths = tables.lengths.tolist()
    left = sorted(range(len(lengths)), key=lambda d: (-lengths[d], d))
    slots: list[list[_Group]] = []
    while left:
        slot = _best_slot(tables, left, price)
        taken = {document for group in slot for document in group.documents}
        left = [document for document in left if document not in taken]
        slots.append(slot)
    order = small_large_small([max(group.seconds for group in slot) for slot in slots])
    placed = _place([slots[i] for i in order], tables.num_ranks)
    return StepPlan(placed, tuple(lengths), tables.num_ranks)


def small_large_small(costs: Sequence[float]) -> list[int]:
    """An order that rises to the largest and falls again, so that neighbours are alike."""
    rising = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    return rising[0::2] + rising[1::2][::-1]


def _check(lengths: Sequence[int], num_ranks: int, sizes: tuple[int, ...], max_tokens: int) -> None:
    # Each size must divide the next, or aligned groups of different sizes would not tile the ranks.
    tiles = bool(sizes) and sizes[0] >= 1 and not any(b % a for a, b in zip(sizes, (*sizes[1:], num_ranks)))
    if not tiles:
        raise ConfigError(
            f"mesh.cp: expected context-parallel sizes that divide each other and {num_ranks} ranks, got "
            f"{list(sizes)}; choose from {', '.join(map(str, group_sizes(num_ranks)))}"
        )
    if min(lengths, default=0) < 1:
        raise ConfigError(
            "data: expected at least one document and none without tokens; drop empty documents"
        )
    check_fits(max(lengths), sizes[-1], max_tokens)


class _Tables:
    """Everything about single documents, computed once. Sizes are given as indices into ``sizes``."""

    def __init__(
        self, lengths: Sequence[int], num_ranks: int, sizes: tuple[int, ...], max_tokens: int, cost: CostModel
    ) -> None:
        self.lengths, self.sizes = np.asarray(lengths), np.asarray(sizes)
        self.num_ranks, self.max_tokens, self.cost = num_ranks, max_tokens, cost
        known = {length: [cost.attention_seconds(length, size) for size in sizes] for length in set(lengths)}
        self.attention = np.array([known[length] for length in lengths])
        """Seconds per document and size."""
        self.alone = cost.micro_batch_seconds(self.attention, self.lengths[:, None], self.sizes)
        """Seconds of a micro-batch of just that document."""
        self.smallest = (self.sizes * max_tokens < self.lengths[:, None]).sum(1)
        """The fewest ranks that can hold the document."""
        attention = np.take_along_axis(self.attention, self.smallest[:, None], 1)[:, 0]
        self.worth = attention * self.sizes[self.smallest] + self.lengths * cost.rest_per_token
        """Rank-seconds of the document when it is split no more than it must."""
        self.pairs = self.lengths * (self.lengths + 1) / 2
        """Attention work of the document."""

    def place_for(self, document: int, duration: float) -> int:
        """The fewest ranks that hold the document and finish in time, or the most there are."""
        for place in range(self.smallest[document], len(self.sizes)):
            if self.alone[document, place] <= duration * _ROUNDING:
                return place
        return len(self.sizes) - 1


@dataclass
class _Group:
    """A micro-batch that has no ranks yet."""

    size: int
    documents: list[int]
    seconds: float
    work: float
    """Query-key pairs of each of its ranks."""


def _best_slot(tables: _Tables, left: list[int], price: float) -> list[_Group]:
    """The slot, opened by the longest document left, that wastes the least of its ranks' time."""
    longest = left[0]
    mean_work = float(tables.pairs.sum()) / tables.num_ranks
    best: list[_Group] = []
    best_value = -1.0
    for duration in (math.inf, *tables.alone[longest, tables.smallest[longest] :]):
        slot = _Slot(tables, float(duration))
        slot.fill(left)
        groups = slot.groups()
        worth = sum(float(tables.worth[group.documents].sum()) for group in groups)
        uneven = (max(group.work for group in groups) - min(group.work for group in groups)) / mean_work
        value = worth / max(group.seconds for group in groups) / (1 + price * uneven)
        if value > best_value:
            best, best_value = groups, value
    return best


class _Slot:
    """A slot that is being filled for a given duration."""

    def __init__(self, tables: _Tables, duration: float) -> None:
        self.tables, self.duration = tables, duration
        self.free = tables.num_ranks
        most = tables.num_ranks // int(tables.sizes[0])
        self.documents: list[list[int]] = []
        self.place, self.tokens = np.zeros(most, np.int64), np.zeros(most, np.int64)
        self.attention = np.zeros(most)

    def fill(self, left: list[int]) -> None:
        """Take what fits of ``left`` (falling lengths)."""
        i = 0
        while i < len(left):
            if self._add(left[i]):
                i += 1
                continue
            # What is too long for the slot as it stands says nothing about shorter ones, but a shorter one
            # fits whenever a longer one does: look for the first that fits by halving.
            low, high = i + 1, len(left)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._can_add(left[middle]) else (middle + 1, high)
            i = low

    def groups(self) -> list[_Group]:
        """What was filled, and idle groups for the ranks that are left."""
        n, tables = len(self.documents), self.tables
        sizes = tables.sizes[self.place[:n]]
        seconds = tables.cost.micro_batch_seconds(self.attention[:n], self.tokens[:n], sizes)
        work = [float(tables.pairs[documents].sum()) for documents in self.documents] / sizes
        filled = [
            _Group(int(sizes[i]), self.documents[i], float(seconds[i]), float(work[i])) for i in range(n)
        ]
        smallest = int(tables.sizes[0])
        return filled + [_Group(smallest, [], tables.cost.fixed, 0.0) for _ in range(self.free // smallest)]

    def _can_add(self, document: int) -> bool:
        return self._opens(document) is not None or self._joins(document) is not None

    def _add(self, document: int) -> bool:
        place, group = self._opens(document), len(self.documents)
        if place is not None:
            self.documents.append([])
            self.place[group] = place
            self.free -= int(self.tables.sizes[place])
        else:
            joined = self._joins(document)
            if joined is None:
                return False
            group = joined
        self.documents[group].append(document)
        self.tokens[group] += self.tables.lengths[document]
        self.attention[group] += self.tables.attention[document, self.place[group]]
        return True

    def _opens(self, document: int) -> int | None:
        """The size on which the document would get ranks of its own, if there are free ones."""
        place = self.tables.place_for(document, self.duration)
        return place if self.tables.sizes[place] <= self.free else None

    def _joins(self, document: int) -> int | None:
        """The micro-batch that would end earliest with the document, if any has the space and time for it."""
        n, tables = len(self.documents), self.tables
        sizes = tables.sizes[self.place[:n]]
        tokens = self.tokens[:n] + tables.lengths[document]
        attention = self.attention[:n] + tables.attention[document][self.place[:n]]
        seconds = tables.cost.micro_batch_seconds(attention, tokens, sizes)
        fits = (tokens <= sizes * tables.max_tokens) & (seconds <= self.duration * _ROUNDING)
        if not fits.any():
            return None
        return int(np.argmin(np.where(fits, seconds, np.inf)))


def _place(slots: list[list[_Group]], num_ranks: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Give every group its ranks: heavy attention goes where the other slots bring little.

    Heaviest slots first; then slots are placed again, one at a time against all others, while that helps.
    """
    work_SR = np.zeros((len(slots), num_ranks))
    placed: list[tuple[MicroBatch, ...]] = [()] * len(slots)
    heavy_first = sorted(range(len(slots)), key=lambda i: -max(group.work for group in slots[i]))
    best, spread = list(placed), math.inf
    for _ in range(_PASSES):
        for number in heavy_first:
            work_SR[number] = 0
            placed[number], work_SR[number] = _place_slot(slots[number], work_SR.sum(0))
        found = float(np.ptp(work_SR.sum(0)))
        if found >= spread:
            break
        best, spread = list(placed), found
    return tuple(best)


def _place_slot(slot: list[_Group], others_R: np.ndarray) -> tuple[tuple[MicroBatch, ...], np.ndarray]:
    """Micro-batches by first rank, and the work they bring to each rank, given that of the other slots."""
    free, work_R = np.ones(len(others_R), bool), np.zeros(len(others_R))
    micro_batches = []
    # Large groups first, so that small ones never break up aligned ranks; then by work.
    for group in sorted(slot, key=lambda g: (-g.size, -g.work)):
        is_open = free.reshape(-1, group.size).all(1)
        load = np.where(is_open, others_R.reshape(-1, group.size).sum(1), np.inf)
        mb = MicroBatch(tuple(group.documents), group.size, int(np.argmin(load)) * group.size)
        free[mb.ranks], work_R[mb.ranks] = False, group.work
        micro_batches.append(mb)
    return tuple(sorted(micro_batches, key=lambda mb: mb.first_rank)), work_R
