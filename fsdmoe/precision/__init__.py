"""Number formats, recipes made of them, scales and codes, and the loss scale that float16 needs.

Below ``kernels``: plain data and plain torch, which all floors share."""

from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.loss_scale import LossScaleConfig, LossScaler

__all__ = ["LossScaleConfig", "LossScaler", "PrecisionConfig"]
