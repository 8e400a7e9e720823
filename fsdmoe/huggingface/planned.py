"""A wrapped model split for a plan: nothing is connected, nothing computes, no process group is needed."""

from __future__ import annotations

from torch import nn

from fsdmoe.core.placement import SplitMeshes
from fsdmoe.huggingface.adapters import find_experts
from fsdmoe.huggingface.expert_spec import ExpertsSpec
from fsdmoe.huggingface.peft_modules import refuse_unknown_adapters
from fsdmoe.huggingface.tensor_plan import plan_tensors
from fsdmoe.huggingface.wrapped_experts import split_wrapped_experts
from fsdmoe.mesh import Axis
from fsdmoe.tensor_parallel.split import split_tensors


def split_wrapped(model: nn.Module, at: SplitMeshes) -> dict[str, ExpertsSpec]:
    """Leave every parameter of a model on the meta device with its part at ``at``, as
    :func:`fsdmoe.parallelize` would: over ``tp``, then experts and their adapters over ``ep`` and ``etp``.
    Returns the experts by name."""
    refuse_unknown_adapters(model)
    experts = find_experts(model)
    if at.size(Axis.TP) > 1:
        plan_tensors(model, at.size(Axis.TP), experts)
        split_tensors(model, at)
    for name, spec in experts.items():
        split_wrapped_experts(model, name, spec, at)
    return experts
