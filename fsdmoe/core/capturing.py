"""Code that a CUDA graph may be captured of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


def is_capturing() -> bool:
    """What is issued now is captured, not done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def compute_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, which backward calls once more instead of keeping what it saved. Random
    numbers are the same, but inside of a capture, where their state cannot be read: whoever captures
    (:mod:`fsdmoe.graphs`) refuses models that draw any."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=not is_capturing(), **kwargs)


class DeviceOnly(TorchFunctionMode):
    """Around code of others that is captured: what would go through the host is done by the device.

    ==================================  ======================================================================
    ``torch.tensor(0.0, device=...)``   is a copy from the host's memory, which a replay would read again
    ``torch.bincount(x, minlength=n)``  asks the device for the largest number; here it must be below n, or
                                        the device reports an index that is out of bounds
    ==================================  ======================================================================
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], bool | int | float):
            return torch.full((), args[0], **kwargs)
        if func is torch.bincount and len(args) == 1 and set(kwargs) == {"minlength"}:
            numbers = args[0].long()
            counts = numbers.new_zeros(kwargs["minlength"])
            return counts.scatter_add_(0, numbers, torch.ones_like(numbers))
        return func(*args, **kwargs)
