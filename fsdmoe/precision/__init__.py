"""Number formats, recipes made of them, scales and codes, and the loss scale that float16 needs.

Below ``kernels``: plain data and plain torch, which all floors share."""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.precision.config import PrecisionConfig
    from fsdmoe.precision.loss_scale import LossScaleConfig, LossScaler

__getattr__ = lazy_names(__name__, __file__)
