"""Optimizers over flat shards, the global gradient norm, the learning-rate schedule."""

from fsdmoe.optim.adamw import AdamW
from fsdmoe.optim.build import build_optimizer, count_state
from fsdmoe.optim.config import OptimConfig
from fsdmoe.optim.grad_norm import GradNorm, clip_grad_norm, grad_norm
from fsdmoe.optim.schedule import learning_rate, set_learning_rate

__all__ = [
    "AdamW",
    "GradNorm",
    "OptimConfig",
    "build_optimizer",
    "clip_grad_norm",
    "count_state",
    "grad_norm",
    "learning_rate",
    "set_learning_rate",
]
