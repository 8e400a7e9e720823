"""What a sharded model knows of the scale of its loss: whether float16 has one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.precision.loss_scale import LossScaler

logger = logging.getLogger(__name__)


class LossScaling:
    """Told by whoever reads gradients; the scaler itself is the user's."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._wants_scaler = any(g.plan.requires_grad and g.plan.dtype == torch.float16 for g in groups)

    def note(self, scaler: LossScaler | None) -> None:
        """Gradients are about to be used: warn once if the loss was not scaled for float16, which loses the
        small ones."""
        is_scaled = scaler is not None and scaler.enabled
        if self._wants_scaler and not is_scaled and dist.get_rank() == 0:
            logger.warning(
                "fsdp: weights are in float16 and the loss was not scaled, so small gradients are lost as "
                "zeros; call backward on fsdmoe.LossScaler().scale(loss) and pass the scaler to "
                "fsdmoe.clip_grad_norm (docs/training.md), or compute in bfloat16"
            )
        self._wants_scaler = False
