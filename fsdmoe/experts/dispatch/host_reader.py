"""Copies a few numbers from the device to the host, which waits for them and not for later kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class HostReader:
    """Copies on a stream of its own."""

    _stream: torch.cuda.Stream | None = None

    def start(self, pending: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The result of a started collective of a GPU, once it is asked for."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            on_device = pending()
            on_host = torch.empty(on_device.shape, dtype=on_device.dtype, device="cpu", pin_memory=True)
            on_host.copy_(on_device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()

        def read() -> Tensor:
            nonlocal on_device
            copied.synchronize()
            del on_device  # not before: its memory belongs to the stream that launched the collective
            return on_host

        return read
