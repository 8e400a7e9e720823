"""Initial values of a wrapped model built on the meta device: by its own rules, one parameter at a time.

The model's own initialisation (``_init_weights`` of transformers' models, else ``reset_parameters`` of the
module) runs on a *twin* of the model that stays on the meta device but for the one tensor that is wanted. It
is seeded by that tensor's name (and the expert's number), so values depend on nothing else: not on the number
of ranks, not on which of them holds what. Buffers that the meta device left empty (rotary frequencies and
the like) are rebuilt the same way.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import SplitMeshes, placement_of
from fsdmoe.experts.router import Router
from fsdmoe.models.init import fill_experts, seed_of


def meta_twin(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters are all on the meta device; make it before anything is split."""
    memo = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=False)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


class OwnInitializer:
    """An ``init_fn`` for :func:`fsdmoe.fsdp.fully_shard` that follows the model's own rules."""

    def __init__(self, twin: nn.Module, seed: int, at: SplitMeshes) -> None:
        self.twin = twin
        self.seed = seed
        self.at = at

    @torch.no_grad()
    def __call__(self, name: str, parameter: Tensor, out: Tensor) -> None:
        """Write the initial value of ``parameter`` into ``out`` of its local shape."""
        placement = placement_of(parameter, self.at)
        if placement.mesh == "expert":

            def draw(expert: int) -> Tensor:
                one = torch.empty((1, *placement.global_shape[1:]), device=out.device)
                self._draw((name, expert), name, one)
                return one[0]

            fill_experts(out, placement, self.at, draw)
        elif not placement.cuts:
            self._draw((name,), name, out)
        else:
            whole = torch.empty(placement.global_shape, device=out.device)
            self._draw((name,), name, whole)
            for box in placement.boxes(self.at):
                box.view_of(out.view(-1)).copy_(box.slice_of(whole))

    def _draw(self, key: tuple[object, ...], name: str, out: Tensor) -> None:
        """What the model itself would put into the parameter ``name``, for a tensor like ``out``."""
        path, _, attribute = name.rpartition(".")
        owner = self.twin.get_submodule(path)
        meta = owner._parameters[attribute]
        devices = [out.device] if out.device.type == "cuda" else []
        owner._parameters[attribute] = nn.Parameter(out.fill_(math.nan), requires_grad=False)
        try:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(seed_of(self.seed, *key))
                found = run_own_rules(self.twin, path, lambda: not bool(out.isnan().any()))
        finally:
            owner._parameters[attribute] = meta
        if not found:
            raise ConfigError(
                f"model: {name} is on the meta device, and neither _init_weights of the model nor "
                f"reset_parameters of its {type(owner).__name__} gives it a value; add one, pass load=, or "
                "build the model on a real device"
            )


def run_own_rules(twin: nn.Module, path: str, done: Callable[[], bool]) -> bool:
    """Run every rule that may fill the wanted tensor of the module at ``path``; whether one did."""
    owner = twin.get_submodule(path)
    for rule, module in _rules(twin, path):
        rule(module)
    reset = getattr(owner, "reset_parameters", None)
    if not done() and callable(reset):
        reset()
    return done()


def _rules(twin: nn.Module, path: str) -> Iterator[tuple[Callable[[nn.Module], None], nn.Module]]:
    """Pairs (rule, module) from the module up to the root: each by the nearest model that contains it."""
    names = path.split(".") if path else []
    chain = [twin]
    for name in names:
        chain.append(chain[-1].get_submodule(name))
    for depth in range(len(chain) - 1, -1, -1):
        holder = next((m for m in reversed(chain[: depth + 1]) if hasattr(m, "_init_weights")), None)
        if holder is not None:
            yield cast(Callable[[nn.Module], None], holder._init_weights), chain[depth]


@torch.no_grad()
def rebuild_buffers(model: nn.Module, twin: nn.Module, device: torch.device, *, loading: bool) -> None:
    """Give every buffer on the meta device memory and its value; persistent ones may be ``loading`` later."""
    for path, module in model.named_modules():
        wanted = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
        if not wanted:
            continue
        owner = twin.get_submodule(path)
        fresh = {name: _unset(buffer, device) for name, buffer in wanted.items()}
        owner._buffers.update(fresh)
        run_own_rules(twin, path, functools.partial(_all_set, fresh))
        for name, buffer in fresh.items():
            persistent = name not in module._non_persistent_buffers_set
            is_added = name in getattr(module, "added_buffers", ())
            if _is_unset(buffer) and (isinstance(module, Router) or is_added or (loading and persistent)):
                buffer.zero_()
            elif _is_unset(buffer):
                raise ConfigError(
                    f"model: the buffer {path}.{name} is on the meta device, and neither _init_weights of "
                    f"the model nor reset_parameters of its {type(module).__name__} gives it a value; add "
                    "one, or build the model on a real device"
                )
            module._buffers[name] = buffer


def _sentinel(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _unset(buffer: Tensor, device: torch.device) -> Tensor:
    return torch.full(buffer.shape, _sentinel(buffer.dtype), dtype=buffer.dtype, device=device)


def _is_unset(buffer: Tensor) -> bool:
    if not buffer.numel():
        return False
    if buffer.dtype == torch.bool:
        return bool(buffer.all())  # no third value to tell by; a mask that hides nothing would not be kept
    unset = buffer.isnan() if buffer.dtype.is_floating_point else buffer == _sentinel(buffer.dtype)
    return bool(unset.any())


def _all_set(buffers: dict[str, Tensor]) -> bool:
    return not any(map(_is_unset, buffers.values()))
