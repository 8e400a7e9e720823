"""The front door for models: fsdmoe's own decoders and Hugging Face models are told apart here, and nowhere
else. Behind it both are a :class:`CausalLM`, and whatever differs is a method of their :class:`ModelKind`.
"""

from __future__ import annotations

from torch import nn

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.kind import WrappedKind
from fsdmoe.models.causal_lm import CausalLM
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.decoder import Decoder, build_model
from fsdmoe.models.kind import ModelKind, NativeKind


def build_any_model(config: ModelConfig, experts: ExpertsConfig) -> tuple[nn.Module, ModelKind]:
    """The model of a run on the meta device, ours or a Hugging Face folder's, and which kind it is of."""
    model = build_model(config, experts) if config.hf is None else build_folder_model(config.hf)
    return model, kind_of(model)


def kind_of(model: nn.Module) -> ModelKind:
    """Native, or wrapped: anything that is not a :class:`Decoder`."""
    return NativeKind() if isinstance(model, Decoder) else WrappedKind()


def as_causal_lm(model: nn.Module) -> CausalLM:
    """What a training loop calls: the :class:`Decoder` itself, or a parallel model of transformers behind the
    same signature. Collective for the latter."""
    return kind_of(model).causal_lm(model)
