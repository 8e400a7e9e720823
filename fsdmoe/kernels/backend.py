"""Which implementation an operation takes: a fused Triton kernel where one can run, else plain torch.

Every operation (experts, router, loss, positions, norms, permutation, optimizer) asks here, so one switch
turns all kernels off, to compare them or to rule them out::

    choose_kernels("torch")                   # train.kernels = "torch" does this
    with kernels("torch"):                    # for a while
        ...

==========  ==================================================================================================
``auto``    Triton on CUDA devices that compute in bf16, if it is installed; never for fp64
``torch``   never Triton
``triton``  Triton wherever a kernel takes the shapes, CPU tensors included: for Triton's interpreter
==========  ==================================================================================================

The choice is made in forward; a backward follows its forward. It is one for the process, not for a thread:
recomputation runs in autograd's threads and must choose as the first forward did.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import one_of
from fsdmoe.kernels.architecture import architecture, capability

KernelChoice = Literal["auto", "torch", "triton"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8)
_choice: KernelChoice = "auto"


def choose_kernels(choice: KernelChoice) -> None:
    """From now on, everywhere in this process."""
    global _choice
    refuse(one_of("train", {"kernels": choice}, {"kernels": get_args(KernelChoice)}))
    _choice = choice


@contextlib.contextmanager
def kernels(choice: KernelChoice) -> Iterator[None]:
    """``choose_kernels`` until the end of the block."""
    before = _choice
    choose_kernels(choice)
    try:
        yield
    finally:
        choose_kernels(before)


def use_fixed_order() -> None:
    """From now on, and for this whole process, sums are added up in a fixed order wherever there is a choice:
    ``train.deterministic``. Before the first product on a GPU.

    fsdmoe's own kernels have no other order: none adds with atomics. FlashAttention-4, torch's flash
    attention, its ``index_add`` and its ``scatter_add`` follow torch's switch. So does the choice of cuDNN's
    attention, whose backward has no fixed order (:mod:`fsdmoe.context_parallel.fused_attention`,
    :mod:`fsdmoe.models.attention`). An operation that has no fixed order raises, and says which.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else concurrent products share a workspace
    # Not with warn_only: flash attention would warn, and add up in any order.
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # of models that call torch's attention themselves
    # Memory that is never read before it is written needs no filling.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def triton_for(x: Tensor) -> Any:
    """The package :mod:`fsdmoe.kernels.triton` if tensors like ``x`` shall go through it, else None: also
    while ``torch.compile`` traces, which fuses plain torch itself."""
    if _choice == "torch" or x.dtype not in _DTYPES or torch.compiler.is_compiling():
        return None
    if _choice == "auto" and not (x.is_cuda and _computes_bf16(x.device)):
        return None
    return _triton()


def fp8_for(x: Tensor) -> Any:
    """The package :mod:`fsdmoe.kernels.gluon` if tensors like ``x`` shall go through its kernels in fp8,
    which are Hopper's, else None."""
    return _gluon() if _choice != "torch" and x.is_cuda and _has_fp8_kernels(x.device) else None


def has_fp8_kernels() -> bool:
    """Whether the current device computes experts in fp8 by kernels, as things are chosen now."""
    return _choice != "torch" and torch.cuda.is_available() and _has_fp8_kernels(torch.device("cuda"))


def takes_fp8_products(x: Tensor) -> bool:
    """Whether tensors like ``x`` shall be multiplied in fp8 by torch's own products."""
    if _choice == "torch":
        return False
    return (x.is_cuda and _has_fp8_products(x.device)) or _choice == "triton"


def has_fp8_products() -> bool:
    """Whether torch has all products in fp8 on the current device, as things are chosen now."""
    return _choice != "torch" and torch.cuda.is_available() and _has_fp8_products(torch.device("cuda"))


def _has_fp8_products(device: torch.device) -> bool:
    """Scales of rows with float32 results, and scales of blocks, are cuBLAS's from 12.9 on, for Hopper."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return architecture(device) == "hopper" and version >= (12, 9)


def _has_fp8_kernels(device: torch.device) -> bool:
    if architecture(device) != "hopper" or importlib.util.find_spec("triton") is None:
        return False
    return importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.cache
def _triton() -> Any:
    """Optional: looked for when first wanted, never at import."""
    is_there = importlib.util.find_spec("triton") is not None
    return importlib.import_module("fsdmoe.kernels.triton") if is_there else None


@functools.cache
def _gluon() -> Any:
    """Optional, and experimental."""
    return importlib.import_module("fsdmoe.kernels.gluon")


def _computes_bf16(device: torch.device) -> bool:
    return capability(device)[0] >= 8
