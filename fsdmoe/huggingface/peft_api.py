"""Adapters for the model of a run. The only file that imports peft.

A model that has adapters needs nothing of this: :mod:`fsdmoe.huggingface.lora` knows them by structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import nearest
from fsdmoe.huggingface.adapters import find_experts
from fsdmoe.huggingface.lora_config import ALL_LINEAR, AdapterConfig

try:
    import peft
except ImportError as error:
    raise ImportError("peft is needed for adapters: pip install 'fsdmoe[adapters]'") from error


def add_adapters(model: nn.Module, config: AdapterConfig, folder: str) -> None:
    """Put adapters around parts of a model on the meta device, in place; its weights are in ``folder``."""
    modules = config.target_modules
    parameters = config.target_parameters
    if modules is None:
        modules = attention_projections(model)
    if parameters is None:
        parameters = expert_parameters(model) if config.adapts_experts else ()
    if not modules and not parameters:
        raise ConfigError(
            "adapter.target_modules: expected attention or fused experts in the model of model.hf, got "
            "neither by structure; name the projections that are to have adapters"
        )
    is_all_linear = ALL_LINEAR in modules  # a word of peft's, not a name
    if not is_all_linear:
        _refuse_unmatched("target_modules", modules, dict(model.named_modules()))
    _refuse_unmatched("target_parameters", parameters, dict(model.named_parameters()))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.rank if config.alpha is None else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        use_dora=config.kind == "dora",
        target_modules=ALL_LINEAR if is_all_linear else list(modules),
        target_parameters=list(parameters) or None,
        base_model_name_or_path=folder,
    )
    try:
        peft.inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"adapter: peft {peft.__version__} refuses it: {error}") from error
    if not config.freeze_base:
        model.requires_grad_(True)


def saved_names(
    model: Any,
    state: dict[str, Any],
    selected_adapters: list[str] | None = None,
    save_embedding_layers: bool | Literal["auto"] = "auto",
) -> set[str]:
    """Which entries of a model's state peft saves with its adapters."""
    stand_ins = {name: torch.empty(value.shape, device="meta") for name, value in state.items()}
    wanted = [
        peft.get_peft_model_state_dict(
            model, stand_ins, adapter_name=adapter, save_embedding_layers=save_embedding_layers
        )
        for adapter in selected_adapters or model.peft_config
    ]
    chosen = {id(value) for found in wanted for value in found.values()}
    return {name for name, value in stand_ins.items() if id(value) in chosen}


def attention_projections(model: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers directly inside of modules that are called attention."""
    return tuple(
        dict.fromkeys(
            name
            for module in model.modules()
            if type(module).__name__.endswith("Attention")
            for name, child in module.named_children()
            if type(child) is nn.Linear
        )
    )


def expert_parameters(model: nn.Module) -> tuple[str, ...]:
    """The names of the weights of fused experts, with the two modules around them."""
    found: dict[str, Any] = {}
    for path, spec in find_experts(model).items():
        place = ".".join(path.split(".")[-2:])
        found |= dict.fromkeys((f"{place}.{spec.gate_up}", f"{place}.{spec.down}"))
    return tuple(found)


def _refuse_unmatched(
    key: str, targets: Sequence[str], parts: Mapping[str, nn.Module | nn.Parameter]
) -> None:
    """A name that fits nothing would leave a part without adapters: where another one fits, peft warns at
    most."""
    usual = {name: part for name, part in parts.items() if isinstance(part, (nn.Linear, nn.Parameter))}
    ends = dict.fromkeys(name.rpartition(".")[2] for name in usual)
    problems = [
        f"adapter.{key}: expected the end of a name in the model of model.hf, got {target!r}, which fits "
        f"none; {nearest(target, ends)}"
        for target in targets
        if not any(name == target or name.endswith(f".{target}") for name in parts)
    ]
    refuse(problems)
