"""Values of adapters that are on the meta device: peft's own by default, the same whatever the mesh.

A is drawn as a linear layer's weight is (B as normal numbers, for an embedding), the other factor is zero, so
the model computes what it did; ``init_lora_weights = "gaussian"`` draws A from a normal distribution. Other
ways to begin need a model on a real device, or a checkpoint that has the adapters. DoRA's magnitudes are the
lengths of the rows that the weights have once they are loaded, and a module that is trained as a whole
(``modules_to_save``) begins as a copy of what was loaded: both are not numbers until then, unless the load
brought them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdmoe.checkpoint.adapter_names import (
    COPIES,
    EMBEDDING_FACTORS,
    FACTORS,
    MAGNITUDE,
    ORIGINAL,
    is_adapter_name,
)
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import SplitMeshes, placement_of
from fsdmoe.fsdp import ShardedTensor
from fsdmoe.fsdp.materialize import InitFn
from fsdmoe.huggingface.lora import has_factors, is_first_factor, is_transposed, magnitudes
from fsdmoe.huggingface.peft_modules import modules_to_save
from fsdmoe.models.init import seed_of


class InitialFactor(NamedTuple):
    """How a factor of an adapter begins."""

    stated: Any
    """``init_lora_weights``."""
    rank: int

    @property
    def is_drawn(self) -> bool:
        """Here, from a seed, by itself."""
        return self.stated in (True, None, "gaussian")


def initial_factors(model: nn.Module) -> dict[str, InitialFactor]:
    """Of each factor of the adapters in ``model``, by its name."""
    configs = getattr(model, "peft_config", None) or {}
    found = {}
    for path, layer in model.named_modules():
        for name, _ in layer.named_parameters() if has_factors(layer) else ():
            word, _, rest = name.partition(".")
            if word in (*FACTORS, *EMBEDDING_FACTORS):
                adapter = rest.split(".")[0]
                stated = getattr(configs.get(adapter), "init_lora_weights", True)
                found[f"{path}.{name}"] = InitialFactor(stated, layer.r[adapter])
    return found


def with_adapters(
    init_fn: InitFn, seed: int, at: SplitMeshes, initial: Mapping[str, InitialFactor]
) -> InitFn:
    """``init_fn`` for all parameters but those of adapters."""

    @torch.no_grad()
    def fill(name: str, parameter: nn.Parameter, out: Tensor) -> None:
        if not is_adapter_name(name):
            init_fn(name, parameter, out)
            return
        parts = name.split(".")
        factor = initial.get(name)
        is_left = factor is not None and not factor.is_drawn
        out.fill_(math.nan if is_left or MAGNITUDE in parts or COPIES in parts else 0.0)
        if is_left:
            return
        if is_first_factor(name) or EMBEDDING_FACTORS[1] in parts:
            placement = placement_of(parameter, at)
            whole = torch.empty(placement.global_shape)  # on the host: the same numbers on every device
            random = torch.Generator().manual_seed(seed_of(seed, name))
            if factor is not None and factor.stated == "gaussian" and is_first_factor(name):
                whole.normal_(std=1 / factor.rank, generator=random)
            elif is_first_factor(name):
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
        self._model = model
        layers: list[Any] = [layer for layer in model.modules() if magnitudes(layer)]
        self._layers = [layer for layer in layers if any(each.weight.is_meta for each in magnitudes(layer))]
        self._other_layers = [layer for layer in layers if layer not in self._layers]
        self._factors = {
            name: factor
            for name, factor in initial_factors(model).items()
            if not factor.is_drawn and model.get_parameter(name).is_meta
        }
        copies = [
            _Copy(copy, wrapper.get_submodule(ORIGINAL))
            for _, wrapper in modules_to_save(model)
            for copy in wrapper.get_submodule(COPIES).children()
        ]
        self._unset = [copy for copy in copies if any(p.is_meta for p in copy.module.parameters())]
        self._others = [copy for copy in copies if copy not in self._unset]

    @torch.no_grad()
    def follow_load(self) -> None:
        """Copies that are still what the model has are to be what it will have, and so are magnitudes of
        adapters that add nothing yet."""
        for layer in self._other_layers:
            weight = layer.get_base_layer().weight
            if weight.is_meta or not (type(weight) is nn.Parameter or isinstance(weight, DTensor)):
                continue  # has no lengths, or is quantised
            for adapter, magnitude in layer._modules[MAGNITUDE].items():
                if _adds_nothing(layer, adapter) and _is_norm(magnitude.weight, layer):
                    magnitude.weight.fill_(math.nan)
            self._layers.append(layer)
        for copy in self._others:
            if all(type(mine) is nn.Parameter and torch.equal(mine, own) for mine, own in copy.parameters()):
                self._unset.append(copy)
                for parameter in copy.module.parameters():
                    parameter.fill_(math.nan)

    @torch.no_grad()
    def set(self) -> None:
        """Where a load did not. Collective."""
        for name, factor in self._factors.items():
            if _is_unset(self._model.get_parameter(name)):
                raise ConfigError(
                    f'init_lora_weights: expected True or "gaussian" for adapters on the meta device, got '
                    f"{factor.stated!r} and no values of {name}; build the model on a real device, or load a "
                    "checkpoint with these adapters"
                )
        for layer in self._layers:
            unset = [magnitude.weight for magnitude in magnitudes(layer) if _is_unset(magnitude.weight)]
            if unset:
                norm_O = _norm(layer)
                for weight in unset:
                    weight.copy_(norm_O.to(weight.dtype))
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
    return parameter.full_tensor() if isinstance(parameter, ShardedTensor | DTensor) else parameter


def _norm(layer: Any) -> Tensor:
    """The lengths of the rows of its weight."""
    over = 0 if is_transposed(layer) else 1
    return _whole(layer.get_base_layer().weight).float().norm(dim=over)


def _adds_nothing(layer: Any, adapter: str) -> bool:
    """Whether the factor that begins as zero still is."""
    if adapter in layer.lora_embedding_A:
        return not _whole(layer.lora_embedding_A[adapter]).any()
    return not _whole(layer.lora_B[adapter].weight).any()


def _is_norm(magnitude: Tensor, layer: Any) -> bool:
    """Up to the rounding of both."""
    found, norm_O = _whole(magnitude).float(), _norm(layer)
    return torch.allclose(found.view(-1), norm_O.to(found.device), rtol=1e-2)


def _is_unset(parameter: Tensor) -> bool:
    """The same on all ranks."""
    return bool(_whole(parameter).isnan().all())
