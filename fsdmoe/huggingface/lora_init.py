"""Values of adapters that are on the meta device: peft's own by default, the same whatever the mesh.

A is drawn as a linear layer's weight is, B is zero, so the model computes what it did. DoRA's magnitudes are
the lengths of the rows that the weights have once they are loaded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fsdmoe.checkpoint.adapter_names import is_adapter_name
from fsdmoe.fsdp.materialize import InitFn
from fsdmoe.huggingface.lora import has_factors, is_first_factor, magnitudes
from fsdmoe.models.init import seed_of
from fsdmoe.placement import SplitMeshes, placement_of


def with_adapters(init_fn: InitFn, seed: int, at: SplitMeshes) -> InitFn:
    """``init_fn`` for all parameters but those of adapters."""

    @torch.no_grad()
    def fill(name: str, parameter: nn.Parameter, out: Tensor) -> None:
        if not is_adapter_name(name):
            init_fn(name, parameter, out)
            return
        out.zero_()
        if is_first_factor(name):
            placement = placement_of(parameter, at)
            whole = torch.empty(placement.global_shape)  # on the host: the same numbers on every device
            bound = 1 / math.sqrt(whole.shape[1])
            whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed_of(seed, name)))
            for box in placement.boxes(at):
                box.view_of(out.view(-1)).copy_(box.slice_of(whole))

    return fill


def unset_magnitudes(model: nn.Module) -> list[Any]:
    """Layers whose magnitudes have no values yet; ask before anything is materialised."""
    layers = [module for module in model.modules() if has_factors(module)]
    return [layer for layer in layers if any(m.weight.is_meta for m in magnitudes(layer))]


@torch.no_grad()
def set_magnitudes(layers: list[Any]) -> None:
    """Of sharded layers whose B is zero. Collective."""
    for layer in layers:
        norm_O = layer.get_base_layer().weight.full_tensor().float().norm(dim=1)
        for magnitude in magnitudes(layer):
            magnitude.weight.copy_(norm_O.to(magnitude.weight.dtype))
