"""What the link between a GPU and host memory carries: one way, both at once, and beside matrix products.

Streams of optimizer states and of activations are planned with these figures (docs/small_states.md).

    python benchmarks/host_link.py        a few seconds on one GPU

Host memory of three kinds: torch's pinned allocator, and memory registered with CUDA (as this project's is),
in ordinary and in large pages; on each memory node that this process may use. Rates in GB/s.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fsdmoe.core.rules import numbers_in
from fsdmoe.memory import pinned

MIB = 2**20


def nodes() -> dict[int, frozenset[int]]:
    """The cores of each memory node, of those that this process may use."""
    found = {}
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        usable = numbers_in((path / "cpulist").read_text().strip()) & os.sched_getaffinity(0)
        if usable:
            found[int(path.name.removeprefix("node"))] = frozenset(usable)
    return found


def allocate(kind: str, cpus: frozenset[int], nbytes: int) -> torch.Tensor:
    if kind == "torch":
        with pinned.running_on(cpus):
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    return pinned.host_bytes(nbytes, cpus, pinned=True, large_pages=kind == "large pages")


class Link:
    """Copies between host and device in chunks, each way on streams of its own."""

    def __init__(self, host: tuple[torch.Tensor, torch.Tensor], num_streams: int = 1) -> None:
        self.host = host
        self.device = tuple(torch.empty(half.numel(), dtype=torch.uint8, device="cuda") for half in host)
        self.streams = [[torch.cuda.Stream() for _ in range(num_streams)] for _ in range(2)]

    def copy(self, way: int, chunk: int) -> None:
        """0: to the device, 1: to the host."""
        source, target = (self.host[0], self.device[0]) if way == 0 else (self.device[1], self.host[1])
        for number, (part, into) in enumerate(zip(source.split(chunk), target.split(chunk), strict=True)):
            with torch.cuda.stream(self.streams[way][number % len(self.streams[way])]):
                into.copy_(part, non_blocking=True)

    def rates(self, ways: tuple[int, ...], chunk: int, beside: Callable[[], object] | None = None) -> str:
        """GB/s each way, by the time until both are done."""
        best = [0.0, 0.0]
        for _ in range(3):
            torch.cuda.synchronize()
            if beside is not None:
                beside()
            starts, ends = {}, {}
            for way in ways:
                starts[way] = self.streams[way][0].record_event(torch.cuda.Event(enable_timing=True))
                self.copy(way, chunk)
                for stream in self.streams[way][1:]:
                    self.streams[way][0].wait_stream(stream)
                ends[way] = self.streams[way][0].record_event(torch.cuda.Event(enable_timing=True))
            torch.cuda.synchronize()
            for way in ways:
                took = starts[way].elapsed_time(ends[way])
                best[way] = max(best[way], self.host[way].numel() / took / 1e6)
        return " + ".join(f"{best[way]:.1f}" for way in ways)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="copied each way")
    parser.add_argument("--kinds", nargs="*", default=["torch", "ordinary", "large pages"])
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 4, 16, 64, 256], help="in MiB")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU")
        return 1
    properties = torch.cuda.get_device_properties(0)
    near = pinned.cpus_near(torch.device("cuda", 0))
    print(f"{properties.name}, torch {torch.__version__}; cores near the GPU: {sorted(near or [])}")
    nbytes = args.mib * MIB
    print(f"{'memory':14}{'node':>5}{'pin s':>7}{'chunk MiB':>11}{'in':>7}{'out':>7}{'in + out':>15}")
    kept: Link | None = None
    for node, cpus in nodes().items():
        for kind in args.kinds:
            began = time.perf_counter()
            host = (allocate(kind, cpus, nbytes), allocate(kind, cpus, nbytes))
            took = time.perf_counter() - began
            link = Link(host)
            for chunk in args.chunks:
                ways = [link.rates(way, chunk * MIB) for way in ((0,), (1,), (0, 1))]
                print(
                    f"{kind:14}{node:5}{took:7.2f}{chunk:11}{ways[0]:>7}{ways[1]:>7}{ways[2]:>15}", flush=True
                )
            kept = link
    assert kept is not None
    two = Link(kept.host, num_streams=2)
    print(f"two streams each way, 64 MiB: {two.rates((0, 1), 64 * MIB)}")
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for copies in ((), (0, 1)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def multiply(start: torch.cuda.Event = start, end: torch.cuda.Event = end) -> None:
            start.record()
            for _ in range(40):
                left @ right
            end.record()

        multiply()
        rates = kept.rates(copies, 64 * MIB, multiply)
        times.append(start.elapsed_time(end) / 40)
        if copies:
            slower = times[1] / times[0]
            print(f"beside products of 8192 x 8192 bf16: {rates}; a product takes {slower:.3f} of its time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
