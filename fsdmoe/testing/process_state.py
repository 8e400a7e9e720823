"""What a case can change in its process beyond its own objects, put back once it is over: the next case in
the same process must find what it would find in a new one."""

from __future__ import annotations

import contextlib
import locale
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fsdmoe.kernels import backend


def _set_default_device(device: torch.device) -> None:
    # The default of the default: a device that is named, even this one, costs every later call a look.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_filling(is_filled: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = is_filled  # type: ignore[attr-defined]


def _set_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    (lambda: {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}, _set_handlers),
    (lambda: locale.setlocale(locale.LC_ALL), lambda found: locale.setlocale(locale.LC_ALL, found)),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_default_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (lambda: torch.utils.deterministic.fill_uninitialized_memory, _set_filling),  # type: ignore[attr-defined]
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (lambda: backend._choice, backend.choose_kernels),
)
"""How each is read, and how it is set."""


def seed_everything(seed: int = 0) -> None:
    """All three random states that a case can draw from without a generator of its own."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Environment, folder, locale, time zone, and torch's own settings are afterwards what they were before.
    Random states are not: a case seeds them when it begins."""
    environment = dict(os.environ)
    folder = os.getcwd()
    before = [read() for read, _ in _STATES]
    try:
        yield
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
            time.tzset()  # TZ is among them
        os.chdir(folder)  # without a look at the present one, which may be gone
        for (read, write), found in zip(_STATES, before, strict=True):
            if read() != found:
                write(found)
