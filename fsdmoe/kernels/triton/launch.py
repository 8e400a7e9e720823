"""What every launcher shares: tensor descriptors, quick launches, how many programs a persistent kernel gets.

Kernels in this package are written for Hopper's bulk tensor copies (TMA), so their large operands are passed
as descriptors: shape, strides and the block that one copy moves. A descriptor clips what lies outside the
tensor (loads give zeros, stores drop), which is why no GEMM here masks its columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fsdmoe.kernels.architecture import architecture

# Programs of a persistent kernel where there is no GPU to ask (the interpreter): few, but more than one.
_INTERPRETED_PROGRAMS = 3
_COLUMNS = 1024
# Shapes change from call to call under uneven dispatch; beyond so many the memory of checked ones is dropped.
_MAX_CHECKED = 4096


# Descriptors by everything that their checks look at; of the base only its type and alignment. They hold
# no tensor.
_checked: dict[tuple[Any, ...], dict[str, Any]] = {}


def describe(tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of a contiguous tensor whose copies move ``block``-shaped pieces.

    A descriptor checks itself when it is made, which takes the host as long as a short launch. One like an
    earlier one is copied instead.
    """
    key = (tensor.shape, tensor.stride(), tensor.dtype, block, tensor.data_ptr() % 16)
    fields = _checked.get(key)
    if fields is None:
        made = TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))
        made.__dict__["trait"] = tensor.dtype, block  # what a kernel is compiled for, see below
        if len(_checked) >= _MAX_CHECKED:
            _checked.clear()
        _checked[key] = {name: value for name, value in vars(made).items() if name != "base"}
        return made
    copied = TensorDescriptor.__new__(TensorDescriptor)
    copied.__dict__.update(fields)
    copied.base = tensor
    return copied


def _traits(args: tuple[Any, ...]) -> list[Any]:
    """Everything about the arguments that Triton may compile a kernel for; never less than that."""
    found: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is int:
            found.append((value % 16 == 0, value == 1, value < 2**31))
        elif isinstance(value, torch.Tensor):
            found.append(value.dtype)
            found.append(value.data_ptr() % 16 == 0)
        else:
            found.append(getattr(value, "trait", kind))  # of a descriptor, else a float's or a flag's type
    return found


class QuickLaunch:
    """Decorates a Triton kernel: ``kernel[grid](*arguments, **constants)``, at under half the host's time.

    Triton analyses all arguments and the options at every launch. Here a launch like an earlier one goes
    straight to the kernel that was compiled then, past the hooks of profilers unless there are any. A layer
    makes a dozen launches, so this is what decides up to which size the host is the limit.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        key = (device, *kwargs.values(), *_traits(args))
        known = self._compiled.get(key)
        if known is None:
            compiled = self.function[grid](*args, **kwargs)
            if compiled is not None:  # the interpreter compiles nothing
                constants = tuple(kwargs[name] for name in self.function.arg_names[len(args) :])
                self._compiled[key] = compiled, constants
            return
        compiled, constants = known
        if _has_hooks():
            compiled[(*grid, 1, 1)](*args, *constants)
            return
        width, height, depth, *_ = (*grid, 1, 1)
        compiled.run(
            width, height, depth, driver.active.get_current_stream(device), compiled.function,
            compiled.packed_metadata, None, None, None, *args, *constants,
        )  # fmt: skip


def _has_hooks() -> bool:
    """Whether a hook is registered for launches of Triton kernels."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))


def has_bulk_copies(device: torch.device) -> bool:
    """Hopper or Blackwell."""
    return architecture(device) != "other"


@functools.lru_cache(maxsize=64)
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def num_programs(device: torch.device, spare: int = 0) -> int:
    """One program a multiprocessor, but for ``spare`` ones: each then loops over tiles until none are
    left."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    index = torch.cuda.current_device() if device.index is None else device.index
    return max(1, _num_multiprocessors(index) - spare)


def block_of_columns(num_columns: int) -> int:
    """How many columns one program of a row-wise kernel takes."""
    return min(next_power_of_2(num_columns), _COLUMNS)


# Triton has both, made for kernels: called from the host they take it ten times as long.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
