"""Four figures that say how evenly the tokens of a step fell on the experts of a layer.

Legend: E experts, L layers.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

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

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def load_figures(load_E: Tensor) -> LoadFigures:
    """Figures of one layer from the number of (token, choice) pairs that each of its experts received."""
    if load_E.ndim != 1 or load_E.numel() == 0:
        raise ValueError(
            f"load_E: expected one count per expert, got a tensor of shape {tuple(load_E.shape)}"
        )
    load_E = load_E.detach().to(device="cpu", dtype=torch.float64)
    num_experts, total = load_E.numel(), float(load_E.sum())
    if not math.isfinite(total):
        return LoadFigures(None, None, None, None)
    dead_fraction = int((load_E == 0).sum()) / num_experts
    if total == 0:
        return LoadFigures(None, None, dead_fraction, None)
    relative_E = load_E * (num_experts / total)  # 1 is an even share
    share_E = load_E / total
    nats = -float(torch.xlogy(share_E, share_E).sum())
    return LoadFigures(
        max_over_mean=float(relative_E.max()),
        cv=float(relative_E.std(correction=0)),
        dead_fraction=dead_fraction,
        # Rounding may leave an even load a hair above log E, and one expert is even by itself.
        entropy=min(1.0, max(0.0, nats / math.log(num_experts))) if num_experts > 1 else 1.0,
    )


def loads_to_host(loads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All layers' counts on the CPU in fp32, through one copy however many layers there are."""
    if not loads:
        return {}
    tensors = [load_E.detach().reshape(-1).float() for load_E in loads.values()]
    joined = torch.cat(tensors).cpu()
    return dict(zip(loads, joined.split([t.numel() for t in tensors]), strict=True))
