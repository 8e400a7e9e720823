"""The warning of a sharded model that trains in float16 without a scale of its loss."""

from __future__ import annotations

import logging

import torch.distributed as dist

from fsdmoe.precision.loss_scale import LossScaler

logger = logging.getLogger(__name__)


class LossScaling:
    """Of a model with trained weights in float16. Told by whoever reads gradients; the scaler itself is the
    user's."""

    _is_known = False

    def note(self, scaler: LossScaler | None) -> None:
        """Gradients are about to be used: warn once if the loss was not scaled for float16, which loses the
        small ones."""
        is_scaled = scaler is not None and scaler.enabled
        if not self._is_known and not is_scaled and dist.get_rank() == 0:
            logger.warning(
                "fsdp: weights are in float16 and the loss was not scaled, so small gradients are lost as "
                "zeros; call backward on fsdmoe.LossScaler().scale(loss) and pass the scaler to "
                "fsdmoe.clip_grad_norm (docs/training.md), or compute in bfloat16"
            )
        self._is_known = True
