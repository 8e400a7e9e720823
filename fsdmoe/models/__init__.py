"""Decoders in Hugging Face style: parameter names and config fields are those of their transformers
counterparts."""

from fsdmoe.models.config import PRESETS, ModelConfig, preset_config
from fsdmoe.models.decoder import Decoder, DecoderOutput, StepCounts, build_model
from fsdmoe.models.feed import Feed
from fsdmoe.models.foreign import as_decoder, build_any_model
from fsdmoe.models.init import Initializer, materialize
from fsdmoe.models.shape import model_shape

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderOutput",
    "Feed",
    "Initializer",
    "ModelConfig",
    "StepCounts",
    "as_decoder",
    "build_any_model",
    "build_model",
    "materialize",
    "model_shape",
    "preset_config",
]
