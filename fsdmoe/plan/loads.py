"""How unevenly routing loads the ranks of a plan: by a number, or as it was recorded.

A layer ends when its busiest rank does, so experts and their rows take the time of that rank. Memory is that
of the rank whose layers together got most. Both are multiples of an even share::

    choices of experts 0 1 2 3      shares of ranks, ep 2      time                 memory
    layer 0            4 2 1 1      1.5  0.5                   (1.5 + 1.25) / 2     (1.5 + 0.75) / 2
    layer 1            1 2 3 2      0.75 1.25

With clones of hot experts the shares are those after the clones took over what they compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import divisors
from fsdmoe.experts.routing_file import Recording
from fsdmoe.kernels.clone_plan import plan_clones


class Skew(NamedTuple):
    """Of a busiest rank, over an even share."""

    time: float = 1.0
    """In a layer, on average over layers and steps."""
    memory: float = 1.0
    """In all layers of a step, in the worst step."""


EVEN = Skew()
MOST_PLANS = 32
"""Of the layers and steps of a recording, or of drawn loads, so many are planned with clones."""


class Cloning(NamedTuple):
    """Of hot experts (``experts.clones``)."""

    num_experts: int
    slots: int
    least_rows: int
    pairs: int
    """Of a row and an expert, that a rank brings to a layer."""


@dataclass(frozen=True, eq=False)  # remembered by identity
class Loads:
    """Even ones, where nothing is said."""

    given: Skew = EVEN
    recorded: Mapping[int, Skew] = field(default_factory=dict)
    """By ``ep``."""
    choices_SLE: Tensor | None = None
    """What was recorded."""

    def skew(self, ep: int, cloning: Cloning | None = None) -> Skew:
        """Of experts over so many ranks."""
        if ep == 1:
            return EVEN
        found = self.recorded.get(ep, self.given)
        return found if cloning is None or found.time == 1 else _cloned_skew(self, ep, cloning)


def read_loads(skew: float | None, path: str | None, num_experts: int) -> Loads:
    """Those of the options ``--skew`` or ``--loads``.

    Raises:
        ConfigError: Both are given, a skew is less than even, or a recording is none, or of another model.
    """
    if skew is not None and path is not None:
        raise ConfigError("--skew: expected a number or --loads, got both; drop one")
    if skew is not None:
        if not skew >= 1:
            raise ConfigError(f"--skew: expected 1 (even) or more, got {skew:g}; correct it")
        return Loads(Skew(skew, skew))
    if path is None:
        return Loads()
    if not Path(path).expanduser().exists():
        raise ConfigError(f"--loads: expected what experts.record wrote, got no path {path!r}; correct it")
    try:
        recording = Recording.open(path)
    except ConfigError as error:  # which speaks of the key that replays it
        raise ConfigError(
            *(f"--loads: {line.removeprefix('replay: ')}" for line in error.problems)
        ) from error
    if recording.num_experts != num_experts:
        raise ConfigError(
            f"--loads: expected a recording of {num_experts} experts, as the model has, got one of "
            f"{recording.num_experts} in {path!r}; record this model"
        )
    loads_SLE = recording.loads()
    if not loads_SLE.any():
        raise ConfigError(f"--loads: expected recorded choices, got none in {path!r}; record more steps")
    return Loads(recorded={ep: skew_of(loads_SLE, ep) for ep in divisors(num_experts)}, choices_SLE=loads_SLE)


def skew_of(loads_SLE: Tensor, ep: int) -> Skew:
    """Of choices of experts by step and layer; a layer without any in a step does not count."""
    by_rank_SLP = loads_SLE.double().unflatten(2, (ep, -1)).sum(3)
    total_SL1 = by_rank_SLP.sum(2, keepdim=True)
    share_SLP = torch.where(total_SL1 > 0, ep * by_rank_SLP / total_SL1, torch.nan)
    return Skew(
        share_SLP.amax(2).nanmean().item(),
        share_SLP.nanmean(1).nan_to_num().amax().item(),
    )


@lru_cache(maxsize=1024)
def _cloned_skew(loads: Loads, ep: int, cloning: Cloning) -> Skew:
    """By the plans of clones that a run would make, of some layers and steps."""
    before = loads.recorded.get(ep, loads.given)
    shares_NE = _shares(loads, ep, cloning.num_experts)
    counts_NE = (shares_NE * cloning.pairs).round().int()  # of each rank: all bring the same
    rows = (rows_after_cloning(each_E, ep, cloning.slots, cloning.least_rows)[0] for each_E in counts_NE)
    busiest = [float(rows_P.amax()) for rows_P in rows]
    share = max(1.0, sum(busiest) / len(busiest) / cloning.pairs)
    return Skew(min(share, before.time), min(share, before.memory))


@lru_cache(maxsize=1024)
def _shares(loads: Loads, ep: int, num_experts: int) -> Tensor:
    """``[N, E]``: what experts get of a layer's choices, spread over a recording; or drawn from a log-normal
    distribution that is as wide as the given skew wants it."""
    if loads.choices_SLE is not None:
        choices_NE = loads.choices_SLE.flatten(0, 1).double()
        choices_NE = choices_NE[choices_NE.sum(1) > 0]
        some = torch.linspace(0, len(choices_NE) - 1, min(MOST_PLANS, len(choices_NE))).long()
        return choices_NE[some] / choices_NE[some].sum(1, keepdim=True)
    noise_NE = torch.randn(MOST_PLANS, num_experts, generator=torch.Generator().manual_seed(1)).double()
    low, high = 0.0, 8.0
    for _ in range(30):
        width = (low + high) / 2
        found = skew_of((width * noise_NE).softmax(1).unsqueeze(0), ep).time
        low, high = (width, high) if found < loads.given.time else (low, width)
    return (low * noise_NE).softmax(1)


def rows_after_cloning(counts_E: Tensor, ep: int, num_slots: int, least_rows: int) -> tuple[Tensor, Tensor]:
    """``[P]`` each: what ranks compute, and what of it is by clones, of ranks that all bring ``counts_E``."""
    plan = plan_clones(counts_E.expand(ep, -1), num_slots, least_rows)
    rows_F = torch.diff(plan.ends_F, prepend=plan.ends_F.new_zeros(1))
    stride = len(counts_E) // ep + num_slots
    ranks_F, is_clone_F = plan.places_F // stride, plan.places_F % stride >= stride - num_slots
    rows_P, clones_P = (
        rows_F.new_zeros(ep).index_add(0, ranks_F, each_F) for each_F in (rows_F, rows_F * is_clone_F)
    )
    return rows_P, clones_P
