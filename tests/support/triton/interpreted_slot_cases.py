"""The kernels that bring clones of experts into slots and their gradients home, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.kernels.triton import exchange_clones, exchange_kernels
from fsdmoe.kernels.triton.exchange_clones import add_clones, copy_slots, push_clones
from fsdmoe.kernels.triton.exchange_kernels import Barrier, gather_loads
from tests.support.triton.long_exchange_cases import aligned, peers_of

pytestmark = pytest.mark.usefixtures("poisoned")
P, E, S, BLOCKS = 3, 6, 2, 3
PLANS = {
    "one expert to all others, twice to one": [[4, 6], [4, 4], [0, 6]],
    "every slot": [[2, 5], [0, 1], [1, 2]],
    "nothing": [[6, 6]] * 3,
}
HERE, MISSING = (torch.tensor([number], dtype=torch.int32) for number in (0, 2))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_clones, "_UNITS", 16)  # several of each expert
    monkeypatch.setattr(exchange_clones, "_SUMS", 16)


def _slots(areas: list[Tensor], rank: int, like: Tensor) -> Tensor:
    num_bytes = S * like[0].nbytes
    return areas[rank][:num_bytes].view(like.dtype).view(S, *like.shape[1:])


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("shape", "dtype"), [((12, 8), torch.float32), ((7,), torch.float16)], ids=str)
def test_weights_of_clones_reach_their_slots_and_nothing_else_is_written(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    experts_PS = torch.tensor(PLANS[name], dtype=torch.int32)
    weights_E = torch.randn(E, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    areas = aligned(S * weights_E[0].nbytes, P)
    for area in areas:
        area.fill_(1)
    untouched = _slots(areas, 0, weights_E)[0].clone()
    for rank in range(P):
        own = weights_E[rank * E // P : (rank + 1) * E // P]
        push_clones(own, experts_PS, peers_of(areas, rank), rank, BLOCKS)
    for rank, taken in enumerate(PLANS[name]):
        for fills in (False, True):
            out = torch.full((S, *shape), 7.0, dtype=dtype)
            copy_slots(areas[rank], out, experts_PS[rank], E, HERE, fills=fills)
            for slot, expert in enumerate(taken):
                free = torch.zeros_like(out[slot]) if fills else torch.full_like(out[slot], 7.0)
                assert torch.equal(out[slot], free if expert == E else weights_E[expert])
                if expert == E:
                    assert torch.equal(_slots(areas, rank, weights_E)[slot], untouched)
        lost = torch.zeros(S, *shape, dtype=dtype)
        copy_slots(areas[rank], lost, experts_PS[rank], E, MISSING)
        assert lost.isnan().flatten(1).all(1).tolist() == [expert < E for expert in taken]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_clones_are_added_where_their_experts_are(name: str, dtype: torch.dtype) -> None:
    experts_PS = torch.tensor(PLANS[name], dtype=torch.int32)
    random = torch.Generator().manual_seed(1)
    gradients = torch.randn(P, S, 5, 9, generator=random)
    totals = torch.randn(E, 5, 9, generator=random).to(dtype)
    areas = aligned(gradients[0].nbytes, P)
    for rank in range(P):
        areas[rank].fill_(255)  # NaN, where nothing is copied
        copy_slots(gradients[rank], areas[rank], experts_PS[rank], E, HERE)
    for missing in (HERE, MISSING):
        for rank in range(P):
            mine = range(rank * E // P, (rank + 1) * E // P)
            total = totals[mine.start : mine.stop].clone()
            add_clones(total, experts_PS, peers_of(areas, rank), missing, rank, BLOCKS)
            for expert in mine:
                wanted = totals[expert].float()
                for clone in gradients[experts_PS == expert]:
                    wanted = wanted + clone
                if int(missing) and (experts_PS == expert).any():
                    wanted = torch.full_like(wanted, torch.nan)
                found = total[expert - mine.start]
                torch.testing.assert_close(found, wanted.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_every_rank_finds_the_rows_of_all_for_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_kernels, "globaltimer", lambda: 0)
    counts_PE = torch.randint(0, 9, (P, E), generator=torch.Generator().manual_seed(2)).int()
    tables = [torch.full((2 * P * E + 10,), -1, dtype=torch.int32) for _ in range(P)]  # of a larger layer
    addresses = torch.tensor([table.data_ptr() for table in tables])
    pads = [torch.full((P,), 100, dtype=torch.int32) for _ in range(P)]  # nobody waits
    pad_addresses = torch.tensor([pad.data_ptr() for pad in pads])
    for _ in range(2):  # in the second round all counts are there
        for rank in range(P):
            found_PE = torch.empty(P, E, dtype=torch.int32)
            number = torch.tensor([6], dtype=torch.int32)
            barrier = Barrier(pad_addresses, pads[rank], number, torch.zeros_like(number), rank, P, 10)
            gather_loads(counts_PE[rank].cumsum(0).int(), addresses, tables[rank], barrier, found_PE)
            pads[rank].fill_(100)
            assert number.item() == 7
    assert torch.equal(found_PE, counts_PE)
    for table in tables:
        assert (table[: P * E + 5] == -1).all(), "the half of even numbers"
