"""What all groups of an engine share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fsdmoe.fsdp.buffer import BufferPool, Scratch
from fsdmoe.fsdp.config import FSDPPolicy
from fsdmoe.fsdp.node_stages import NodeStages
from fsdmoe.mesh import Axis, Meshes


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
    nodes: Mapping[Axis, NodeStages]
    """Axes whose collectives run in two stages."""
