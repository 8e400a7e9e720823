"""How unevenly routing loads the ranks of a plan: by a number, or as it was recorded.

A layer ends when its busiest rank does, so experts and their rows take the time of that rank. Memory is that
of the rank whose layers together got most. Both are multiples of an even share::

    choices of experts 0 1 2 3      shares of ranks, ep 2      time                 memory
    layer 0            4 2 1 1      1.5  0.5                   (1.5 + 1.25) / 2     (1.5 + 0.75) / 2
    layer 1            1 2 3 2      0.75 1.25
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fsdmoe.errors import ConfigError
from fsdmoe.experts.routing_file import Recording
from fsdmoe.rules import divisors


class Skew(NamedTuple):
    """Of a busiest rank, over an even share."""

    time: float = 1.0
    """In a layer, on average over layers and steps."""
    memory: float = 1.0
    """In all layers of a step, in the worst step."""


EVEN = Skew()


@dataclass(frozen=True)
class Loads:
    """Even ones, where nothing is said."""

    given: Skew = EVEN
    recorded: Mapping[int, Skew] = field(default_factory=dict)
    """By ``ep``."""

    def skew(self, ep: int) -> Skew:
        """Of experts over so many ranks."""
        return EVEN if ep == 1 else self.recorded.get(ep, self.given)


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
    return Loads(recorded={ep: skew_of(loads_SLE, ep) for ep in divisors(num_experts)})


def skew_of(loads_SLE: Tensor, ep: int) -> Skew:
    """Of choices of experts by step and layer."""
    by_rank_SLP = loads_SLE.double().unflatten(2, (ep, -1)).sum(3)
    share_SLP = ep * by_rank_SLP / by_rank_SLP.sum(2, keepdim=True).clamp(min=1)
    return Skew(share_SLP.amax(2).mean().item(), share_SLP.mean(1).amax().item())
