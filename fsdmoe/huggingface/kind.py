"""What :func:`fsdmoe.parallelize` does for wrapped models, and how the training loop calls them."""

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
    """Any module that is not a decoder of fsdmoe; see :class:`fsdmoe.auto_model.ModelKind`."""

    own_attention = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._twin: nn.Module | None = None

    @staticmethod  # the engine keeps it, and must not keep the twin with it
    def dtype_of(name: str, parameter: nn.Parameter) -> torch.dtype:
        """That of the parameter itself."""
        return parameter.dtype

    def before_split(self, meshes: Meshes, overlap: Overlap) -> None:
        self._twin = meta_twin(self._model) if has_meta_tensors(self._model) else None
        if meshes.size(Axis.TP) > 1:
            plan_tensors(self._model, meshes.size(Axis.TP), overlap)

    def initializer(self, meshes: Meshes, *, seed: int, std: float, loading: bool) -> InitFn:
        if self._twin is None:  # nothing lacks a value
            return Initializer(seed, std, meshes)
        rebuild_buffers(self._model, self._twin, meshes.device, loading=loading)
        return OwnInitializer(self._twin, seed, meshes)

    def after_sharding(self, *, lean: bool, fused_loss: bool) -> None:
        synchronise_generation(self._model)
        refuse_save_pretrained(self._model)
        if fused_loss:
            fuse_loss(self._model, lean=lean)

    def causal_lm(self) -> CausalLM:
        return WrappedCausalLM(self._model)
