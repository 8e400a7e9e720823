"""What :func:`fsdmoe.parallelize` does for wrapped models, and how the training loop calls them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import version

import torch
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import computes_on_dtensor
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.dispatch import Choice
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import parallelize_moe_layers
from fsdmoe.fsdp.dtensor import is_split_by_dtensors
from fsdmoe.fsdp.materialize import InitFn
from fsdmoe.huggingface.adapters import find_experts, warn_of_unknown_moe
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.huggingface.expert_spec import ExpertsSpec
from fsdmoe.huggingface.fused_layers import FusedLayers
from fsdmoe.huggingface.generation import generate_together
from fsdmoe.huggingface.init import OwnInitializer, meta_twin, rebuild_buffers
from fsdmoe.huggingface.kept_float32 import DtypeOf, dtype_of, widen_buffers
from fsdmoe.huggingface.lora_init import InitialFactor, LaterValues, initial_factors, with_adapters
from fsdmoe.huggingface.lora_life import connect_adapters
from fsdmoe.huggingface.lora_routers import connect_other_parameters
from fsdmoe.huggingface.loss import fuse_loss
from fsdmoe.huggingface.memory_parts import prepare_parts
from fsdmoe.huggingface.no_rows import take_calls_without_rows
from fsdmoe.huggingface.peft_modules import refuse_unknown_adapters
from fsdmoe.huggingface.routing import apply_policies
from fsdmoe.huggingface.tensor_plan import plan_tensors
from fsdmoe.huggingface.vision import run_towers_alike
from fsdmoe.huggingface.wrapped_experts import (
    parallelize_wrapped_experts,
    refuse_save_pretrained,
    stay_on_device,
)
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models.causal_lm import CausalLM
from fsdmoe.models.init import Initializer, leave_to_load

logger = logging.getLogger(__name__)


class WrappedKind:
    """Any module that is not a decoder of fsdmoe; see :class:`fsdmoe.parallel.auto_model.NativeKind`."""

    own_attention = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._twin: nn.Module | None = None
        self._moe_layers: dict[str, MoE] = {}
        self._experts: dict[str, ExpertsSpec] = {}
        self._later: LaterValues | None = None
        self._initial: dict[str, InitialFactor] = {}
        """Of adapters, by parameter."""
        self._on_dtensors: list[str] = []
        """Modules that somebody else has split."""
        self._fused: FusedLayers | None = None

    def dtype_of(self, param_dtype: torch.dtype | None) -> DtypeOf | None:
        """That of the parameter itself, where no policy says one; what the model keeps in float32 is kept."""
        return dtype_of(self._model, param_dtype)  # the engine keeps it, and must not keep the twin with it

    def before_split(self, meshes: Meshes, *, fused_layers: bool) -> None:
        widen_buffers(self._model)
        tensors = (*self._model.parameters(), *self._model.buffers())
        self._twin = meta_twin(self._model) if any(t.is_meta for t in tensors) else None
        refuse_unknown_adapters(self._model)
        self._later = LaterValues(self._model)
        self._initial = initial_factors(self._model)
        self._moe_layers = {n: m for n, m in self._model.named_modules() if isinstance(m, MoE)}
        for name, module in self._model.named_modules():
            if any(computes_on_dtensor(p) for p in module.parameters(recurse=False)):
                self._on_dtensors.append(name)
        if self._on_dtensors and type(self._model).__module__.startswith("transformers."):
            _require_summed_norms()
        skip = {id(inner) for layer in self._moe_layers.values() for inner in layer.modules()}
        skip |= {id(self._model.get_submodule(name)) for name in self._on_dtensors}
        # Found once, while whole: the shapes of its parameters tell what an experts module is.
        self._experts = find_experts(self._model, skip=skip)
        connect_other_parameters(self._model, self._experts)
        if fused_layers:  # before tp gives modules forwards and hooks
            self._fused = FusedLayers(self._model, skip=skip, split_before=bool(self._on_dtensors))
        if meshes.size(Axis.TP) > 1 and not is_split_by_dtensors(self._model.parameters(), meshes):
            plan_tensors(self._model, meshes.size(Axis.TP), [*self._experts, *self._moe_layers])

    def split_experts(self, meshes: Meshes, experts: ExpertsConfig) -> set[Choice]:
        choices = parallelize_moe_layers(self._moe_layers.values(), meshes, experts)
        for name, spec in self._experts.items():
            choices.add(parallelize_wrapped_experts(self._model, name, spec, meshes, experts))
        apply_policies(self._model, self._experts, experts, meshes)
        if meshes.rank(Axis.WORLD) == 0:
            warn_of_unknown_moe(self._model, [*self._experts, *self._moe_layers, *self._on_dtensors])
        return choices

    def prepare_parts(self, layers: Sequence[nn.Module], memory: MemoryConfig) -> None:
        prepare_parts(self._model, layers, memory)

    def initializer(self, meshes: Meshes, *, seed: int, std: float, loading: bool) -> InitFn:
        if loading and self._later is not None:
            self._later.follow_load()
        own: InitFn = leave_to_load if loading else Initializer(seed, std, meshes)
        if self._twin is not None:  # something lacks a value
            rebuild_buffers(self._model, self._twin, meshes.device, loading=loading)
            own = leave_to_load if loading else OwnInitializer(self._twin, seed, meshes)
        return with_adapters(own, seed, meshes, self._initial)

    def after_sharding(self, meshes: Meshes, *, small_chunks: bool, fused_loss: bool) -> None:
        if self._later is not None:
            self._later.set()
        run_towers_alike(self._model, meshes)
        stay_on_device(self._model, meshes)
        generate_together(self._model)
        refuse_save_pretrained(self._model)
        connect_adapters(self._model)
        if fused_loss:
            fuse_loss(self._model, lean=small_chunks)
        if self._fused is not None:  # after the loss, which wants the head's own forward
            line = self._fused.apply()
            self._model.left_layers = self._fused.left  # type: ignore[assignment]  # for fsdmoe.explain
            if meshes.rank(Axis.WORLD) == 0:
                logger.info("fused layers: %s", line)
        take_calls_without_rows(self._model)  # last: its hooks are around all of it

    def causal_lm(self, *, packed_rows: int = 0) -> CausalLM:
        return WrappedCausalLM(self._model, packed_rows=packed_rows)


def _require_summed_norms() -> None:
    """Refuse a split by an older transformers: norms over heads (``q_norm``) see the heads of their rank
    alone, and before 5.22 nothing sums their gradients over ``tp`` (with 5.17 they are halved at tp 2)."""
    found = version("transformers")
    if tuple(int(part) for part in found.split(".")[:2]) < (5, 22):
        raise ConfigError(
            f"mesh.tp: transformers {found} split this model by its tp_plan, but does not sum the "
            "gradients of norms over heads, as it does from 5.22 on; install a newer one, or pass the model "
            "whole and let fsdmoe.parallelize split it"
        )
