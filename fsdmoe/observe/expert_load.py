"""Four figures that say how evenly the tokens of a step fell on the experts of a layer.

Legend: E experts, L layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoadFigures:
    """Balance of one MoE layer. None where the figure is undefined: no token was routed, or a count is not
    finite."""

    max_over_mean: float | None
    """Load of the busiest expert over the mean: 1 is even, E is everything on one expert. With expert
    parallelism and one expert a rank, a layer takes this many times longer than an even one."""

    cv: float | None
    """Coefficient of variation: standard deviation over the experts divided by the mean; 0 is even."""

    dead_fraction: float | None
    """Share of experts that received nothing."""

    entropy: float | None
    """Entropy of the load divided by that of an even load, log E: 1 is even, 0 is everything on one
    expert."""


def load_figures(loads: Mapping[str, Tensor]) -> dict[str, LoadFigures]:
    """Figures of each layer from the number of (token, choice) pairs that each of its experts received.

    Layers with the same number of experts are worked on together: a model has dozens of them.
    """
    by_size: dict[int, list[str]] = {}
    for layer, load_E in loads.items():
        if load_E.ndim != 1 or load_E.numel() == 0:
            shape = tuple(load_E.shape)
            raise ValueError(f"load of {layer}: expected one count per expert, got a tensor of shape {shape}")
        by_size.setdefault(load_E.numel(), []).append(layer)
    figures: dict[str, LoadFigures] = {}
    for layers in by_size.values():
        load_LE = torch.stack([loads[layer].detach() for layer in layers]).to("cpu", torch.float64)
        figures.update(zip(layers, _figures(load_LE), strict=True))
    return {layer: figures[layer] for layer in loads}


def _figures(load_LE: Tensor) -> list[LoadFigures]:
    num_experts = load_LE.shape[1]
    total_L = load_LE.sum(dim=1)
    share_LE = load_LE / total_L.unsqueeze(1)
    relative_LE = share_LE * num_experts  # 1 is an even share
    entropy_L = torch.ones_like(total_L)  # one expert is even by itself
    if num_experts > 1:
        # Rounding may leave an even load slightly above log E.
        entropy_L = (-torch.xlogy(share_LE, share_LE).sum(dim=1) / math.log(num_experts)).clamp(0.0, 1.0)
    columns = (
        total_L,
        relative_LE.amax(dim=1),
        relative_LE.std(dim=1, correction=0),
        (load_LE == 0).double().mean(dim=1),
        entropy_L,
    )
    return [_layer_figures(*row) for row in torch.stack(columns, dim=1).tolist()]


def _layer_figures(total: float, ratio: float, cv: float, dead: float, entropy: float) -> LoadFigures:
    if not math.isfinite(total):
        return LoadFigures(None, None, None, None)
    if total == 0:
        return LoadFigures(None, None, dead, None)
    return LoadFigures(ratio, cv, dead, entropy)


def loads_to_host(loads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All layers' counts on the CPU in fp32, through one copy however many layers there are."""
    if not loads:
        return {}
    tensors = [load_E.detach().flatten().float() for load_E in loads.values()]
    joined = torch.cat(tensors).cpu()
    return dict(zip(loads, joined.split([t.numel() for t in tensors]), strict=True))
