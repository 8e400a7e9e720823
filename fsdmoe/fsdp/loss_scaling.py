"""The warning of a sharded model that trains in float16 without a scale of its loss."""

from __future__ import annotations

import logging

import torch.distributed as dist

from fsdmoe.fsdp.engine import Engine
from fsdmoe.precision.loss_scale import LossScaler

logger = logging.getLogger(__name__)


def note_scaler(engine: Engine, scaler: LossScaler | None) -> None:
    """Gradients of an engine that ``wants_scaler`` are about to be used: warn once if the loss was not scaled
    for float16, which loses the small ones. The scaler itself is the user's."""
    is_scaled = scaler is not None and scaler.enabled
    if not is_scaled and dist.get_rank() == 0:
        logger.warning(
            "fsdp: weights are in float16 and the loss was not scaled, so small gradients are lost as zeros; "
            "call backward on fsdmoe.LossScaler().scale(loss) and pass the scaler to fsdmoe.clip_grad_norm "
            "(docs/training.md), or compute in bfloat16"
        )
    engine.wants_scaler = False
