"""How weights of clones travel in one layer, and their gradients: what :mod:`clone_weights` asks for, and the
way over all-to-all-v, whose sizes the host knows. The way of ``flex`` is in :mod:`flex_cloning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdmoe.experts.dispatch.transfer import Link, Pending


class CloneExchange(Protocol):
    """Clones of one layer. All ranks call the same in the same order."""

    @property
    def num_here(self) -> int:
        """Clones that this rank has, or has memory for: M."""
        ...

    @property
    def are_away(self) -> bool:
        """Whether experts of this rank may have clones."""
        ...

    def send(self, weights: Sequence[Tensor]) -> list[Pending]:
        """Of each of this rank's ``weights`` what is sent here: ``[M, ...]``."""
        ...

    def send_home(self, gradients: Sequence[Tensor]) -> Any:
        """Start it: ``gradients`` are of what :meth:`send` brought, in fp32. What :meth:`add_home` takes."""
        ...

    def add_home(self, homebound: Any, totals: Sequence[Tensor | None]) -> None:
        """Add what comes home to the gradients of this rank's weights, in the order of ranks; what is None is
        not wanted. Where no experts are away, all are."""
        ...


@dataclass(frozen=True)
class Clones:
    """Experts that travel in one layer, in the order of ranks and their slots."""

    sent: list[int]
    """How many go to each EP rank."""
    experts: list[int]
    """Which of this rank's own, those to rank 0 first."""
    received: list[int]
    """How many come from each EP rank."""

    @classmethod
    def of(cls, experts_PS: list[list[int]], rank: int, num_experts: int) -> Clones:
        """As rank ``rank`` sees them."""
        num_ranks = len(experts_PS)
        per_rank = num_experts // num_ranks
        homes = [[expert // per_rank for expert in slots if expert < num_experts] for slots in experts_PS]
        own = [[expert % per_rank for expert in slots if expert // per_rank == rank] for slots in experts_PS]
        received = [homes[rank].count(home) for home in range(num_ranks)]
        return cls([len(each) for each in own], [expert for each in own for expert in each], received)


@dataclass(frozen=True)
class ClonesByLink:
    """As many as there are, by all-to-all-v: each weight in one exchange, so that what arrives needs no
    copy."""

    link: Link
    clones: Clones

    @property
    def num_here(self) -> int:
        return sum(self.clones.received)

    @property
    def are_away(self) -> bool:
        return bool(self.clones.experts)

    def send(self, weights: Sequence[Tensor]) -> list[Pending]:
        return [self._send(each.detach()) for each in weights]

    def send_home(self, gradients: Sequence[Tensor]) -> list[Pending]:
        clones = self.clones
        return [
            self.link.exchange(each, clones.received, clones.sent, "clones.backward") for each in gradients
        ]

    def add_home(self, homebound: list[Pending], totals: Sequence[Tensor | None]) -> None:
        for wait, total in zip(homebound, totals, strict=True):
            gradients_M = wait()
            if total is not None:
                for expert, gradient in zip(self.clones.experts, gradients_M, strict=True):
                    total[expert] += gradient

    def _send(self, weight: Tensor) -> Pending:
        sent, received = self.clones.sent, self.clones.received
        if weight.itemsize > 1:
            return self.link.exchange(self._picked(weight), sent, received, "clones")
        # Codes as bytes: not every backend knows their format.
        wait = self.link.exchange(self._picked(weight.view(torch.uint8)), sent, received, "clones")
        return lambda: wait().view(weight.dtype)

    def _picked(self, weight: Tensor) -> Tensor:
        """Without indices, which the host would have to copy to the device."""
        experts = self.clones.experts
        return torch.stack([weight[expert] for expert in experts]) if experts else weight[:0]
