"""Number formats of weights and gradients, and the loss scale that float16 needs."""

from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.loss_scale import LossScaleConfig, LossScaler

__all__ = ["LossScaleConfig", "LossScaler", "PrecisionConfig"]
