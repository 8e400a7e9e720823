"""Whether ``latency + bytes / bandwidth`` describes real collectives: four NCCL ranks on one GPU, over
loopback sockets.

One latency and one bandwidth are fitted to all-gather, reduce-scatter, all-to-all and all-reduce of four
sizes at once, with the bytes that ``fabric.py`` counts for each. The bandwidth is that of sockets and says
nothing of a fabric; what is tested is that one line fits all of them.

    python benchmarks/fabric_nccl.py              about 30 s on one GPU
    python benchmarks/fabric_nccl.py --tiny       gloo on a CPU, to see that it works
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from fabric import Place
from timing import wait

from fsdmoe.compat import all_gather, reduce_scatter

NUM_RANKS, ROUNDS = 4, 7
PLACE = Place(tuple(range(NUM_RANKS)), 0, NUM_RANKS)
SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1, "NCCL_P2P_DISABLE": 1,
    "NCCL_SHM_DISABLE": 1,
}  # fmt: skip


def collectives(nbytes: int, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """By name: a call, and the bytes it is said to put on a rank's link."""
    full = torch.randn(nbytes // 4, device=device)
    out, part = torch.empty_like(full), full[: full.numel() // NUM_RANKS].clone()
    even = [nbytes / NUM_RANKS] * NUM_RANKS
    return {
        "all-gather": (partial(all_gather, out, part, None), PLACE.passed_on(nbytes).nvlink),
        "reduce-scatter": (partial(reduce_scatter, part, full, None), PLACE.passed_on(nbytes).nvlink),
        "all-to-all": (partial(dist.all_to_all_single, out, full), PLACE.exchanged(even, even).nvlink),
        "all-reduce": (partial(dist.all_reduce, full), PLACE.reduced(nbytes).nvlink),
    }


def measure(device: torch.device, sizes: list[int]) -> list[tuple[str, int, float, float]]:
    """Name, size, counted bytes and seconds: the median over rounds, all ranks having met before each."""
    found = []
    for mib in sizes:
        for name, (call, counted) in collectives(mib * 2**20, device).items():
            times = []
            for _ in range(ROUNDS + 2):
                dist.barrier()
                wait(device)
                began = time.perf_counter()
                call()
                wait(device)
                times.append(time.perf_counter() - began)
            found.append((name, mib, counted, statistics.median(times[2:])))
    return found


def fit(found: list[tuple[str, int, float, float]]) -> tuple[float, float]:
    """Latency and bandwidth with the least squares of relative differences."""
    weights = torch.tensor([1 / seconds for *_, seconds in found], dtype=torch.float64)
    columns = torch.tensor([[1.0, counted] for _, _, counted, _ in found], dtype=torch.float64)
    wanted = torch.ones(len(found), 1, dtype=torch.float64)
    answer = torch.linalg.lstsq(columns * weights[:, None], wanted).solution.flatten()
    return answer[0].item(), 1 / answer[1].item()


def run_rank(folder: Path, *, tiny: bool) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cpu" if tiny else "cuda:0")
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    backend = "gloo" if tiny else "nccl"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(minutes=2)
    )
    found = measure(device, [1, 2] if tiny else [4, 16, 64, 256])
    dist.destroy_process_group()
    if rank:
        return
    latency, bandwidth = fit(found)
    print(f"{NUM_RANKS} ranks, {backend}: latency {1e6 * latency:.0f} us, {bandwidth / 1e9:.2f} GB/s")
    for name, mib, counted, seconds in found:
        by_formula = latency + counted / bandwidth
        print(f"  {name:16}{mib:5} MiB  took {1e3 * seconds:9.2f} ms  formula {1e3 * by_formula:9.2f} ms  "
              f"{by_formula / seconds:6.2f}")  # fmt: skip
    apart = [abs((latency + counted / bandwidth) / seconds - 1) for _, _, counted, seconds in found]
    print(f"formula off by {statistics.median(apart):.0%} in the median, {max(apart):.0%} at most")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_folder is not None:
        run_rank(args.rank_folder, tiny=args.tiny)
        return
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(NUM_RANKS):
            own = {"RANK": rank, "NCCL_HOSTID": f"h{rank}", **SOCKETS}
            command = [sys.executable, __file__, "--rank-folder", folder, *(["--tiny"] if args.tiny else [])]
            environment = os.environ | {key: str(value) for key, value in own.items()}
            processes.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
