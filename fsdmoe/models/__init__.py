"""Decoders in Hugging Face style: parameter names and config fields are those of their transformers
counterparts."""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.models.causal_lm import CausalLM, LogitsOutput, LossOutput, StepCounts
    from fsdmoe.models.config import PRESETS, ModelConfig, preset_config
    from fsdmoe.models.decoder import Decoder, build_model
    from fsdmoe.models.flops import training_flops_per_token
    from fsdmoe.models.init import Initializer, materialize

__getattr__ = lazy_names(__name__, __file__)
