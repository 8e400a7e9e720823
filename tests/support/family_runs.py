"""A tiny model of every MoE family on several ranks against the same model in one process: the verdicts that
``docs/families.md`` holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import Batch
from fsdmoe.feed import Feed
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.mesh import MeshConfig, build_meshes
from fsdmoe.models import StepCounts
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from tests.support.family_round_trip import tokens_of
from tests.support.moe_families import VOCABULARY, tiny_model

TOLERANCE = 1e-5
MESHES = {"ep": MeshConfig(ep=4), "tp": MeshConfig(tp=2, ep=2), "cp": MeshConfig(cp=2, ep=2)}
"""By the axis that is tried; the first on four ranks, the others on two."""
IN_FLOAT64 = ("hy_v4",)
"""Whose hyper-connections enlarge float32's rounding beyond the tolerance."""
Gradients = dict[str, Tensor]


def trained_over_ep(family: str) -> str:
    """Collective, on four ranks that have a batch each, called as transformers' users call a model."""
    tokens = tokens_of(0, dist.get_rank())
    alone = _model(family)
    alone(input_ids=tokens, labels=tokens).loss.backward()
    wanted = _gradients(alone)
    for gradient in wanted.values():
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    try:
        model = parallelize(_model(family), build_meshes(MESHES["ep"]))
        model(input_ids=tokens, labels=tokens).loss.backward()
    except ConfigError as error:
        return f"refused: {error}"
    is_split = any(parallel_forward_of(module) is not None for module in model.modules())
    return f"{_compared(model, wanted)}, {'split' if is_split else 'not split'}"


def _model(family: str) -> Any:
    model: Any = tiny_model(family)
    if family in IN_FLOAT64:
        model.double()
        model.lm_head.float()  # which these models never convert
        model.set_experts_implementation("eager")  # torch's grouped products do not take it
    return model


def trained_over(axis: str, family: str) -> str:
    """Collective, on two ranks that share rows of one document each."""
    rows = _rows()
    meshes = build_meshes(MESHES[axis])
    precision = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")
    policy = ParallelPolicy(precision=precision, grad_divisor=1.0)
    alone = tiny_model(family)
    try:
        one = WrappedCausalLM(alone)
        model = parallelize(tiny_model(family), meshes, policy)
        split = as_causal_lm(model)
        feed = Feed(meshes, ContextParallelConfig(mode="ring"), own_attention=True)
        inputs = feed.inputs(feed.prepare([rows]))
        split(**inputs[0], counts=feed.count(split, inputs), routing=feed.routing()).loss.backward()
    except ConfigError as error:
        return f"refused: {error}"
    vector = one.count_tokens(rows.labels_BS, rows.loss_mask_BS, None)
    loss = one(**rows.columns, counts=StepCounts.from_vector(vector)).loss
    loss.backward()  # type: ignore[union-attr]
    wanted = _gradients(alone)
    return _compared(model, wanted)


def _rows() -> Batch:
    random = torch.Generator().manual_seed(3)
    tokens_BS = torch.randint(0, VOCABULARY, (2, 16), generator=random)
    positions_BS = torch.arange(16).expand(2, -1)
    mask_BS = positions_BS < 15
    return Batch(tokens_BS, tokens_BS.roll(-1, 1), positions_BS, torch.zeros_like(tokens_BS), mask_BS)


def _gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compared(model: nn.Module, wanted: Gradients) -> str:
    """``equal``, or which gradient differs most."""
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    missing = sorted(n for n in wanted.keys() ^ found.keys() if (wanted if n in wanted else found)[n].any())
    if missing:
        return f"only one side has gradients of {missing[:3]}"
    scales = {name: gradient.abs().max().clamp(min=1e-3) for name, gradient in wanted.items()}
    worst, name = max(
        ((found[n] - wanted[n]).abs().max().div(scales[n]).item(), n) for n in wanted.keys() & found.keys()
    )
    return "equal" if worst <= TOLERANCE else f"{name} differs by {worst:.1e}"
