"""Whether the emulated fabric keeps its word on this GPU: transfers last as long as the formula says, copy
the right bytes, share their links, and run beside a matrix product.

    python benchmarks/fabric_check.py             about 20 s on one H200
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from fabric import FABRICS_BY_NAME
from fabric_group import World, emulated_fabric, fabric_meshes
from timing import require_gpu

from fsdmoe.core.compat import all_gather, reduce_scatter
from fsdmoe.mesh import Axis, MeshConfig, Meshes

MIB = 2**20
ROUNDS = 9


def milliseconds(work: Callable[[], object]) -> float:
    """Median over rounds, by events of the GPU."""
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # a millisecond, in which the host gets ahead
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def rows(mib: int) -> torch.Tensor:
    return torch.randn(mib * MIB // 4096, 2048, device="cuda").bfloat16()


def durations(world: World, meshes: Meshes) -> float:
    """Print measured beside wanted; the largest relative difference of transfers of a millisecond or more."""
    worst = 0.0
    dense, experts = meshes.group(Axis.FSDP_TP), meshes.group(Axis.EP)
    size = dist.get_world_size(dense)
    for mib in (1, 64, 384):
        own, full = rows(max(1, mib // size)), rows(mib)
        gathered = own.new_empty(own.shape[0] * size, 2048)
        part = full[: full.shape[0] // size].clone()
        out = torch.empty_like(full)
        for name, work in {
            "all-gather": partial(all_gather, gathered, own, dense),
            "reduce-scatter": partial(reduce_scatter, part, full, dense),
            "all-to-all": partial(dist.all_to_all_single, out, full, group=experts),
            "all-reduce": partial(dist.all_reduce, full, dist.ReduceOp.MAX, group=dense),
        }.items():
            took = milliseconds(work)
            wanted = 1e3 * world.records[-1].seconds
            worst = max(worst, abs(took / wanted - 1) if wanted >= 1 else 0.0)
            print(
                f"  {name:16}{mib:5} MiB  wanted {wanted:9.4f} ms  took {took:9.4f} ms  {took / wanted:7.4f}"
            )
    return worst


def check_bytes(meshes: Meshes) -> str:
    group = meshes.group(Axis.EP)
    size = dist.get_world_size(group)
    full = torch.randn(30 * size, 64, device="cuda")
    send = [30 + (i % 3) - 1 for i in range(size)]
    send[-1] += full.shape[0] - sum(send)
    out = full.new_empty(send[0] * size, 64)
    dist.all_to_all_single(out, full, [send[0]] * size, send, group=group)
    own = full[: send[0]]
    arrived = torch.equal(out, own.repeat(size, 1))
    gathered = torch.empty(7 * size, dtype=torch.int64, device="cuda")
    mine = torch.arange(7, device="cuda")
    all_gather(gathered, mine, group)
    part = torch.empty(30, 64, device="cuda")
    reduce_scatter(part, full, group)
    summed = torch.equal(part, full[:30] * size)
    whole = torch.equal(gathered, mine.repeat(size))
    return f"rows as sent: {arrived}, gathers: {whole}, sums: {summed}"


def overlap(meshes: Meshes) -> None:
    """A product alone, an exchange alone, both at once; and two exchanges of different groups at once."""
    a, b = rows(64).view(8192, -1)[:, :2048], torch.randn(2048, 8192, device="cuda").bfloat16()
    products = 8
    full = rows(384)
    out, other = torch.empty_like(full), torch.empty_like(full)
    group, dense = meshes.group(Axis.EP), meshes.group(Axis.FSDP_TP)

    def compute() -> None:
        for _ in range(products):
            a @ b

    def exchange() -> None:
        work = dist.all_to_all_single(out, full, group=group, async_op=True)
        work.wait()

    def both() -> None:
        work = dist.all_to_all_single(out, full, group=group, async_op=True)
        compute()
        work.wait()

    def two() -> None:
        works = [
            dist.all_to_all_single(o, full, group=g, async_op=True) for o, g in ((out, group), (other, dense))
        ]
        for work in works:
            work.wait()

    alone, sent, together, twice = map(milliseconds, (compute, exchange, both, two))
    print(
        f"product {alone:.3f} ms, exchange {sent:.3f} ms, both {together:.3f} ms (one after the other "
        f"{alone + sent:.3f}); two exchanges at once {twice:.3f} ms, links being shared"
    )


def main() -> None:
    require_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, ep in (("node", 8), ("nodes", 64), ("free", 8)):
        fabric = FABRICS_BY_NAME[name]
        with emulated_fabric(fabric) as world:
            meshes = fabric_meshes(MeshConfig(ep=ep), "cuda")
            print(f"{name}: {fabric.world} ranks, {check_bytes(meshes)}")
            if not fabric.is_free:
                print(f"  off by at most {durations(world, meshes):.2%} (1 ms or longer; wanted: 2 %)")
            overlap(meshes)


if __name__ == "__main__":
    main()
