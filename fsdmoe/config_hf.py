"""Configurations of runs that train a Hugging Face folder (``model.hf``): what the folder decides, and what
cannot be asked of a wrapped model."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdmoe.checkpoint.agree import from_first
from fsdmoe.checkpoint.catalog import resolve
from fsdmoe.config_attention import Findings, Sections
from fsdmoe.config_reader import Problems
from fsdmoe.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.huggingface.folder import hf_fields, hf_limits
from fsdmoe.models.config import ModelConfig


def apply_hf(values: dict[str, Any], problems: Problems) -> None:
    """Fill the ``model`` section from the folder. A written key that says otherwise is a mistake; one that
    says the same may come from a printed configuration."""
    try:
        fields = hf_fields(values["hf"])
    except (ConfigError, ImportError) as error:
        problems.extend(error.problems if isinstance(error, ConfigError) else [f"model.hf: {error}"])
        values["hf"] = None  # so that what is wrong elsewhere is reported too
        return
    stated = {f.name: f.default for f in dataclasses.fields(ModelConfig)} | fields
    for key in [key for key in values if key in stated and key != "hf"]:
        written = None if values[key] == "none" else values[key]
        if str(written) != str(stated[key]):
            problems.append(
                f"model.{key}: the folder of model.hf means {stated[key]!r}, got {written!r}; drop the key"
            )
    values.update(fields)


def require_weights(folder: str | None) -> str | None:
    """``model.hf`` again, once it is sure that there are weights in it. Collective; for a run that has no
    checkpoint to resume, before its model is built."""
    if folder is not None and not from_first(lambda: resolve(folder)[1]):
        raise ConfigError(
            f"model.hf: expected weights (*.safetensors) beside the config.json, got none in {folder!r}; "
            "download them too, or make new ones there: "
            "AutoModelForCausalLM.from_config(config).save_pretrained(folder)"
        )
    return folder


def hf_problems(config: Sections) -> Findings:
    """What a wrapped model cannot be asked for: each finding with the keys that it follows from."""
    problems: Findings = []
    fixes = _whole_attention(config)
    if config.model.hf is not None and fixes:
        contexts = ("context_parallel.dynamic", "context_parallel.varlen")
        keys = ("mesh.cp", "mesh.tp", *contexts, "data.seq_len")
        problems += [(keys, line) for line in hf_limits(config.model.hf, config.data.seq_len, fixes)]
    for key, default in vars(ExpertsConfig()).items():
        if key != "dispatcher" and getattr(config.experts, key) != default:
            line = (
                f"experts.{key}: a Hugging Face model routes and balances as its config.json says, got "
                f"another value than the default; drop experts.{key} and change the folder's config.json "
                "(router_aux_loss_coef, output_router_logits)"
            )
            problems.append(((f"experts.{key}",), line))
    return problems


def _whole_attention(config: Sections) -> list[str]:
    """The settings without which the model's attention would be its own, of those that are in use."""
    mesh, context = config.mesh, config.context_parallel
    in_use = {
        "mesh.cp = 1": mesh.cp > 1,
        "mesh.tp = 1": mesh.tp > 1,
        "context_parallel.dynamic = false": context.dynamic,
        "context_parallel.varlen = never": context.varlen == "always",
    }
    return [fix for fix, is_used in in_use.items() if is_used]
