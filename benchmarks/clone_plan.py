"""How long does the plan of clones take on a GPU? Time of its one kernel, as a profiler sees it.

Loads of experts are log-normal; the median and the fastest of many launches, in microseconds, for several
numbers of ranks and experts. Every plan is compared with that of plain torch.

    python benchmarks/clone_plan.py
    python benchmarks/clone_plan.py --warps 4 8 16 --blocks 16 32 64       other ways to launch it
    python benchmarks/clone_plan.py --before /tmp/clone_plan_kernel.py     and the kernel of another version
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from timing import require_gpu
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fsdmoe.kernels.clone_plan import plan_clones
from fsdmoe.kernels.triton import clone_plan_kernel

SHAPES = ((8, 128), (32, 256), (64, 256))
SLOTS, LEAST_ROWS, LAUNCHES = 2, 1024, 200


def draw_counts(num_ranks: int, num_experts: int) -> Tensor:
    """Of 16,384 tokens a rank with eight choices each."""
    random = torch.Generator().manual_seed(0)
    shares_E = torch.randn(num_experts, generator=random).exp()
    noise_PE = 0.9 + 0.2 * torch.rand(num_ranks, num_experts, generator=random)
    return (shares_E / shares_E.sum() * 8 * 16384 * noise_PE).int()


def kernel_times(module: ModuleType, counts_PE: Tensor) -> list[float]:
    """Microseconds of each launch; a plan that is not that of plain torch ends the benchmark."""
    wanted = plan_clones(counts_PE, SLOTS, LEAST_ROWS)
    on_gpu = counts_PE.cuda()
    for _ in range(20):
        found = module.plan_clones_triton(on_gpu, SLOTS, LEAST_ROWS)
    for mine, theirs in zip(found, wanted, strict=True):
        if not torch.equal(mine.cpu(), theirs):
            raise SystemExit(f"{module.__name__}: another plan than plain torch's")
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(LAUNCHES):
            module.plan_clones_triton(on_gpu, SLOTS, LEAST_ROWS)
        torch.cuda.synchronize()
    events: list[Any] = [each for each in profiled.events() if "_plan_kernel" in each.name]
    return [each.device_time for each in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warps", type=int, nargs="+", default=[clone_plan_kernel._NUM_WARPS])
    parser.add_argument("--blocks", type=int, nargs="+", default=[clone_plan_kernel._BLOCK])
    parser.add_argument("--before", type=Path, help="file of the kernel in another version")
    arguments = parser.parse_args()
    require_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {SLOTS} slots a rank")
    print("| kernel | ranks | experts | median, µs | fastest |\n|" + " --- |" * 5)
    for num_ranks, num_experts in SHAPES:
        counts_PE = draw_counts(num_ranks, num_experts)
        if arguments.before is not None:
            report("before", load(arguments.before), counts_PE)
        for warps in arguments.warps:
            for block in arguments.blocks:
                clone_plan_kernel._NUM_WARPS = warps
                clone_plan_kernel._BLOCK = block
                report(f"{warps} warps, blocks of {block}", clone_plan_kernel, counts_PE)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_before", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(name: str, module: ModuleType, counts_PE: Tensor) -> None:
    times = kernel_times(module, counts_PE)
    num_ranks, num_experts = counts_PE.shape
    median = statistics.median(times)
    print(f"| {name} | {num_ranks} | {num_experts} | {median:.1f} | {min(times):.1f} |", flush=True)


if __name__ == "__main__":
    main()
