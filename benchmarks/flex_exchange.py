"""What one MoE layer costs the host by ``flex`` and by ``all_to_all``, and how fast rows are written.

::

    python benchmarks/flex_exchange.py                 4 processes on one GPU, started by this one

Processes that share a GPU take turns on it, and NCCL talks over loopback sockets here: launches, host reads
and the bandwidth of one process's writes mean something, times of exchanges do not. On a machine with
NVLink start it with ``torchrun --nproc-per-node 4 benchmarks/flex_exchange.py`` instead.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from fsdmoe.experts.dispatch import FlexDispatcher, FlexPolicy
from fsdmoe.experts.dispatch.flex_peer import SharedMemory
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.router import Router, RouterSpec
from fsdmoe.kernels.exchange_plan import Places, Who
from fsdmoe.kernels.triton.exchange_rows import Peers, deliver_rows
from fsdmoe.mesh import build_meshes
from tests.support.coordinates import use_local_tensors
from tests.support.one_gpu import run_ranks_on_one_gpu

E, D, N, K, T = 128, 2048, 768, 8, 2048


def _layer(dispatcher: str) -> MoE:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    layer = MoE(
        Router(RouterSpec(num_experts=E, top_k=K, norm_topk=True), D, **options),
        GroupedExperts(E, D, N, **options),
    )
    parallelize_experts(layer, build_meshes(ep=4), dispatcher=dispatcher, flex=FlexPolicy(rows=2.0))
    use_local_tensors(layer)
    if isinstance(layer.dispatcher, FlexDispatcher):
        layer.dispatcher.state.defers = True
    return layer


def _host(dispatcher: str, rounds: int = 5) -> tuple[int, int, float, float]:
    """Launches and host reads of forward and backward; milliseconds until the host is done, and the
    device."""
    layer = _layer(dispatcher)
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def once() -> tuple[float, float]:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        layer(x)[0].sum().backward()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        return host * 1e3, (time.perf_counter() - began) * 1e3

    once()
    layer.dispatcher.traffic.clear()
    once()
    reads = layer.dispatcher.traffic.host_syncs
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        once()
    launches = sum("LaunchKernel" in event.name for event in profiled.events())
    host, device = zip(*(once() for _ in range(rounds)), strict=True)
    return launches, reads, statistics.median(host), statistics.median(device)


def _median(function: Callable[[], object], rounds: int = 30) -> float:
    """Microseconds on the device."""
    taken = []
    for index in range(rounds + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if index >= 5:
            taken.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(taken)


def _bandwidth(num_rows: int) -> list[str]:
    """Rank 0 writes rows to rank 1, as a copy of torch and as the kernel that delivers; the others wait."""
    group, device = (
        build_meshes(ep=4).expert.get_group("ep"),
        torch.device("cuda", torch.cuda.current_device()),
    )
    memory = SharedMemory({"rows": num_rows * D * 2}, group, device)
    area, lines = memory.areas["rows"], []
    if dist.get_rank() == 0:
        x = torch.randn(num_rows, D, device="cuda", dtype=torch.bfloat16)
        theirs = memory._handle.get_buffer(1, (num_rows, D), torch.bfloat16)
        copied = _median(lambda: theirs.copy_(x))
        index_TP = torch.full((num_rows, 4), -1, dtype=torch.int32, device="cuda")
        index_TP[:, 1] = torch.randperm(num_rows, device="cuda").int()
        numbers = torch.zeros(sum(Places.sizes(4, 4)), dtype=torch.int32, device="cuda")
        places, peers, who = Places.of(numbers, 4, 4), Peers(area.own, area.distances), Who(0, 0, 4, 4)
        nbytes = num_rows * D * 2
        lines.append(f"{nbytes >> 20} MiB: copy {copied:.0f} us, {nbytes / copied / 1e3:.0f} GB/s")
        for blocks in (16, 32, 64, 132, 264, 528):
            taken = _median(partial(deliver_rows, x, None, index_TP, places, peers, peers, who, blocks))
            assert torch.equal(theirs[index_TP[:, 1].long()], x)
            lines.append(f"    {blocks} blocks: {taken:.0f} us, {copied / taken:.0%} of the copy's bandwidth")
    torch.cuda.synchronize()
    dist.barrier()
    return lines


def measure() -> None:
    """One rank's part."""

    def say(*lines: str) -> None:
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)

    build_meshes(ep=4)
    say(f"{E} experts, top {K}, hidden {D}, width {N}, {T} tokens a rank, ep 4, forward and backward")
    for name in ("flex", "all_to_all"):
        launches, reads, host, device = _host(name)
        say(f"{name}: {launches} launches, {reads} host reads; host {host:.2f} ms, device {device:.1f} ms")
    for num_rows in (8192, 65536):
        say(*_bandwidth(num_rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure()
    else:
        print(run_ranks_on_one_gpu(4, __file__))
