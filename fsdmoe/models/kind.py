"""What differs between fsdmoe's own decoders and other people's models: asked once, by :class:`ModelKind`.

:func:`fsdmoe.auto_model.kind_of` is the only place that tells the two apart; whatever needs to know asks the
kind. The native one is here, the wrapped one in :mod:`fsdmoe.huggingface.kind`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import nn

from fsdmoe.fsdp.materialize import InitFn
from fsdmoe.mesh import Meshes
from fsdmoe.models.causal_lm import CausalLM
from fsdmoe.models.decoder import Decoder
from fsdmoe.models.init import Initializer, materialize_buffers
from fsdmoe.tensor_parallel.config import Overlap


class ModelKind(Protocol):
    """In the order in which :func:`fsdmoe.parallelize` asks; one object a model."""

    @property
    def own_attention(self) -> bool:
        """Attention is the model's own: it follows a plan only where rows are split, or heads over ``tp``."""
        ...

    @property
    def dtype_of(self) -> Callable[[str, nn.Parameter], torch.dtype] | None:
        """What each parameter computes in where no policy was given; None: as ``PrecisionConfig`` says."""
        ...

    def before_split(self, model: nn.Module, meshes: Meshes, overlap: Overlap) -> None:
        """While all parameters are whole: say what ``tp`` splits."""
        ...

    def initializer(
        self, model: nn.Module, meshes: Meshes, *, seed: int, std: float, loading: bool
    ) -> InitFn:
        """How parameters on the meta device get their values; buffers get theirs now."""
        ...

    def after_sharding(self, model: nn.Module, *, lean: bool, fused_loss: bool) -> None:
        """Once weights are loaded. ``lean``: compute the loss in smaller chunks."""
        ...

    def causal_lm(self, model: nn.Module) -> CausalLM:
        """The model as the training loop calls it."""
        ...


class NativeKind:
    """A :class:`Decoder`: its modules have plans and rules of their own, so there is little to do."""

    own_attention = False
    dtype_of = None

    def before_split(self, model: nn.Module, meshes: Meshes, overlap: Overlap) -> None:
        """Nothing: every module says itself what ``tp`` splits."""

    def initializer(
        self, model: nn.Module, meshes: Meshes, *, seed: int, std: float, loading: bool
    ) -> InitFn:
        materialize_buffers(model, meshes.device)
        return Initializer(seed, std, meshes)

    def after_sharding(self, model: nn.Module, *, lean: bool, fused_loss: bool) -> None:
        cast(Decoder, model).lm_head.is_lean |= lean

    def causal_lm(self, model: nn.Module) -> CausalLM:
        return cast(Decoder, model)
