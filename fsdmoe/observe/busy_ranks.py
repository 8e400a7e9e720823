"""EP ranks that wait for the busiest one: a layer ends when that one does.

Legend: E experts, P EP ranks.
"""

import math
from collections import deque
from collections.abc import Mapping

from torch import Tensor

WINDOW = 20
"""Logged steps that are looked at together."""
UNEVEN = 1.25
"""Of the busiest rank over the mean, from where it is worth a line."""


def busiest_rank(loads: Mapping[str, Tensor], ep: int, num_experts: int) -> float | None:
    """Rows that routers send to the busiest rank over the mean, averaged over layers; None where none of them
    has any. Choices behind the first ``num_experts`` are of no rank; 1: how many there are is not known."""
    shares = []
    for load_E in loads.values():
        owned_E = load_E if num_experts == 1 else load_E[:num_experts]
        if len(owned_E) % ep:  # of a wrapped model whose configuration says something else
            continue
        load_P = owned_E.double().unflatten(0, (ep, -1)).sum(1)
        share = float(load_P.amax() / load_P.mean())
        if math.isfinite(share):  # not of a layer without rows, nor of counts that are not finite
            shares.append(share)
    return sum(shares) / len(shares) if shares else None


class BusyRanks:
    """Watches them, a logged step at a time, and speaks once."""

    def __init__(self, ep: int, advice: str) -> None:
        """``advice``: what to do; empty where something is done already."""
        self._ep, self._advice = ep, advice
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def add(self, busiest: float | None) -> str | None:
        """A line, when it is time for it."""
        if busiest is None or not self._advice:
            return None
        self._recent.append(busiest)
        share = sum(self._recent) / WINDOW
        if len(self._recent) < WINDOW or share < UNEVEN:
            return None
        advice, self._advice = self._advice, ""
        return (
            f"the busiest of {self._ep} EP ranks was sent {share:.2f} times the mean of a layer in the last "
            f"{WINDOW} logged steps, and the others waited: {advice}"
        )
