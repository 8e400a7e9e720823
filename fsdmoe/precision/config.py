"""The ``precision`` section: in which number formats weights, gradients and main weights are stored and
sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from fsdmoe.errors import ConfigError
from fsdmoe.precision.loss_scale import LossScaleConfig, LossScaler
from fsdmoe.rules import one_of

ComputeDtype = Literal["bfloat16", "float16", "float32"]
MainDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of a run."""

    param_dtype: ComputeDtype = "bfloat16"
    """What modules compute with, and what is sent when weights are gathered. float16 needs loss_scale."""
    reduce_dtype: ComputeDtype = "float32"
    """What gradients are collected and summed across ranks in. bfloat16 halves their buffers and their
    traffic, and sums in bfloat16; fsdp.grad_exchange = "bf16_all_to_all" halves the traffic only, and still
    sums in float32."""
    main_dtype: MainDtype = "float32"
    """What the optimizer updates: the main weights and the gradients it reads."""
    output_dtype: ComputeDtype | None = None
    """What floating-point outputs of the whole model are cast to; none leaves them as they come."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """For param_dtype or reduce_dtype = "float16" only: what keeps gradients inside of its range."""

    def __post_init__(self) -> None:
        allowed = {
            "param_dtype": get_args(ComputeDtype), "reduce_dtype": get_args(ComputeDtype),
            "main_dtype": get_args(MainDtype), "output_dtype": (*get_args(ComputeDtype), None),
        }  # fmt: skip
        if problems := one_of("precision", vars(self), allowed):
            raise ConfigError(*problems)

    def build_scaler(self, *, num_tokens: int | None = None) -> LossScaler:
        """Of the loss of a run, a mean over ``num_tokens``: one that scales where gradients pass through
        float16, and does nothing in other formats."""
        enabled = "float16" in (self.param_dtype, self.reduce_dtype)
        return LossScaler(self.loss_scale, num_tokens=num_tokens, enabled=enabled)


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` to ``torch.bfloat16``."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise AssertionError(f"expected the name of a torch dtype, got {name!r}")
    return dtype
