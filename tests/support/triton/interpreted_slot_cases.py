"""The kernels that bring clones of experts into slots and their gradients home, in Triton's interpreter."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdmoe.experts.dispatch.base import Links
from fsdmoe.experts.dispatch.flex_peer import Area, WrittenTransport
from fsdmoe.experts.dispatch.flex_transport import Transport
from fsdmoe.kernels.clone_plan import ClonePlan
from fsdmoe.kernels.triton import exchange_clones, exchange_kernels, exchange_rows
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


class _Own:
    """Shared memory of a rank that is alone."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.areas = {}
        for name, size in sizes.items():
            (own,) = aligned(max(size, 1), 1)
            addresses = torch.tensor([own.data_ptr()])
            self.areas[name] = Area(own[:size], addresses, torch.zeros_like(addresses))


class _Alone(WrittenTransport):
    """The written transport of one rank, whose clones are its own, without streams."""

    def __init__(self) -> None:
        Transport.__init__(self, Links.alone(), torch.device("cpu"))
        self._kernels, self._rows, self._clones = exchange_kernels, exchange_rows, exchange_clones
        pad, number, missing = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
        self._barrier = Barrier(torch.tensor([pad.data_ptr()]), pad, number, missing, 0, 1, 10)
        self._blocks = BLOCKS
        self._device = torch.device("cpu")
        self._stream = mock.Mock()
        self._read = set()
        self._memory = self._share(dict.fromkeys(("loads", "clones", "grads"), 0))

    def _share(self, sizes: dict[str, int]) -> Any:
        return _Own(sizes)

    def _beside(self) -> Any:
        return contextlib.nullcontext()

    def settle(self) -> None:
        pass


def test_the_written_transport_brings_clones_to_their_slots_and_gradients_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_kernels, "globaltimer", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock)
    alone = _Alone()
    counts = torch.tensor([3, 0, 4], dtype=torch.int32)
    plan = ClonePlan(torch.tensor([[1, 3]], dtype=torch.int32), counts.new_zeros(5), counts.new_zeros(5))
    assert plan.num_experts == 3
    random = torch.Generator().manual_seed(1)
    for _ in range(2):  # areas are used again
        assert alone.gather_loads(counts.cumsum(0).int()).tolist() == [[3, 0, 4]]
        weights = [torch.randn(3, *shape, generator=random) for shape in ((6, 4), (4, 3), (6,))]
        landed = [wait() for wait in alone.send_clones(plan, weights)]
        for weight, slots in zip(weights, landed, strict=True):
            assert torch.equal(slots[0], weight[1])
        assert not landed[2][1].any(), "of a free slot the bias is zero"
        gradients = [torch.randn(2, *each.shape[1:], generator=random) for each in weights]
        totals = [torch.zeros_like(weights[0]), None, torch.ones_like(weights[2])]
        alone.add_clones(plan, gradients, totals)
        for total, gradient in ((totals[0], gradients[0]), (totals[2], gradients[2] + 1)):
            assert total is not None
            assert torch.equal(total[1], gradient[0])
        assert not totals[0][[0, 2]].any()
        assert (totals[2][[0, 2]] == 1).all()
    # Of each round: counts, weights, gradients; an area is not written before all have read it.
    assert int(alone._barrier.number) == 2 * 3
    alone.send_clones(plan, weights)
    alone.send_clones(plan, weights)
    assert int(alone._barrier.number) == 2 * 3 + 1 + 2
