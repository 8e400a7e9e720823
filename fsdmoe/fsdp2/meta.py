"""Models from the meta device: sharded without values, which ``reset_parameters()`` or a state dict bring.

As under FSDP2, parameters are initialised when they are sharded already. Random values are drawn for one
whole parameter at a time, alike on all ranks, so that they are those of one process. What nobody filled is
NaN, and named before the first forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError


def place_meta_buffers(root: nn.Module, device: torch.device) -> bool:
    """Give buffers memory, so that their module can fill them; whether there were any."""
    found = False
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                found = True
                value = torch.nan if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, value, device=device)
    return found


def leave_empty(name: str, parameter: nn.Parameter, out: torch.Tensor) -> None:
    """The initialiser of a parameter without values."""
    out.fill_(torch.nan)


def await_values(root: nn.Module) -> None:
    """Let parameters be filled with random values, and refuse a first forward before all of them are. Ranks
    draw from the seed of the first. Collective."""
    (seed, *_) = from_all_ranks(torch.initial_seed())
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in root.parameters():
        new = torch.Generator(parameter.device)
        layout = parameter._layout  # type: ignore[attr-defined]
        layout.draws = generators.setdefault(parameter.device, new)
    for generator in generators.values():
        generator.manual_seed(seed)

    def before_first_forward(*_: Any) -> None:
        _require_values(root)
        handle.remove()

    # In front of the hook that gathers, while all parameters are sharded.
    handle = root.register_forward_pre_hook(before_first_forward, prepend=True)


def _require_values(root: nn.Module) -> None:
    pieces = [(name, parameter.piece) for name, parameter in root.named_parameters()]  # type: ignore[attr-defined]
    own = [name for name, values in (*pieces, *root.named_buffers()) if bool(values.isnan().any())]
    missing = sorted({name for names in from_all_ranks(own[:1]) for name in names})
    if missing:
        raise ConfigError(
            f"fsdp2: {missing[0]} was on the meta device and has no values yet; initialise it after "
            "fully_shard (reset_parameters() of its module), or load a state dict"
        )
