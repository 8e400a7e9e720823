"""Teaches torch's tools about sharded tensors, because they look for types by name.

``torch.distributed.checkpoint.state_dict`` gathers and splits state dicts for DTensor and for torch's own old
ShardedTensor. It takes any other tensor for a whole one, and has no protocol for other types. So its three
functions that look at types are wrapped, and sharded tensors are handled first. ``foreach`` implementations
of optimizers and of clipping accept a list of types, to which DTensor adds itself too. A module's ``to()``
and its like would convert the views that parameters are: they are refused.

Done by the first ``fully_shard`` of a process: importing changes nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as state_dict_tool
from torch import nn
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as utility_types

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp.sharded_tensor import ShardedTensor

StateDict = dict[str, Any]
Change = Callable[[torch.Tensor], torch.Tensor]


@functools.cache
def teach_torch() -> None:
    """Once a process: what this module's text says."""
    optimizer_types.append(ShardedTensor)
    utility_types.append(ShardedTensor)  # type: ignore[arg-type]
    tool: Any = state_dict_tool
    tool._gather_state_dict = functools.partial(_gather, tool._gather_state_dict)
    tool._distribute_state_dict = functools.partial(_distribute, tool._distribute_state_dict)
    tool._broadcast_state_dict = functools.partial(_broadcast, tool._broadcast_state_dict)


def _gather(
    original: Callable[..., StateDict],
    state_dict: StateDict,
    *,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    **options: Any,
) -> StateDict:
    """Whole tensors in place of sharded ones, on ``ranks_only`` (or all); one at a time."""
    wanted = not ranks_only or dist.get_rank(options.get("pg")) in ranks_only

    def gathered(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            whole = value.full_tensor()  # collective: also where it is not wanted
            if not wanted:
                return None
            return whole.cpu() if cpu_offload else whole
        if isinstance(value, dict):
            return {key: gathered(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(gathered(item) for item in value)
        return value

    return original(gathered(state_dict), cpu_offload=cpu_offload, ranks_only=ranks_only, **options)


def _distribute(
    original: Callable[..., None], full: StateDict, local: StateDict, *args: Any, **options: Any
) -> None:
    """Every rank has the whole: it keeps its pieces."""
    rest = {}
    for key, value in full.items():
        target = local.get(key)
        if isinstance(target, ShardedTensor):
            local[key] = _piece_of(value, target)
        else:
            rest[key] = value
    original(rest, local, *args, **options)


def _broadcast(
    original: Callable[..., None], full: StateDict, local: StateDict, *args: Any, **options: Any
) -> None:
    """Rank 0 has the whole: one tensor at a time is sent, and every rank keeps its pieces."""
    targets = {key: local.pop(key) for key in list(local) if isinstance(local[key], ShardedTensor)}
    rest = {key: value for key, value in full.items() if key not in targets}
    original(rest, local, *args, **options)
    for key, target in targets.items():
        alone = {key: target}
        original({key: full[key]} if key in full else {}, alone, *args, **options)
        if key in alone:  # torch drops what rank 0 does not have
            local[key] = _piece_of(alone[key], target)


@torch.no_grad()
def _piece_of(value: Any, like: ShardedTensor) -> Any:
    """This rank's elements of a whole tensor; a new tensor: the state that is loaded must stay as it is until
    all of it is there."""
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor):
        return value
    return torch.empty_like(like, dtype=value.dtype).copy_(value)


def refuse_conversion(model: nn.Module) -> None:
    """From now on ``model.to()``, ``half()``, ``cuda()`` and their like raise where they would change a
    parameter, which is a view of a buffer that stays. Without it the next forward would."""
    model._apply = functools.partial(_apply_checked, weakref.ref(model))  # type: ignore[method-assign]


def _apply_checked(ref: weakref.ref[nn.Module], change: Change, recurse: bool = True) -> Any:
    model = ref()
    assert model is not None
    for dtype, device in {(p.dtype, p.device) for p in model.parameters()}:
        changed = change(torch.empty(0, dtype=dtype, device=device))
        if (changed.dtype, changed.device) != (dtype, device):
            raise ConfigError(
                f"parallelize: expected a sharded model's parameters to stay {_told(dtype, device)}, got "
                f"{_told(changed.dtype, changed.device)}; move, convert or freeze parameters before "
                "fsdmoe.parallelize (or fully_shard)"
            )
    return type(model)._apply(model, change, recurse)


def _told(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"
