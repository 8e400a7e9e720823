"""Configurations of runs that train a Hugging Face folder (``model.hf``): what the folder decides, and what
cannot be asked of a foreign model."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdmoe.config_reader import Problems
from fsdmoe.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.mesh import MeshConfig
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.foreign import hf_fields, hf_limits


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


def hf_problems(
    model: ModelConfig, mesh: MeshConfig, experts: ExpertsConfig, seq_len: int, *, planned: bool
) -> list[tuple[tuple[str, ...], str]]:
    """What a foreign model cannot be asked for: each finding with the keys that it follows from. ``planned``:
    its attention goes by plans whatever the mesh."""
    problems: list[tuple[tuple[str, ...], str]] = []
    if model.hf is not None and (mesh.cp > 1 or mesh.tp > 1 or planned):
        contexts = ("context_parallel.dynamic", "context_parallel.varlen")
        keys = ("mesh.cp", "mesh.tp", *contexts, "data.seq_len")
        problems += [(keys, line) for line in hf_limits(model.hf, seq_len)]
    for key, default in vars(ExpertsConfig()).items():
        if key != "dispatcher" and getattr(experts, key) != default:
            line = (
                f"experts.{key}: a Hugging Face model routes and balances as its config.json says, got "
                f"another value than the default; drop experts.{key} and change the folder's config.json "
                "(router_aux_loss_coef, output_router_logits)"
            )
            problems.append(((f"experts.{key}",), line))
    return problems
