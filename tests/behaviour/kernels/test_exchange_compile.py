"""The kernels of one-sided exchanges compile for GPUs that are not here, and write 16 bytes at a time."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.exchange_plan import Bounds, Notes, Who

pytest.importorskip("triton")
from fsdmoe.kernels.triton import clone_plan_kernel as clones
from fsdmoe.kernels.triton import exchange_clones as slots
from fsdmoe.kernels.triton import exchange_kernels as plan
from fsdmoe.kernels.triton import exchange_rows as rows
from tests.support.triton.compile_launches import compiling

S, T, K, D, R = 4, 32, 8, 2048, 64


@pytest.mark.parametrize("architecture", [90, pytest.param(100, marks=pytest.mark.full)])
def test_every_kernel_compiles_and_rows_leave_in_16_bytes_at_a_time(architecture: int) -> None:
    who, addresses = Who(1, 0, S, S), torch.zeros(S, dtype=torch.int64)
    pad, one = torch.zeros(S, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    buffer = torch.zeros(1 << 12, dtype=torch.uint8)
    peers = rows.Peers(buffer, addresses)
    with compiling(architecture) as compiled:
        _, routes_TC2, counts_C = plan.index_rows_triton(torch.zeros(T, K, dtype=torch.int64), S, 4)
        barrier = plan.Barrier(addresses, pad, one, one, 1, S, 10**9)
        plan.wait_for_all(barrier)
        notes, bounds = Notes.on(torch.device("cpu")), Bounds(T, K, R, R * K)
        places = plan.gather_counts(counts_C, addresses, pad, barrier, notes, bounds, who, True)
        x, labels = torch.zeros(T, D, dtype=torch.bfloat16), torch.zeros(T, 2 * K, dtype=torch.int32)
        rows.deliver_rows(x, labels, routes_TC2, places, peers, peers, who, 16)
        rows.land_rows(buffer, torch.zeros(R, D, dtype=torch.bfloat16), places, one)
        rows.land_rows(buffer, torch.zeros(R, D + 2, dtype=torch.uint8), places, one)
        rows.land_labels(buffer, torch.zeros(R, 2 * K, dtype=torch.int32), places, one, 0, 4)
        y, weights = torch.zeros(R, D, dtype=torch.bfloat16), torch.zeros(R, K)
        rows.return_rows(y, weights, places, peers, peers, 0, who, 16)
        rows.sum_returned(buffer, torch.zeros(T, D, dtype=torch.bfloat16), routes_TC2, places, one, 10, who)
        few = plan.index_rows_triton(torch.zeros(T, K, dtype=torch.int64), 2 * K, 4)[1]
        rows.deliver_rows(x.view(torch.uint8)[:, : D + 2], None, few, places, peers, peers, who, 16)
    assert len(compiled) == 11
    writing = [kernel for name, kernel in compiled.items() if name.startswith(("_deliver", "_return"))]
    assert len(writing) == 3
    for kernel in writing[:2]:
        assert "ld.global.v4" in kernel.asm["ptx"]
        assert "st.global.v4" in kernel.asm["ptx"]


@pytest.mark.parametrize("architecture", [90, pytest.param(100, marks=pytest.mark.full)])
def test_clones_travel_in_16_bytes_at_a_time(architecture: int) -> None:
    num_experts, num_slots = 16, 2
    addresses = torch.zeros(S, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int32)
    peers = rows.Peers(torch.zeros(1 << 12, dtype=torch.uint8), addresses)
    experts_PS = torch.zeros(S, num_slots, dtype=torch.int32)
    weight, bias = (torch.zeros(num_experts // S, *each, dtype=torch.bfloat16) for each in ((256, D), (D,)))
    gradient = torch.zeros(num_slots, 256, D)
    with compiling(architecture) as compiled:
        barrier = plan.Barrier(addresses, one.repeat(S), one, one, 1, S, 10**9)
        plan.gather_loads(
            experts_PS.new_zeros(16), addresses, one.repeat(2 * S * 16), barrier, one.repeat(S, 16)
        )
        for each in (weight, bias):
            slots.push_clones(each, experts_PS, peers, 1, 16)
            slots.copy_slots(peers.own, each[:num_slots], experts_PS[1], 16, one, fills=each is bias)
        slots.copy_slots(gradient, peers.own, experts_PS[1], 16, one)
        for total in (weight, weight.float()):
            slots.add_clones(total, experts_PS, peers, one, 1, 16)
    assert len(compiled) == 8
    for name, kernel in compiled.items():
        if not name.startswith("_gather"):
            assert "ld.global" in kernel.asm["ptx"]
            assert "v4.b32" in kernel.asm["ptx"], name


@pytest.mark.full
@pytest.mark.parametrize("architecture", [90, 100])
def test_the_plan_of_clones_compiles_for_256_experts_of_64_ranks(architecture: int) -> None:
    with compiling(architecture) as compiled:
        clones.plan_clones_triton(torch.zeros(64, 256, dtype=torch.int32), 2, 1024)
    assert len(compiled) == 1
