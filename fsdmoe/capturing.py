"""Code that a CUDA graph may be captured of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


def is_capturing() -> bool:
    """What is issued now is captured, not done."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def compute_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, which backward calls once more instead of keeping what it saved. Random
    numbers are the same, but inside of a capture, where their state cannot be read: whoever captures
    (:mod:`fsdmoe.graphs`) refuses models that draw any."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=not is_capturing(), **kwargs)


class ConstantsOnDevice(TorchFunctionMode):
    """Numbers that code of others makes a tensor of (``torch.tensor(0.0, device=...)``) are written by the
    device. Otherwise they are copied from the host's memory, which a graph would read again in every replay,
    so a capture refuses it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], bool | int | float):
            return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)
