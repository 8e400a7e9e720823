"""fsdmoe: train Mixture-of-Experts language models on PyTorch alone.

::

    meshes = fsdmoe.build_meshes(ep=8)
    model = fsdmoe.parallelize(model, meshes)
    optimizer = fsdmoe.AdamW(model, lr=3e-4)
    fsdmoe.checkpoint.save("ckpt", model, optimizer)

Names are imported when they are first used, so ``import fsdmoe`` costs nothing and does nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fsdmoe import checkpoint as checkpoint
    from fsdmoe.auto_model import as_causal_lm as as_causal_lm
    from fsdmoe.data.origin import Origin as Origin
    from fsdmoe.experts.replay import RoutingTape as RoutingTape
    from fsdmoe.experts.routing_file import save_routed_experts as save_routed_experts
    from fsdmoe.explanation import explain as explain
    from fsdmoe.feed import Feed as Feed
    from fsdmoe.feed import join_batches as join_batches
    from fsdmoe.fsdp import FSDPConfig as FSDPConfig
    from fsdmoe.fsdp import engine_of as engine_of
    from fsdmoe.huggingface.accelerator import prepare_accelerator as prepare_accelerator
    from fsdmoe.huggingface.adapters import ExpertsSpec as ExpertsSpec
    from fsdmoe.huggingface.adapters import register_moe_adapter as register_moe_adapter
    from fsdmoe.huggingface.refit import iterate_weights as iterate_weights
    from fsdmoe.huggingface.refit_link import send_weights as send_weights
    from fsdmoe.huggingface.replay import routing_tape as routing_tape
    from fsdmoe.huggingface.trainer import prepare_trainer as prepare_trainer
    from fsdmoe.mesh import build_meshes as build_meshes
    from fsdmoe.optim import AdamW as AdamW
    from fsdmoe.optim import clip_grad_norm as clip_grad_norm
    from fsdmoe.parallel import ParallelPolicy as ParallelPolicy
    from fsdmoe.parallel import parallelize as parallelize
    from fsdmoe.precision.config import PrecisionConfig as PrecisionConfig
    from fsdmoe.precision.loss_scale import LossScaleConfig as LossScaleConfig
    from fsdmoe.precision.loss_scale import LossScaler as LossScaler

_HOMES = {
    "AdamW": "fsdmoe.optim",
    "ExpertsSpec": "fsdmoe.huggingface.adapters",
    "FSDPConfig": "fsdmoe.fsdp",
    "Feed": "fsdmoe.feed",
    "LossScaleConfig": "fsdmoe.precision.loss_scale",
    "LossScaler": "fsdmoe.precision.loss_scale",
    "Origin": "fsdmoe.data.origin",
    "ParallelPolicy": "fsdmoe.parallel",
    "PrecisionConfig": "fsdmoe.precision.config",
    "RoutingTape": "fsdmoe.experts.replay",
    "as_causal_lm": "fsdmoe.auto_model",
    "build_meshes": "fsdmoe.mesh",
    "clip_grad_norm": "fsdmoe.optim",
    "engine_of": "fsdmoe.fsdp",
    "explain": "fsdmoe.explanation",
    "iterate_weights": "fsdmoe.huggingface.refit",
    "join_batches": "fsdmoe.feed",
    "parallelize": "fsdmoe.parallel",
    "prepare_accelerator": "fsdmoe.huggingface.accelerator",
    "prepare_trainer": "fsdmoe.huggingface.trainer",
    "register_moe_adapter": "fsdmoe.huggingface.adapters",
    "routing_tape": "fsdmoe.huggingface.replay",
    "save_routed_experts": "fsdmoe.experts.routing_file",
    "send_weights": "fsdmoe.huggingface.refit_link",
}

__all__ = [*_HOMES, "__version__", "checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return importlib.import_module("fsdmoe.checkpoint")
    if name not in _HOMES:
        raise AttributeError(f"module 'fsdmoe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
