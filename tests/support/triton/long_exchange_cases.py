"""The kernels of one-sided exchanges in Triton's interpreter: all ranks in one process, one by one."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.exchange_plan import (
    Bounds,
    Notes,
    Places,
    Who,
    even_bounds,
    places_of,
    take_notes,
)
from fsdmoe.kernels.send_order import index_rows
from fsdmoe.kernels.triton import exchange_kernels, exchange_rows
from fsdmoe.kernels.triton.exchange_kernels import Barrier, gather_counts, index_rows_triton
from fsdmoe.kernels.triton.exchange_rows import (
    Peers,
    deliver_rows,
    land_labels,
    land_rows,
    return_rows,
    sum_returned,
)

pytestmark = pytest.mark.usefixtures("poisoned")
NUM_EXPERTS, K, BLOCKS = 8, 3, 3
NONE = torch.zeros(1, dtype=torch.int32)
"""No rank is missing."""


class World(NamedTuple):
    """What all ranks bring; rank 1 has no tokens."""

    whos: list[Who]
    ids: list[Tensor]
    per_rank: int
    bounds: Bounds

    @classmethod
    def draw(cls, num_ranks: int, num_members: int, factor: float = 8.0) -> World:
        random, num_sources = torch.Generator().manual_seed(0), num_ranks * num_members
        whos = [Who(source, source // num_members, num_ranks, num_sources) for source in range(num_sources)]
        ids = []
        for source in range(num_sources):
            num_tokens = 0 if source == 1 else 3 + source
            table = torch.rand(num_tokens, NUM_EXPERTS, generator=random).argsort(1)[:, :K]
            ids.append(table.masked_fill(torch.rand(table.shape, generator=random) < 0.3, -1))
        bounds = even_bounds(8, K, factor=factor, share=0.7, top_k=K, who=whos[0])
        return cls(whos, ids, NUM_EXPERTS // num_ranks, bounds)

    def indexed(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        found = [index_rows_triton(ids, self.whos[0].num_ranks, self.per_rank) for ids in self.ids]
        indices, routes, counts = zip(*found, strict=True)
        return list(indices), list(routes), torch.stack(counts)


def aligned(num_bytes: int, num_sources: int) -> list[Tensor]:
    """Areas as of shared memory."""
    spare = [torch.zeros(-(-num_bytes // 256) * 256 + 16, dtype=torch.uint8) for _ in range(num_sources)]
    return [area[-area.data_ptr() % 16 :][: -(-num_bytes // 256) * 256] for area in spare]


def peers_of(areas: list[Tensor], rank: int) -> Peers:
    addresses = torch.tensor([area.data_ptr() for area in areas])
    return Peers(areas[rank], (addresses - addresses[rank]) // 16)


LAYOUTS = [(4, 1), (2, 2), (1, 4)]


@pytest.mark.parametrize(("num_ranks", "num_members"), LAYOUTS)
def test_rows_are_indexed_as_the_reference_does(num_ranks: int, num_members: int) -> None:
    world = World.draw(num_ranks, num_members)
    for ids, index_TP, routes_TC2, counts_C in zip(world.ids, *world.indexed(), strict=True):
        with kernels("torch"):
            wanted = index_rows(ids, num_ranks, world.per_rank)
        assert torch.equal(index_TP, wanted[0])
        assert torch.equal(counts_C, wanted[2])
        assert torch.equal(routes_TC2, wanted[1])


@pytest.mark.parametrize("factor", [8.0, 0.3])
@pytest.mark.parametrize(("num_ranks", "num_members"), LAYOUTS)
def test_places_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_members: int, factor: float
) -> None:
    monkeypatch.setattr(exchange_kernels, "globaltimer", lambda: 0)
    world = World.draw(num_ranks, num_members, factor)
    counts_SC = world.indexed()[2]
    num_sources = len(world.whos)
    tables = [torch.zeros(2, *counts_SC.shape, dtype=torch.int32) for _ in world.whos]
    # Signals have come already: nobody waits for ranks that run later.
    pads = [torch.full((num_sources,), 100, dtype=torch.int32) for _ in world.whos]
    found: list[tuple[Places, Notes]] = []
    for _ in range(2):  # in the second round all counts are there
        found.clear()
        for who, counts_C in zip(world.whos, counts_SC, strict=True):
            number, missing = torch.tensor([6], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
            pad_addresses = torch.tensor([pad.data_ptr() for pad in pads])
            barrier = Barrier(pad_addresses, pads[who.source], number, missing, who.source, num_sources, 10)
            addresses = torch.tensor([table.data_ptr() for table in tables])
            notes = Notes.on(torch.device("cpu"))
            places = gather_counts(
                counts_C, addresses, tables[who.source], barrier, notes, world.bounds, who, True
            )
            pads[who.source].fill_(100)
            assert number.item() == 7
            assert all(pad[who.source] == 7 or i <= who.source for i, pad in enumerate(pads))
            found.append((places, notes))
    for who, (places, notes) in zip(world.whos, found, strict=True):
        wanted, other = places_of(counts_SC, world.bounds, who), Notes.on(torch.device("cpu"))
        take_notes(other, counts_SC, wanted, world.bounds, who, True)
        for name, one, reference in zip(Places._fields, places, wanted, strict=True):
            assert torch.equal(one, reference), name
        assert torch.equal(notes.flag, other.flag)
        assert int(notes.flag) == (factor < 1)
        torch.testing.assert_close(notes.fill, other.fill)


@pytest.mark.parametrize(
    ("width", "dtype", "factor"),
    [(20, torch.float32, 8.0), (6, torch.float16, 8.0), (16, torch.float32, 0.3)],
)
@pytest.mark.parametrize(("num_ranks", "num_members"), LAYOUTS)
def test_rows_reach_all_that_need_them_and_their_results_come_home(
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    num_members: int,
    width: int,
    dtype: torch.dtype,
    factor: float,
) -> None:
    monkeypatch.setattr(exchange_rows, "_MAX_COLUMNS", 8)  # wide rows are moved in pieces,
    monkeypatch.setattr(exchange_rows, "_UNITS", 8)  # and a block has several
    world = World.draw(num_ranks, num_members, factor)
    whos, bounds, num_sources = world.whos, world.bounds, len(world.whos)
    indices, routes, counts_SC = world.indexed()
    places = [places_of(counts_SC, bounds, who) for who in whos]
    random = torch.Generator().manual_seed(1)
    x = [torch.randn(len(ids), width, generator=random).to(dtype) for ids in world.ids]
    weights = [torch.rand(len(ids), K, generator=random) for ids in world.ids]
    row_bytes, num_kept = width * dtype.itemsize, bounds.tokens * min(K, num_ranks)
    rows, labels = aligned(bounds.rows * row_bytes, num_sources), aligned(bounds.rows * 8 * K, num_sources)
    returned = aligned(num_members * num_kept * row_bytes, num_sources)
    gradients = aligned(num_members * num_kept * 4 * K, num_sources)
    for r, who in enumerate(whos):
        sent = torch.cat((weights[r].view(torch.int32), world.ids[r].int()), 1)
        to = peers_of(rows, r), peers_of(labels, r)
        deliver_rows(x[r], sent, routes[r], places[r], *to, who, BLOCKS)
    for r, who in enumerate(whos):
        landed = torch.empty(bounds.rows, width, dtype=dtype)
        landed_labels = torch.empty(bounds.rows, 2 * K, dtype=torch.int32)
        first = who.ep_rank * world.per_rank
        land_rows(rows[r], landed, places[r], NONE)
        land_labels(labels[r], landed_labels, places[r], NONE, first, world.per_rank)
        check_landed(world, r, landed, landed_labels, x if factor > 1 else [])
        to = peers_of(returned, r), peers_of(gradients, r)
        own_weights = torch.full((bounds.rows, K), float(r + 1))
        return_rows(landed * (r + 1), own_weights, places[r], *to, num_kept * (r % num_members), who, BLOCKS)
    for r, who in enumerate(whos):
        summed, summed_weights = torch.empty_like(x[r]), torch.empty_like(weights[r])
        sum_returned(returned[r], summed, routes[r], places[r], NONE, num_kept, who)
        sum_returned(gradients[r], summed_weights, routes[r], places[r], NONE, num_kept, who)
        if factor < 1:
            assert summed.isnan().all()
            continue
        share_TP = torch.tensor(
            [sum(range(p * num_members + 1, (p + 1) * num_members + 1)) for p in range(num_ranks)]
        )
        factors_T1 = ((indices[r] >= 0) * share_TP).sum(1, keepdim=True).float()
        torch.testing.assert_close(summed.float(), x[r].float() * factors_T1, rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(summed_weights, factors_T1.expand(-1, K))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_nothing_that_is_read_without_a_missing_rank_is_a_number(dtype: torch.dtype) -> None:
    who, numbers = Who(0, 0, 2, 2), torch.zeros(sum(Places.sizes(2, 2)), dtype=torch.int32)
    places = Places.of(numbers, 2, 2)
    places.first_S[1:] = 3
    missing, buffer = torch.tensor([2], dtype=torch.int32), torch.zeros(256, dtype=torch.uint8)
    landed = torch.zeros(5, 6, dtype=dtype)  # of eight bits, no row is a whole number of words
    land_rows(buffer, landed.view(torch.uint8) if dtype.itemsize == 1 else landed, places, missing)
    assert landed[:3].float().isnan().all()
    assert not landed[3:].float().any()
    labels = torch.zeros(5, 4, dtype=torch.int32)
    land_labels(buffer - 1, labels, places, missing, 4, 4)
    assert labels[:, 2:].tolist() == [[0, 0]] * 3 + [[-1, -1]] * 2, "rows that no expert takes are not seen"
    summed, routes_TC2 = torch.zeros(2, 8), torch.zeros(2, 1, 2, dtype=torch.int32)
    sum_returned(buffer, summed, routes_TC2, places, missing, 4, who)
    assert summed.isnan().all()


def check_landed(world: World, rank: int, landed: Tensor, labels: Tensor, x: list[Tensor]) -> None:
    """Rows in order of source and token, own ids, and nothing else; nothing at all of no ``x``."""
    first, wanted = world.whos[rank].ep_rank * world.per_rank, []
    for source, ids in enumerate(world.ids[: len(x)]):
        for token, choices in enumerate(ids - first):
            own = torch.where((choices >= 0) & (choices < world.per_rank), choices, -1)
            if (own >= 0).any():
                wanted.append((x[source][token], own.int()))
    for number, (row, own) in enumerate(wanted):
        assert torch.equal(landed[number], row)
        assert torch.equal(labels[number, K:], own)
    assert not landed[len(wanted) :].any()
    assert (labels[len(wanted) :, K:] == -1).all()
