"""Hugging Face models from their folders. The only file that imports transformers.

Wrapping a model needs nothing of this: :func:`fsdmoe.parallelize` takes any module as it is.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from fsdmoe.errors import ConfigError

try:
    import transformers
except ImportError as error:
    raise ImportError("transformers is needed for Hugging Face models: pip install 'fsdmoe[hf]'") from error


def build_hf_model(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> nn.Module:
    """The causal language model that ``path/config.json`` describes, on the meta device: no memory yet.

    ``dtype`` of its parameters; None takes the configuration's own."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"model.hf: expected a folder with a config.json, got {os.fspath(path)!r}; name one"
        )
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype)
    return model.train()
