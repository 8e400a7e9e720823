"""Code that a CUDA graph may be captured of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def is_capturing() -> bool:
    """What is issued now is captured, not done."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def compute_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, which backward calls once more instead of keeping what it saved. Random
    numbers are the same, but inside of a capture, where their state cannot be read: whoever captures
    (:mod:`fsdmoe.graphs`) refuses models that draw any."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=not is_capturing(), **kwargs)
