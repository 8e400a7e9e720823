"""fsdmoe: train Mixture-of-Experts language models on PyTorch alone.

::

    meshes = fsdmoe.build_meshes(ep=8)
    model = fsdmoe.parallelize(model, meshes)
    optimizer = fsdmoe.AdamW(model, lr=3e-4)
    fsdmoe.checkpoint.save("ckpt", model, optimizer)

Names are imported when they are first used, so ``import fsdmoe`` costs nothing and does nothing.
"""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fsdmoe import checkpoint
    from fsdmoe.data.origin import Origin
    from fsdmoe.experts.replay import RoutingTape
    from fsdmoe.experts.routing_file import save_routed_experts
    from fsdmoe.feed import Feed, join_batches
    from fsdmoe.fsdp import FSDPConfig, engine_of
    from fsdmoe.huggingface.accelerator import prepare_accelerator
    from fsdmoe.huggingface.adapters import register_moe_adapter
    from fsdmoe.huggingface.expert_spec import ExpertsSpec
    from fsdmoe.huggingface.refit import iterate_weights
    from fsdmoe.huggingface.refit_link import send_weights
    from fsdmoe.huggingface.routing import routing_tape
    from fsdmoe.huggingface.trainer import prepare_trainer
    from fsdmoe.mesh import build_meshes
    from fsdmoe.optim import AdamW, clip_grad_norm
    from fsdmoe.parallel.auto_model import as_causal_lm
    from fsdmoe.parallel.build import ParallelPolicy, parallelize
    from fsdmoe.parallel.explanation import explain
    from fsdmoe.precision.config import PrecisionConfig
    from fsdmoe.precision.loss_scale import LossScaleConfig, LossScaler

__getattr__ = lazy_names(__name__, __file__)
