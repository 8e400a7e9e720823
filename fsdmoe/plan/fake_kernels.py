"""Fused kernels without a GPU and without values: what they allocate and keep, and nothing computed.

A fused operation is a launcher in Python, which allocates results and workspaces and keeps what backward
needs, around kernels that fill them. On fake tensors the launchers run as they are and the kernels are left
out, so that a count of bytes is that of a GPU, to the padding of the experts' rows. Attention is torch's own:
its stand-in keeps what the fused backends keep.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdmoe.core import labels
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts import scores
from fsdmoe.kernels import linear
from fsdmoe.kernels.backend import kernels


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """Until the end of the block, fused operations take fake tensors for those of a GPU.

    Raises:
        ConfigError: Triton is not installed.
    """
    try:
        fused = importlib.import_module("fsdmoe.kernels.triton")
    except ImportError as error:
        raise ConfigError(
            "fake step: expected Triton, whose kernels are left out but whose launchers run, got none; "
            "pip install triton"
        ) from error
    launch = importlib.import_module("fsdmoe.kernels.triton.launch")
    with ExitStack() as stack:
        stack.enter_context(kernels("triton"))
        stack.enter_context(patch.multiple(launch.QuickLaunch, _launch=_nothing))
        # Descriptors are checked for their alignment.
        stack.enter_context(patch.multiple(FakeTensor, data_ptr=_aligned))
        # What asks for the kind of device.
        stack.enter_context(
            patch.multiple(fused, supports=_takes_experts, supports_router_grad=_takes_router)
        )
        stack.enter_context(patch.multiple(scores, _fits_tensor_cores=_are_bfloat16))
        # Allocates nothing; and torch 2.11 takes its dtype for another argument on fake tensors.
        stack.enter_context(
            patch.multiple(linear, _multiplies_into_fp32=_is_float32, _add_unrounded_=_nothing)
        )
        stack.enter_context(patch.multiple(labels, _notes=_UnreadNotes()))
        stack.enter_context(patch.multiple(F, scaled_dot_product_attention=_attention))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _aligned(_: Tensor) -> int:
    return 0


def _is_float32(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32


def _takes_router(weight_ED: Tensor) -> bool:
    return weight_ED.shape[0] % 8 == 0


def _takes_experts(x_RD: Tensor, gate_up_E2ND: Tensor, down_EDN: Tensor, activation: str = "swiglu") -> bool:
    return activation in ("swiglu", "gpt_oss") and _are_bfloat16(x_RD, gate_up_E2ND, down_EDN)


def _are_bfloat16(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.bfloat16 for tensor in tensors)


class _UnreadNotes(labels._Notes):
    """Notes of kernels about labels: in host memory, which has no values either."""

    def take(self) -> str | None:
        return None


def _attention(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, *_: Any, **__: Any) -> Tensor:
    return _FusedAttention.apply(q_BHSd, k_BHSd, v_BHSd)


class _FusedAttention(torch.autograd.Function):
    """Keeps its inputs, its result, and a sum a row instead of matrices of scores."""

    @staticmethod
    def forward(ctx: Any, q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        batch, heads, length, _ = q_BHSd.shape
        # Laid out as what is given: heads of a token side by side.
        out_BHSd = q_BHSd.new_empty((batch, length, heads, v_BHSd.shape[-1])).transpose(1, 2)
        log_sums_BHS = q_BHSd.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(q_BHSd, k_BHSd, v_BHSd, out_BHSd, log_sums_BHS)
        return out_BHSd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])
