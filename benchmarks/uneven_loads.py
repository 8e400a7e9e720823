"""Loads of experts for the emulated run: recorded or drawn, with one rank in the place of this one.

The emulated fabric knows one rank, and a layer ends when its slowest rank does. So this rank is given, layer
by layer, the experts of the rank that is asked for:

    busiest    that computes most rows; with clones, after they took over theirs. It sends weights of clones
    mean       whose rows are nearest to an even share
    host       whose clones have most rows; only with clones

The step of the slowest of these is the one that a barrier in every layer would give. Routers get biases that
bring about the loads (:mod:`even_routing`), so everything else in a layer is its own.

Legend: L layers, E experts, P EP ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from fsdmoe.experts.dispatch import ClonePolicy, clone_exchange, cloning, flex_cloning
from fsdmoe.experts.routing_file import Recording
from fsdmoe.kernels.clone_plan import ClonePlan
from fsdmoe.kernels.permute import RowPermutation
from fsdmoe.plan.loads import rows_after_cloning

BUSIEST, MEAN, HOST = "busiest", "mean", "host"
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Ranks:
    """The world that loads are spread over."""

    ep: int
    top_k: int
    tokens: int
    """Of a rank."""

    def by_rank(self, loads_LE: Tensor) -> Tensor:
        """``[L, P]``: rows of each rank over an even share."""
        rows_LP = loads_LE.double().unflatten(1, (self.ep, -1)).sum(2)
        return self.ep * rows_LP / rows_LP.sum(1, keepdim=True)

    def after_cloning(self, loads_LE: Tensor, policy: ClonePolicy) -> tuple[Tensor, Tensor]:
        """``[L, P]`` each: rows of a rank and of its clones, over an even share."""
        found = [self._cloned(loads_E, policy) for loads_E in loads_LE]
        rows_LP, clones_LP = (torch.stack(each).double() for each in zip(*found, strict=True))
        mean_L1 = rows_LP.mean(1, keepdim=True)
        return rows_LP / mean_L1, clones_LP / mean_L1

    def describe(self, loads_LE: Tensor, policy: ClonePolicy) -> str:
        """What is asked for, of the busiest rank and of this one, averaged over layers."""
        shares_LP = self.by_rank(loads_LE)
        told = f"busiest rank {_mean(shares_LP.amax(1))} of an even share, this one {_mean(shares_LP[:, 0])}"
        if not policy.slots:
            return told
        rows_LP, clones_LP = self.after_cloning(loads_LE, policy)
        hosts = (clones_LP > 0).double().mean()
        return (
            f"{told}; with clones {_mean(rows_LP.amax(1))} and {_mean(rows_LP[:, 0])}, of these "
            f"{_mean(clones_LP[:, 0])} by its clones; {hosts:.0%} of ranks and layers have clones"
        )

    def _cloned(self, loads_E: Tensor, policy: ClonePolicy) -> tuple[Tensor, Tensor]:
        rows_E = (loads_E.double() / loads_E.sum() * self.tokens * self.top_k).round().int()
        return rows_after_cloning(rows_E, self.ep, policy.slots, policy.least_rows)


def _mean(values_L: Tensor) -> str:
    return f"{float(values_L.mean()):.3f}"


def loads_of(given: str, num_layers: int, num_experts: int, ranks: Ranks) -> Tensor:
    """``[L, E]``: what each expert gets, in any unit: of the recording in ``given``, whose steps and layers
    take turns, or drawn so that the busiest rank has ``given`` times the mean."""
    try:
        skew = float(given)
    except ValueError:
        recorded_NE = Recording.open(given).loads().flatten(0, 1)
        if recorded_NE.shape[1] != num_experts:
            raise SystemExit(
                f"--loads {given}: expected loads of {num_experts} experts, got {recorded_NE.shape[1]}"
            ) from None
        return recorded_NE[torch.arange(num_layers) % len(recorded_NE)].double()
    if not 1 <= skew <= ranks.ep / 2:
        raise SystemExit(f"--loads: expected a recording or 1 to {ranks.ep / 2:g}, got {given}")
    drawn_LE = _drawn(skew, num_layers, num_experts, ranks)
    reached = float(ranks.by_rank(drawn_LE).amax(1).mean())
    if abs(reached - skew) > 0.02 * skew:
        raise SystemExit(f"--loads {given}: {ranks.top_k} choices a token reach {reached:.2f}; take less")
    return drawn_LE


def _drawn(skew: float, num_layers: int, num_experts: int, ranks: Ranks) -> Tensor:
    """Log-normal loads; a token chooses an expert once, so no expert gets more than all tokens."""
    noise_LE = torch.randn(num_layers, num_experts, generator=torch.Generator().manual_seed(1)).double()
    low = 0.0
    high = 8.0
    for _ in range(40):
        middle = (low + high) / 2
        loads_LE = (middle * noise_LE).softmax(1)
        for _ in range(20):
            loads_LE = loads_LE.clamp(max=0.9 / ranks.top_k)
            loads_LE = loads_LE / loads_LE.sum(1, keepdim=True)
        if ranks.by_rank(loads_LE).amax(1).mean() < skew:
            low = middle
        else:
            high = middle
    return loads_LE


def seen_by(role: str, loads_LE: Tensor, ranks: Ranks, policy: ClonePolicy) -> Tensor:
    """``loads_LE`` with ranks so renumbered that rank 0 is the one of this role, in every layer."""
    shares_LP = ranks.by_rank(loads_LE)
    if role == MEAN:
        chosen_L = (shares_LP - 1).abs().argmin(1)
    else:
        rows_LP, clones_LP = (
            ranks.after_cloning(loads_LE, policy) if policy.slots else (shares_LP, shares_LP * 0)
        )
        # Of those that clones made alike, the one that had most: its weights are sent to more ranks.
        chosen_L = (rows_LP + 1e-6 * shares_LP if role == BUSIEST else clones_LP).argmax(1)
    found_LPE = loads_LE.unflatten(1, (ranks.ep, -1)).clone()
    layers_L = torch.arange(len(loads_LE))
    found_LPE[layers_L, chosen_L] = loads_LE.unflatten(1, (ranks.ep, -1))[:, 0]
    found_LPE[:, 0] = loads_LE.unflatten(1, (ranks.ep, -1))[layers_L, chosen_L]
    return found_LPE.flatten(1)


def place_as_one_of_many(
    ids_TK: Tensor, permutation: RowPermutation, counts_PE: Tensor, plan: ClonePlan, source: int
) -> Tensor:
    """:func:`fsdmoe.kernels.clone_plan.place_choices` for a rank whose rows stand for those of all ranks.

    The first ranks' rows stay at home and the last ones' go to clones; a rank for which all others are copies
    of itself sends of each expert's rows, and of each chunk's, the same shares as all ranks together."""
    rows_E = counts_PE.sum(0)
    before_E = rows_E.cumsum(0) - rows_E
    own_E = permutation.ends_G - counts_PE[source]
    ids = ids_TK.clamp(min=0).long()
    numbers_TK = (permutation.slots_RK - own_E[ids]).double()
    spread_TK = (numbers_TK * _GOLDEN).remainder(1.0) * rows_E[ids]
    pieces_TK = torch.searchsorted(plan.ends_F, (before_E[ids] + spread_TK.int()).int(), right=True)
    placed_TK = plan.places_F[pieces_TK.clamp(max=len(plan.ends_F) - 1)]
    return placed_TK.masked_fill(ids_TK < 0, -1)


def _picked(exchange: clone_exchange.ClonesByLink, weight: Tensor) -> Tensor:
    """Experts to send. Where a rank only receives, what it receives is filled with one of its own: products
    of zeros draw less power, and take less time."""
    weight = weight.detach()
    return torch.stack([weight[expert] for expert in exchange.clones.experts or [0]])


@contextlib.contextmanager
def emulated_clones() -> Iterator[None]:
    """Clones as they are between ranks that are all the same."""
    with (
        mock.patch.object(cloning, "place_choices", place_as_one_of_many),
        mock.patch.object(flex_cloning, "place_choices", place_as_one_of_many),
        mock.patch.object(clone_exchange.ClonesByLink, "_picked", _picked),
    ):
        yield
