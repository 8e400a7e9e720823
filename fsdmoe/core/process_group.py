"""The process group of all ranks, started where none is running yet."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)
"""Of a collective: a rank that is silent for longer is lost."""


def init_distributed() -> str:
    """Start NCCL where there is a GPU and gloo elsewhere, once; returns the device type."""
    if not dist.is_initialized():
        for key, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }.items():
            os.environ.setdefault(key, value)
        if torch.cuda.is_available():
            _set_device()
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
        else:
            dist.init_process_group("gloo", timeout=TIMEOUT)
    if "nccl" not in str(dist.get_backend_config()) or not torch.cuda.is_available():
        return "cpu"
    if not torch.cuda.is_initialized():  # whoever made the group has not chosen one
        _set_device()
    return "cuda"


def _set_device() -> None:
    rank = os.environ.get("LOCAL_RANK", str(dist.get_rank()) if dist.is_initialized() else "0")
    torch.cuda.set_device(int(rank) % torch.cuda.device_count())
