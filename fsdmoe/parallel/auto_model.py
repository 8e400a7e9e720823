"""The entry point for models: fsdmoe's own decoders and Hugging Face models are distinguished here, and
nowhere else. Beyond it both are a :class:`CausalLM`, and whatever differs is a method of their kind: the
native one is here, the wrapped one in :mod:`fsdmoe.huggingface.kind`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.dispatch import Choice
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import parallelize_moe_layers
from fsdmoe.fsdp.materialize import InitFn
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.kind import WrappedKind
from fsdmoe.huggingface.lora import peel
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.huggingface.peft_modules import refuse_adapters
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Meshes
from fsdmoe.models.causal_lm import CausalLM
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.decoder import Decoder, build_model
from fsdmoe.models.init import Initializer, leave_to_load, materialize_buffers
from fsdmoe.models.memory_parts import check_parts, prepare_parts


class NativeKind:
    """A :class:`Decoder`: its modules have plans and rules of their own, so there is little to do. Both kinds
    have these methods, in the order in which :func:`fsdmoe.parallelize` calls them; one object a model."""

    own_attention = False
    """True where attention is the model's own: it follows a plan only where rows are split, or heads over
    ``tp``."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def dtype_of(self, param_dtype: torch.dtype | None) -> None:
        """What each parameter computes in, for ``param_dtype`` of the policy (None where none was given).
        None: as ``PrecisionConfig`` says."""

    def before_split(self, meshes: Meshes, *, fused_layers: bool) -> None:
        """While all parameters are whole: say what ``tp`` splits, and find which layers of a wrapped model
        ours could compute. Here every module says itself what is split, and all layers are ours."""
        kinds = {each for module in self._model.modules() for each in type(module).__mro__}
        if any(kind.__module__.startswith("peft.") for kind in kinds):
            refuse_adapters(self._model)

    def split_experts(self, meshes: Meshes, experts: ExpertsConfig) -> set[Choice]:
        """Split all experts over ``ep`` and ``etp``; which dispatchers they got, and why."""
        layers = [module for module in self._model.modules() if isinstance(module, MoE)]
        choices = parallelize_moe_layers(layers, meshes, experts)
        self._model.sub_batches = max((layer.sub_batches for layer in layers), default=1)
        return choices

    def prepare_parts(self, layers: Sequence[nn.Module], memory: MemoryConfig) -> None:
        """Let every layer know which of its parts are recomputed, once its experts are split; ConfigError for
        a part that no layer has."""
        check_parts(memory, self._model.config)
        prepare_parts(layers, memory)

    def initializer(self, meshes: Meshes, *, seed: int, std: float, loading: bool) -> InitFn:
        """How parameters on the meta device get their values; buffers get theirs now."""
        materialize_buffers(self._model, meshes.device)
        return leave_to_load if loading else Initializer(seed, std, meshes)

    def after_sharding(self, meshes: Meshes, *, small_chunks: bool, fused_loss: bool) -> None:
        """Once weights are loaded. ``small_chunks``: compute the loss in smaller chunks."""
        self._model.lm_head.is_lean |= small_chunks

    def causal_lm(self, *, packed_rows: int = 0) -> CausalLM:
        """The model as the training loop calls it. ``packed_rows``: rows of so many tokens are going to hold
        several documents; refused at once where the model cannot separate them, which a decoder can."""
        return self._model


ModelKind = NativeKind | WrappedKind


def build_any_model(
    config: ModelConfig, experts: ExpertsConfig, adapter: AdapterConfig | None = None
) -> tuple[nn.Module, ModelKind]:
    """The model of a run on the meta device, ours or a Hugging Face folder's (with adapters, if any), and
    which kind it is of."""
    model = build_model(config, experts) if config.hf is None else build_folder_model(config.hf, adapter)
    return model, kind_of(model)


def kind_of(model: nn.Module) -> ModelKind:
    """Native, or wrapped: anything that is not a :class:`Decoder`. A ``PeftModel`` is what is in it."""
    if isinstance(model, Decoder):
        return NativeKind(model)
    inner = peel(model)
    return NativeKind(inner) if isinstance(inner, Decoder) else WrappedKind(inner)


def as_causal_lm(model: nn.Module) -> CausalLM:
    """What a training loop calls: the :class:`Decoder` itself, or a parallel model of transformers behind the
    same signature. Collective for the latter."""
    return kind_of(model).causal_lm()
