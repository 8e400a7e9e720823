"""What every launcher shares: tensor descriptors, quick launches, how many programs a persistent kernel gets.

Kernels in this package are written for Hopper's bulk tensor copies (TMA), so their big operands travel as
descriptors: shape, strides and the block that one copy moves. A descriptor clips what lies outside the tensor
(loads give zeros, stores drop), which is why no GEMM here masks its columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

# Programs of a persistent kernel where there is no GPU to ask (the interpreter): few, but more than one.
_INTERPRETED_PROGRAMS = 3
_COLUMNS = 1024


def describe(tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of a contiguous tensor whose copies move ``block``-shaped pieces."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _trait(value: Any) -> Any:
    """Everything about an argument that Triton may compile a kernel for; never less than that."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    if isinstance(value, int):
        return value % 16 == 0, value == 1, value < 2**31
    return type(value)


class QuickLaunch:
    """Decorates a Triton kernel: ``kernel[grid](*arguments, **constants)``, at about half the host's time.

    Triton analyses all arguments and the options at every launch. Here a launch like an earlier one goes
    straight to the kernel that was compiled then. A layer makes a dozen launches, so this is what decides up
    to which size the host is the limit.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        key = (device, *kwargs.values(), *map(_trait, args))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.function[grid](*args, **kwargs)
            if compiled is not None:  # the interpreter compiles nothing
                self._compiled[key] = compiled
            return
        constants = [kwargs[name] for name in self.function.arg_names[len(args) :]]
        compiled[(*grid, 1, 1)](*args, *constants)


@functools.lru_cache(maxsize=64)
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def num_programs(device: torch.device) -> int:
    """One program a multiprocessor: each then loops over tiles until none are left."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _num_multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def block_of_columns(num_columns: int) -> int:
    """How many columns one program of a row-wise kernel takes."""
    return min(triton.next_power_of_2(num_columns), _COLUMNS)
