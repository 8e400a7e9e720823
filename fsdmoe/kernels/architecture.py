"""What generation a GPU is: the one place that reads a compute capability so."""

from __future__ import annotations

import functools
from typing import Literal

import torch

Architecture = Literal["hopper", "blackwell", "other"]


@functools.lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def architecture(device: torch.device) -> Architecture:
    """Of a CUDA device. Blackwell is that of data centres (10.x): cards with 12.x have neither its matrix
    units nor its shared memory."""
    found = capability(device)
    if found == (9, 0):
        return "hopper"
    return "blackwell" if found[0] == 10 else "other"


def current_architecture() -> Architecture | None:
    """Of the current CUDA device; None where there is none."""
    return architecture(torch.device("cuda")) if torch.cuda.is_available() else None
