"""FSDP2's interface over fsdmoe's engine: change ``from torch.distributed.fsdp import …`` to
``from fsdmoe.fsdp2 import …``. torch's own policy classes are taken, and given on from here."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdmoe.fsdp2.fully_shard import fully_shard
from fsdmoe.fsdp2.module import FSDPModule, UnshardHandle, register_fsdp_forward_method

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]
