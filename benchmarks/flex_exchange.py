"""What one MoE layer costs the host by ``flex`` and by ``all_to_all``, and how fast rows are written.

::

    python benchmarks/flex_exchange.py                 4 processes on one GPU, started by this one

Processes that share a GPU take turns on it, and NCCL talks over loopback sockets here: launches, host reads
and the bandwidth of one process's writes mean something, times of exchanges do not. On a machine with
NVLink start it with ``torchrun --nproc-per-node 4 benchmarks/flex_exchange.py`` instead.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
from fsdmoe.kernels.triton.exchange_kernels import index_rows_triton
from fsdmoe.kernels.triton.exchange_rows import Peers, deliver_rows, return_rows
from fsdmoe.mesh import Meshes, build_meshes
from tests.support.coordinates import use_local_tensors
from tests.support.one_gpu import run_ranks_on_one_gpu

E, D, N, K, T = 128, 2048, 768, 8, 2048
BLOCKS = (8, 16, 32, 64, 132, 264)


@functools.cache
def _meshes() -> Meshes:
    return build_meshes(ep=4)


def _layer(dispatcher: str) -> MoE:
    torch.manual_seed(0)
    spec = RouterSpec(num_experts=E, top_k=K, norm_topk=True)
    with torch.device("cuda"):
        layer = MoE(Router(spec, D), GroupedExperts(E, D, N)).bfloat16()
    parallelize_experts(layer, _meshes(), dispatcher=dispatcher, flex=FlexPolicy(rows=2.0))
    use_local_tensors(layer)
    if isinstance(layer.dispatcher, FlexDispatcher):
        layer.dispatcher.state.defers = True
    return layer


def _host(dispatcher: str, rounds: int = 5) -> tuple[int, int, float]:
    """Launches and host reads of forward and backward; milliseconds until the host is done."""
    layer = _layer(dispatcher)
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def once() -> float:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        layer(x)[0].sum().backward()
        return (time.perf_counter() - began) * 1e3

    once()
    layer.dispatcher.traffic.clear()
    once()
    reads = layer.dispatcher.traffic.host_syncs
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        once()
    launches = sum("LaunchKernel" in event.name for event in profiled.events())
    return launches, reads, statistics.median(once() for _ in range(rounds))


def _median(function: Callable[[], object], rounds: int = 12) -> float:
    """Microseconds on the device, which is kept busy meanwhile: how long a launch takes is not measured."""
    function()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)


class Writes:
    """What rank 0 writes to the others, by the kernels that write and by a copy of torch."""

    def __init__(self, num_rows: int) -> None:
        group = _meshes().expert.get_group("ep")
        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = SharedMemory({"rows": num_rows * D * 2}, group, device)
        area = self.memory.areas["rows"]
        self.peers, self.who, self.num_rows = Peers(area.own, area.distances), Who(0, 0, 4, 4), num_rows
        self.x = torch.randn(num_rows, D, device=device, dtype=torch.bfloat16)
        self.places = Places.of(torch.zeros(sum(Places.sizes(4, 4)), dtype=torch.int32, device=device), 4, 4)

    def of(self, rank: int) -> torch.Tensor:
        """A rank's buffer."""
        return self.memory._handle.get_buffer(rank, (self.num_rows, D), torch.bfloat16)

    def copy(self) -> float:
        """GB/s of a plain copy to another rank."""
        theirs = self.of(1)
        return self.x.nbytes / _median(lambda: theirs.copy_(self.x)) / 1e3

    def deliver(self, blocks: int) -> float:
        """Every row to one place of another rank, in any order."""
        index = torch.randperm(self.num_rows, device="cuda").int()
        routes_TC2 = torch.full((self.num_rows, 4, 2), -1, dtype=torch.int32, device="cuda")
        routes_TC2[:, 1, 0], routes_TC2[:, 1, 1] = 1, index
        taken = self._delivered(self.x, routes_TC2, blocks)
        assert torch.equal(self.of(1)[index.long()], self.x)
        return self.x.nbytes / taken / 1e3

    def route(self, blocks: int) -> float:
        """A quarter of the rows to all ranks that hold one of their experts."""
        x = self.x[: self.num_rows // 4]
        ids_TK = torch.rand(len(x), E, device="cuda").argsort(1)[:, :K].contiguous()
        index_TP, routes_TC2, _ = index_rows_triton(ids_TK, 4, E // 4)
        taken = self._delivered(x, routes_TC2, blocks)
        for rank, index_T in enumerate(index_TP.unbind(1)):
            assert torch.equal(self.of(rank)[: int(index_T.max()) + 1], x[index_T >= 0])
        return int((index_TP >= 0).sum()) * D * 2 / taken / 1e3

    def _delivered(self, x: torch.Tensor, routes_TC2: torch.Tensor, blocks: int) -> float:
        peers, places, who = self.peers, self.places, self.who
        return _median(lambda: deliver_rows(x, None, routes_TC2, places, peers, peers, who, blocks))

    def give_back(self, blocks: int) -> float:
        """Rows to another rank, as they stand."""
        peers, who = self.peers, self.who
        places = self.places._replace(first_S=self.places.first_S.clone())
        places.first_S[2:] = self.num_rows
        taken = _median(lambda: return_rows(self.x, None, places, peers, peers, 0, who, blocks))
        assert torch.equal(self.of(1), self.x)
        return self.x.nbytes / taken / 1e3


def _bandwidths(num_rows: int) -> list[str]:
    """Lines of a table; ranks other than the first wait."""
    writes, lines = Writes(num_rows), []
    if dist.get_rank() == 0:
        copied, size = writes.copy(), f"{num_rows * D * 2 >> 20} MiB"
        kinds = {
            f"rows of {size}, one copy of each": writes.deliver,
            f"a quarter of them, top {K} of {E}": writes.route,
            f"{size} back": writes.give_back,
        }
        for name, function in kinds.items():
            found = [function(blocks) for blocks in BLOCKS]
            cells = " | ".join(f"{each:.0f} ({each / copied:.0%})" for each in found)
            lines.append(f"| {name} | {copied:.0f} | {cells} |")
    torch.cuda.synchronize()
    dist.barrier()
    return lines


def measure() -> None:
    """One rank's part."""

    def say(*lines: str) -> None:
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)

    _meshes()
    say(
        f"A layer of {E} experts, top {K}, hidden {D}, width {N}; {T} tokens a rank, ep 4; forward, backward:"
    )
    say("", "| dispatcher | launches | reads by the host | host, ms |", "| --- | --- | --- | --- |")
    for name in ("flex", "all_to_all"):
        launches, reads, host = _host(name)
        say(f"| {name} | {launches} | {reads} | {host:.2f} |")
    say("", "GB/s written into another rank's memory, and as a share of a copy's, by thread blocks:")
    say("", f"| | copy | {' | '.join(map(str, BLOCKS))} |", f"|{' --- |' * (2 + len(BLOCKS))}")
    for num_rows in (8192, 65536):
        say(*_bandwidths(num_rows))


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure()
        dist.destroy_process_group()
    else:
        print(run_ranks_on_one_gpu(4, __file__).strip())
