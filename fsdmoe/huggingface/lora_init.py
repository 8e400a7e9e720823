"""Values of adapters that are on the meta device: peft's own by default, the same whatever the mesh.

A is drawn as a linear layer's weight is (B as normal numbers, for an embedding), the other factor is zero, so
the model computes what it did. DoRA's magnitudes are the lengths of the rows that the weights have once they
are loaded, and a module that is trained as a whole (``modules_to_save``) begins as a copy of what was loaded:
both are not numbers until then, unless the load brought them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdmoe.checkpoint.adapter_names import COPIES, EMBEDDING_FACTORS, MAGNITUDE, ORIGINAL, is_adapter_name
from fsdmoe.fsdp import ShardedTensor
from fsdmoe.fsdp.materialize import InitFn
from fsdmoe.huggingface.lora import has_factors, is_first_factor, is_transposed, magnitudes
from fsdmoe.huggingface.peft_modules import modules_to_save
from fsdmoe.models.init import seed_of
from fsdmoe.placement import SplitMeshes, placement_of


def with_adapters(init_fn: InitFn, seed: int, at: SplitMeshes) -> InitFn:
    """``init_fn`` for all parameters but those of adapters."""

    @torch.no_grad()
    def fill(name: str, parameter: nn.Parameter, out: Tensor) -> None:
        if not is_adapter_name(name):
            init_fn(name, parameter, out)
            return
        parts = name.split(".")
        out.fill_(math.nan if MAGNITUDE in parts or COPIES in parts else 0.0)
        if is_first_factor(name) or EMBEDDING_FACTORS[1] in parts:
            placement = placement_of(parameter, at)
            whole = torch.empty(placement.global_shape)  # on the host: the same numbers on every device
            random = torch.Generator().manual_seed(seed_of(seed, name))
            if is_first_factor(name):
                bound = 1 / math.sqrt(whole.shape[1])
                whole.uniform_(-bound, bound, generator=random)
            else:
                whole.normal_(generator=random)
            for box in placement.boxes(at):
                box.view_of(out.view(-1)).copy_(box.slice_of(whole))

    return fill


class LaterValues:
    """Parts of adapters that get their values from the model's own weights once those are there; to be made
    while nothing is split."""

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if has_factors(module)]
        self._layers: list[Any] = [
            layer for layer in layers if any(magnitude.weight.is_meta for magnitude in magnitudes(layer))
        ]
        copies = [
            _Copy(copy, wrapper.get_submodule(ORIGINAL))
            for _, wrapper in modules_to_save(model)
            for copy in wrapper.get_submodule(COPIES).children()
        ]
        self._unset = [copy for copy in copies if any(p.is_meta for p in copy.module.parameters())]
        self._others = [copy for copy in copies if copy not in self._unset]

    @torch.no_grad()
    def follow_load(self) -> None:
        """Copies that are still what the model has are to be what it will have."""
        for copy in self._others:
            if all(type(mine) is nn.Parameter and torch.equal(mine, own) for mine, own in copy.parameters()):
                self._unset.append(copy)
                for parameter in copy.module.parameters():
                    parameter.fill_(math.nan)

    @torch.no_grad()
    def set(self) -> None:
        """Where a load did not. Collective."""
        for layer in self._layers:
            over = 0 if is_transposed(layer) else 1
            norm_O = layer.get_base_layer().weight.full_tensor().float().norm(dim=over)
            for magnitude in magnitudes(layer):
                if _is_unset(magnitude.weight):
                    magnitude.weight.copy_(norm_O.to(magnitude.weight.dtype))
        for copy in self._unset:
            if any(_is_unset(parameter) for parameter in copy.module.parameters()):
                for mine, own in copy.parameters():
                    mine.copy_(_whole(own))
                for name, buffer in copy.module.named_buffers():
                    buffer.copy_(copy.original.get_buffer(name))


class _Copy(NamedTuple):
    """A module that is trained as a whole, and what it is a copy of."""

    module: nn.Module
    original: nn.Module

    def parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(mine, self.original.get_parameter(name)) for name, mine in self.module.named_parameters()]


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, ShardedTensor) else parameter


def _is_unset(parameter: Tensor) -> bool:
    """The same on all ranks."""
    return bool(_whole(parameter).isnan().all())
