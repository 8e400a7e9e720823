"""What the engine plans for the parameters of a model, for any degrees of parallelism.

The model is built on the meta device and split as a run splits it: once without ``tp``, and once for each
smallest factor of a ``tp`` that is asked for. The engine's own planner (:mod:`fsdmoe.fsdp.plan`) then lays
its parameters out for every mesh of a search, so groups, flat layouts and buffers are those of a run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import nn

from fsdmoe.core.placement import SplitMeshes
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import split_experts
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy
from fsdmoe.fsdp.memory_plan import PlannedMeshes
from fsdmoe.fsdp.plan import ModelPlan, ParamPlan, UnitPlan, plan_model, resize_plan
from fsdmoe.fsdp.units import select_units
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.huggingface.planned import split_wrapped
from fsdmoe.mesh import Axis, Degrees
from fsdmoe.models import build_model
from fsdmoe.models.config import ModelConfig
from fsdmoe.optim.group_config import GroupConfig
from fsdmoe.optim.groups import freeze
from fsdmoe.parallel.frozen_layers import keep_frozen_in_codes
from fsdmoe.parallel.quantized_layers import apply_recipe
from fsdmoe.parallel.rounded_layers import round_weights
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.tensor_parallel.split import split_tensors


@dataclass(frozen=True)
class ModelSource:
    """What a model is built from."""

    model: ModelConfig
    experts: ExpertsConfig
    adapter: AdapterConfig
    precision: PrecisionConfig
    groups: tuple[GroupConfig, ...] = ()
    """Of parameters; some are not trained."""


@dataclass(frozen=True, eq=False)
class EnginePlan:
    """What the engine plans for one rank."""

    model: ModelPlan
    at: PlannedMeshes
    policy: FSDPPolicy

    @property
    def layers(self) -> list[UnitPlan]:
        """Units of which there are several alike, or else the first."""
        return [unit for unit in self.model.units if unit.repeated] or [self.model.units[0]]

    def stride(self, axis: Axis) -> int:
        """The distance in ranks between two neighbours on a shard axis; see :mod:`fsdmoe.plan.traffic`."""
        size = self.at.size
        expert = size(Axis.EP) * size(Axis.ETP)
        return {Axis.FSDP: size(Axis.TP), Axis.EDP: expert, Axis.EDP_ETP: size(Axis.EP)}.get(axis, 1)


def split_model(source: ModelSource, at: SplitMeshes) -> nn.Module:
    """The model with the parameters of one rank, on the meta device."""
    if source.model.hf is not None:
        model = build_folder_model(source.model.hf, source.adapter)
        freeze(model, source.groups)
        experts = split_wrapped(model, at)
        keep_frozen_in_codes(model, source.precision, at, experts)
        round_weights(model, source.precision, at, experts)
    else:
        model = build_model(source.model, source.experts)
        freeze(model, source.groups)
        split_tensors(model, at)
        for module in model.modules():
            if isinstance(module, MoE):
                split_experts(module.experts, at)
        keep_frozen_in_codes(model, source.precision, at)
        round_weights(model, source.precision, at)
    apply_recipe(model, source.precision)
    return model


def plan_parameters(source: ModelSource, degrees: Degrees, fsdp: FSDPConfig) -> EnginePlan:
    """The plan of a run with these degrees.

    Raises:
        ConfigError: The model cannot be split so.
    """
    at, policy = PlannedMeshes(degrees), FSDPPolicy(fsdp=fsdp, precision=source.precision)
    built = _plan_once(source, fsdp.units, _least_cut(degrees.tp))
    return EnginePlan(resize_plan(built, at, policy), at, policy)


@lru_cache(maxsize=16)
def _plan_once(source: ModelSource, units: tuple[str, ...], tp: int) -> ModelPlan:
    """The plan of the model on one rank for each axis but ``tp``, to be resized."""
    at = PlannedMeshes(Degrees(dp_outer=1, dp_shard=1, cp=1, tp=tp, edp=tp, ep=1, etp=1))
    policy = FSDPPolicy(fsdp=FSDPConfig(units=units), precision=source.precision)
    plan = plan_model(select_units(split_model(source, at), policy), at, policy)
    # Layers that are alike share one tuple of parameters (with the names of the first of them), so that
    # ``resize_plan`` lays it out once for all.
    known: dict[Hashable, tuple[ParamPlan, ...]] = {}
    shared = []
    for unit in plan.units:
        nameless = tuple(replace(param, name=param.name.removeprefix(unit.name)) for param in unit.params)
        shared.append(replace(unit, params=known.setdefault(nameless, unit.params)))
    return replace(plan, units=tuple(shared))


def _least_cut(tp: int) -> int:
    """The smallest factor of ``tp`` above 1: it splits the same parameters as ``tp`` does."""
    return next((n for n in range(2, tp + 1) if tp % n == 0), 1)
