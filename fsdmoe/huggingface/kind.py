"""What :func:`fsdmoe.parallelize` does for models of others, and how the training loop calls them."""

from __future__ import annotations

import torch
from torch import nn

from fsdmoe.fsdp.materialize import InitFn
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.huggingface.init import OwnInitializer, has_meta_tensors, meta_twin, rebuild_buffers
from fsdmoe.huggingface.loss import fuse_loss
from fsdmoe.huggingface.tensor_plan import plan_tensors
from fsdmoe.huggingface.wrapped_experts import refuse_save_pretrained, synchronise_generation
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models.causal_lm import CausalLM
from fsdmoe.models.init import Initializer
from fsdmoe.tensor_parallel.config import Overlap


class WrappedKind:
    """Any module that is not a decoder of fsdmoe; see :class:`fsdmoe.models.kind.ModelKind`."""

    own_attention = True

    def __init__(self) -> None:
        self._twin: nn.Module | None = None

    def dtype_of(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """That of the parameter itself."""
        return parameter.dtype

    def before_split(self, model: nn.Module, meshes: Meshes, overlap: Overlap) -> None:
        self._twin = meta_twin(model) if has_meta_tensors(model) else None
        if meshes.size(Axis.TP) > 1:
            plan_tensors(model, meshes.size(Axis.TP), overlap)

    def initializer(
        self, model: nn.Module, meshes: Meshes, *, seed: int, std: float, loading: bool
    ) -> InitFn:
        if self._twin is None:  # nothing lacks a value
            return Initializer(seed, std, meshes)
        rebuild_buffers(model, self._twin, meshes.device, loading=loading)
        return OwnInitializer(self._twin, seed, meshes)

    def after_sharding(self, model: nn.Module, *, lean: bool, fused_loss: bool) -> None:
        synchronise_generation(model)
        refuse_save_pretrained(model)
        if fused_loss:
            fuse_loss(model, lean=lean)

    def causal_lm(self, model: nn.Module) -> CausalLM:
        return WrappedCausalLM(model)
