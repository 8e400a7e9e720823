"""The reference of preference training where adapters are trained: the same model without them.

Trainers of TRL that need a reference (DPO, KTO, GRPO with ``beta``) add a second adapter to a ``PeftModel``,
``ref``, and copy the first into it. A sharded model takes no new adapter and copies no shard into another:

==================================  =========================================================================
adapters that change nothing yet    the copy would change nothing either: TRL is left to switch adapters off
``ref`` was added before sharding   it gets the values of the first
==================================  =========================================================================

TRL adds the copy while a trainer is made, before ``prepare_trainer`` sees it. So the request is noted, and
:func:`settle_reference` does the rest; a forward before that is refused, as with any adapter that came late.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fsdmoe.checkpoint.adapter_names import EMBEDDING_FACTORS, FACTORS
from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import ShardedTensor, engine_of
from fsdmoe.huggingface.lora import has_factors
from fsdmoe.huggingface.peft_modules import modules_to_save

REFERENCE = "ref"
"""TRL's name of the copy."""
_FIRST = "default"


def note_reference(shell: Any, name: str, config: Any) -> bool:
    """Whether the adapter ``name`` is TRL's copy of the first. TRL then copies that onto itself."""
    if name != REFERENCE or config is not shell.peft_config.get(_FIRST):
        return False
    shell.get_parameter = functools.partial(_first_instead, shell.get_parameter)
    shell.peft_config.setdefault(REFERENCE, config)
    return True


def settle_reference(model: nn.Module) -> None:
    """Fill the copy that was noted, or leave it out. Collective where there is one."""
    if "get_parameter" not in vars(model):
        return
    shell: Any = model
    del shell.get_parameter
    names = [name for name, _ in model.named_parameters() if f".{REFERENCE}." in name]
    if names:
        for name in names:
            first: Any = _first_instead(model.get_parameter, name)
            with torch.no_grad():
                model.get_parameter(name).copy_(first.full_tensor())
        engine_of(model).mark_changed()
        return
    del shell.peft_config[REFERENCE]
    if any(True for _ in modules_to_save(model)) or _change_something(model):
        raise ConfigError(
            "adapter: expected adapters that change nothing yet, whose reference is the model without them, "
            f"or an adapter {REFERENCE!r} for a copy of them, got neither; call "
            f"model.add_adapter({REFERENCE!r}, model.peft_config[{_FIRST!r}]) before fsdmoe.parallelize, or "
            "pass a ref_model"
        )


def _first_instead(own: Any, name: str) -> nn.Parameter:
    return own(name.replace(f".{REFERENCE}.", f".{_FIRST}."))


def _change_something(model: nn.Module) -> bool:
    """Whether both factors of any update have values other than 0, on whichever ranks."""
    layers = [module for module in model.modules() if has_factors(module)]
    by_rank = from_all_ranks([[_has_values(layer, name) for name in FACTORS] for layer in layers])
    return any(
        all(any(flags[layer][factor] for flags in by_rank) for factor in range(len(FACTORS)))
        for layer in range(len(layers))
    )


def _has_values(layer: Any, name: str) -> bool:
    factors = [*layer.get_submodule(name).parameters()]
    factors += [*getattr(layer, EMBEDDING_FACTORS[FACTORS.index(name)], {}).values()]
    return any(
        bool((factor.piece if isinstance(factor, ShardedTensor) else factor).any()) for factor in factors
    )
