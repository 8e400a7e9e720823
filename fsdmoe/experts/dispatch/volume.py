"""How much each dispatcher is expected to send, and the choice that follows.

Under balanced routing a token has a chance ``q = 1 - C(E - E/ep, K) / C(E, K)`` of needing a given EP rank
(its K experts are K different ones of E), and a chance ``q_N``, the same with N for ep, of needing a given
one of N nodes. Rows a rank sends for each of its tokens, over EP and then ETP:

===========  ======================================================================
allgather    ``(ep - 1) + ep (etp - 1) = ep·etp - 1``
all_to_all   ``q`` times that, as does ``flex``
by_node      ``(N - 1) q_N`` between nodes, ``(ep - N) q + ep (etp - 1) q`` inside
===========  ======================================================================

and as many come back. Between nodes all_to_all sends ``(ep - ep/N) q``. If a token first chooses g of G
groups of experts, its experts are K of those ``g E/G``. This is counted where ranks and nodes hold whole
groups or equal parts of one.

So all-to-all never sends more than all-gather; but it permutes rows before and after, its messages are uneven
and every rank talks to every other. A byte of it is therefore charged a third more: where MegaScale-MoE
measured one against the other (Mixtral 8x7B, 8 ranks, a row for every choice), all-gather was the faster
above top-k 6, though by bytes alone the two break even at 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

ALL_TO_ALL_COST = 4 / 3
"""Price of a byte by all-to-all, in bytes by all-gather; see the module's text."""
_EXACT = ("all_to_all", "flex")
"""Those that send a row only to ranks that need it."""


@dataclass(frozen=True)
class ExpertLayout:
    """What the expected volume depends on."""

    num_experts: int
    top_k: int
    ep: int = 1
    etp: int = 1
    nodes: int = 1
    """Over which EP is spread, with equally many ranks on each."""
    groups: int = 1
    """Of experts, of which a token chooses some first."""
    groups_per_token: int = 1

    @property
    def rank_probability(self) -> float:
        """Chance that a token needs a given EP rank."""
        return self._chance_of_one_in(self.ep)

    def _chance_of_one_in(self, blocks: int) -> float:
        """That a token needs a given one of so many equal blocks of experts."""
        groups = self.groups
        chosen = self.groups_per_token
        if groups % blocks and blocks % groups:
            groups = chosen = 1
        in_group = self.num_experts // groups
        pool = chosen * in_group
        in_block = max(1, groups // blocks)
        held = min(in_group, self.num_experts // blocks)
        chance = 0.0
        for number in range(1, min(in_block, chosen) + 1):  # of the block's groups that were chosen
            ways = math.comb(in_block, number) * math.comb(groups - in_block, chosen - number)
            missed = math.comb(pool - number * held, self.top_k) / math.comb(pool, self.top_k)
            chance += ways / math.comb(groups, chosen) * (1 - missed)
        return chance

    def rows_between_nodes(self, dispatcher: str) -> float:
        """Of those that a rank sends for each token it brings, one way."""
        if dispatcher == "by_node":
            return (self.nodes - 1) * self._chance_of_one_in(self.nodes)
        others = self.ep - self.ep // self.nodes
        return others * self.rank_probability if dispatcher in _EXACT else float(others)

    def rows_per_token(self, dispatcher: str) -> float:
        """Rows that a rank is expected to send for each token it brings, one way."""
        if dispatcher == "by_node":
            inside = self.ep * self.etp - self.nodes
            return self.rows_between_nodes(dispatcher) + inside * self.rank_probability
        everyone = self.ep * self.etp - 1
        return everyone * self.rank_probability if dispatcher in _EXACT else float(everyone)

    def sent_rows(self, dispatcher: str, num_tokens: int) -> float:
        """Rows that a rank is expected to send for its tokens in a training step of one layer: to the experts
        and back, and the same way for the gradients."""
        name = choose_dispatcher(self).dispatcher if dispatcher == "auto" else dispatcher
        return 4 * num_tokens * self.rows_per_token(name)


@dataclass(frozen=True)
class Choice:
    dispatcher: str
    reason: str


def choose_dispatcher(layout: ExpertLayout, clones: int = 0) -> Choice:
    """The dispatcher that costs least in expectation, and why, for the start-up report; with ``clones`` slots
    a rank, the one that sends them."""
    layout = replace(layout, groups=1, groups_per_token=1)  # which a dispatcher is not told
    if layout.ep == 1:
        return Choice("local", "every rank holds every expert (ep 1)")
    if clones:
        return Choice("all_to_all", f"{clones} slots a rank for clones of hot experts")
    exact, everyone = layout.rows_per_token("all_to_all"), layout.rows_per_token("allgather")
    dispatcher = "all_to_all" if exact * ALL_TO_ALL_COST < everyone else "allgather"
    others = "the other rank" if everyone == 1 else f"{everyone:.0f} other ranks"
    cost = "would cost more" if dispatcher == "all_to_all" else "costs less"
    reason = f"a token needs {exact:.2f} of {others} on average; sending every token to all {cost}"
    return Choice(dispatcher, reason)
