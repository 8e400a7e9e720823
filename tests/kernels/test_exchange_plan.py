"""The plan of a one-sided exchange: every row has one place, on every rank, or none has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.kernels.exchange_plan import Bounds, Who, even_bounds, places_of
from fsdmoe.kernels.send_order import index_rows

NUM_EXPERTS, K = 8, 3


def _tables(num_sources: int) -> list[Tensor]:
    """Ids of each source; source 1 has no tokens, some choices are none."""
    random = torch.Generator().manual_seed(0)
    found = []
    for source in range(num_sources):
        num_tokens = 0 if source == 1 else 3 + 2 * source
        ids = torch.rand(num_tokens, NUM_EXPERTS, generator=random).argsort(1)[:, :K]
        found.append(ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.3, -1))
    return found


def _whos(num_ranks: int, num_members: int) -> list[Who]:
    num_sources = num_ranks * num_members
    return [Who(source, source // num_members, num_ranks, num_sources) for source in range(num_sources)]


@pytest.mark.parametrize(("num_ranks", "num_members"), [(4, 1), (2, 2), (1, 4)])
def test_rows_of_all_sources_fill_each_receiver_without_gaps_and_find_their_way_home(
    num_ranks: int, num_members: int
) -> None:
    whos, tables = _whos(num_ranks, num_members), _tables(num_ranks * num_members)
    per_rank = NUM_EXPERTS // num_ranks
    indexed = [index_rows(ids, num_ranks, per_rank) for ids in tables]
    counts_SC = torch.stack([counts for *_, counts in indexed])
    bounds = Bounds(tokens=20, num_ids=K, rows=100, pairs=300)
    places = [places_of(counts_SC, bounds, who) for who in whos]
    assert not any(int(each.flag) for each in places)
    for receiver in whos:
        landed = {}
        for sender in whos:
            for token, choices in enumerate(tables[sender.source].tolist()):
                index = int(indexed[sender.source][0][token, receiver.ep_rank])
                assert (index >= 0) == any(e >= 0 and e // per_rank == receiver.ep_rank for e in choices)
                if index >= 0:
                    row = int(places[sender.source].base_P[receiver.ep_rank]) + index
                    assert row not in landed
                    assert [receiver.ep_rank, index] in indexed[sender.source][1][token].tolist()
                    landed[row] = (
                        sender.source,
                        int(places[sender.source].start_P[receiver.ep_rank]) + index,
                    )
        mine = places[receiver.source]
        assert sorted(landed) == list(range(int(mine.first_S[-1])))
        for row, (source, kept) in landed.items():
            assert mine.first_S[source] <= row < mine.first_S[source + 1]
            assert int(mine.home_S[source]) + row - int(mine.first_S[source]) == kept


@pytest.mark.parametrize("short", ["tokens", "num_ids", "rows", "pairs", "rows_per_source"])
def test_whatever_is_short_raises_the_flag_on_every_rank(short: str) -> None:
    whos, tables = _whos(4, 1), _tables(4)
    counts_SC = torch.stack([index_rows(ids, 4, 2)[2] for ids in tables])
    bounds = Bounds(tokens=9, num_ids=K, rows=50, pairs=99, rows_per_source=9)
    assert not any(int(places_of(counts_SC, bounds, who).flag) for who in whos)
    bounds = bounds._replace(**{short: 2})
    for who in whos:
        places = places_of(counts_SC, bounds, who)
        assert int(places.flag)
        assert not places.first_S.any(), "nobody receives anything"


def test_bounds_are_a_multiple_of_an_even_share_and_never_more_than_can_come() -> None:
    who = Who(0, 0, 4, 4)
    even = even_bounds(1000, 8, factor=1.5, share=0.2, top_k=8, who=who)
    assert even == Bounds(tokens=1000, num_ids=8, rows=1200, pairs=12000 - 2400)
    assert even_bounds(1000, 8, factor=9.0, share=0.2, top_k=8, who=who).rows == 4000
    by_source = even_bounds(1000, 8, factor=1.5, share=0.2, top_k=1, who=who, by_source=True)
    assert (by_source.rows, by_source.rows_per_source, by_source.pairs) == (1200, 300, 1500)
    assert min(even_bounds(0, 8, factor=1.5, share=0.2, top_k=8, who=who)[2:4]) >= 1
