"""The host's side of a rank: which cores it runs on, and when Python collects garbage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fsdmoe.core.rules import numbers_in, ranges_text

_PCI = Path("/sys/bus/pci/devices")


def bind_cores(device: torch.device) -> str:
    """Bind this process to its share of the cores next to its GPU, with as many threads for torch if the
    environment does not say; returns what was done, in words."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    allowed = os.sched_getaffinity(0)
    near = [_cores_near(gpu, allowed) if device.type == "cuda" else allowed for gpu in range(num_local)]
    cores = share_of_cores(near, local_rank)
    for thread in os.listdir("/proc/self/task"):  # those that torch has started too
        os.sched_setaffinity(int(thread), cores)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(cores))
    threads = torch.get_num_threads()
    return f"{len(cores)} of {len(allowed)} cores ({ranges_text(cores)}), {threads} threads of torch"


def share_of_cores(near: Sequence[set[int]], rank: int) -> set[int]:
    """What one of several ranks of a host gets.

    Args:
        near: By local rank, the cores next to its device.
        rank: Whose share it is.

    Returns:
        An even share of its cores among the ranks that have the same ones next to them; all of these where
        there are fewer cores than ranks.
    """
    cores = sorted(near[rank])
    sharing = [other for other, theirs in enumerate(near) if theirs == near[rank]]
    each = len(cores) // len(sharing)
    if not each:
        return set(cores)
    first = sharing.index(rank) * each
    return set(cores[first : first + each])


def _cores_near(gpu: int, allowed: set[int]) -> set[int]:
    """By the PCIe topology, as far as the system tells it."""
    try:
        found: Any = torch.cuda.get_device_properties(gpu)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        near = numbers_in((_PCI / address / "local_cpulist").read_text().strip())
    except (OSError, ValueError, AttributeError, RuntimeError, AssertionError):
        return allowed
    return near & allowed or allowed
