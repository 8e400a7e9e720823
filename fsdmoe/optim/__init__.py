"""Optimizers over flat shards, the global gradient norm, the learning-rate schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.optim.adamw import AdamW
    from fsdmoe.optim.build import build_optimizer, count_state
    from fsdmoe.optim.clipping import GradNorm, clip_grad_norm, grad_norm
    from fsdmoe.optim.config import OptimConfig
    from fsdmoe.optim.ema import WeightAverage
    from fsdmoe.optim.ema_config import EMAConfig
    from fsdmoe.optim.group_config import GroupConfig
    from fsdmoe.optim.groups import freeze, group_lines
    from fsdmoe.optim.muon import Muon
    from fsdmoe.optim.muon_config import MuonConfig
    from fsdmoe.optim.qk_clip import QKClip
    from fsdmoe.optim.schedule import learning_rate, set_learning_rates

__all__ = [
    "AdamW",
    "EMAConfig",
    "GradNorm",
    "GroupConfig",
    "Muon",
    "MuonConfig",
    "OptimConfig",
    "QKClip",
    "WeightAverage",
    "build_optimizer",
    "clip_grad_norm",
    "count_state",
    "freeze",
    "grad_norm",
    "group_lines",
    "learning_rate",
    "set_learning_rates",
]

__getattr__ = lazy_names(__name__, __file__)
