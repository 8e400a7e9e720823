"""Values into shards: from parameters that have them, or, one parameter at a time, from an initialiser.

A model built on the meta device has no memory; each of its parameters is filled in a temporary of its local
shape, this rank keeps its piece, and the temporary is freed. So a model that is larger than one rank can be
built."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fsdmoe.errors import ConfigError
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.placement import local_tensor

InitFn = Callable[[str, nn.Parameter, torch.Tensor], None]
"""``init_fn(name, parameter, out)`` writes the initial value of ``parameter`` into ``out``, a float32 tensor
of its local shape. It must depend on the name alone (not on the order of calls): ranks skip what they hold
nothing of."""


@torch.no_grad()
def fill_group(
    group: ParamGroup, values: dict[str, nn.Parameter], device: torch.device, init_fn: InitFn | None
) -> None:
    """Fill the main weights of ``group`` from ``values``, parameter by parameter, dropping each when done."""
    for param in group.params:
        parameter = values.pop(param.name)
        if group.owned_range(param).numel == 0:
            continue
        group.fill(param, _value(param, parameter, device, init_fn))
    if device.type == "cuda":
        # Else the next buffers are cut out of what the temporaries took, and leave holes between them: of no
        # use to CUDA graphs, whose memory is apart.
        torch.cuda.empty_cache()


def _value(
    param: FlatParam, parameter: nn.Parameter, device: torch.device, init_fn: InitFn | None
) -> torch.Tensor:
    if not parameter.is_meta:
        return local_tensor(parameter)
    if init_fn is None:
        raise ConfigError(
            f"fsdp: {param.name} is on the meta device and has no value; pass init_fn=(name, parameter, "
            "out) to fully_shard, or load the model before"
        )
    out = torch.empty(local_tensor(parameter).shape, dtype=torch.float32, device=device)
    init_fn(param.name, parameter, out)
    return out


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Module buffers are not sharded: they go to the compute device as they are."""
    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if on_meta:
        raise ConfigError(
            f"fsdp: buffers on the meta device have no value: {', '.join(on_meta[:5])}; compute them before "
            "fully_shard"
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
