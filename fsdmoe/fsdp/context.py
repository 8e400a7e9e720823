"""What all groups of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdmoe.fsdp.buffer import BufferPool, Scratch
from fsdmoe.fsdp.config import FSDPPolicy
from fsdmoe.mesh import Meshes


@dataclass(frozen=True)
class GroupContext:
    """Handed to every group when it is built."""

    meshes: Meshes
    policy: FSDPPolicy
    pool: BufferPool
    shard_device: torch.device
    """Where slices live: the compute device, or the host with ``cpu_offload``."""
    grad_divisor: float
    scratch: Scratch
