"""Optimizers over flat shards, the global gradient norm, the learning-rate schedule."""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

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

__getattr__ = lazy_names(__name__, __file__)
