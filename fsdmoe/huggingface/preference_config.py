"""The ``preference`` section: the loss of pairs of answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import one_of

PairLoss = Literal["sigmoid", "hinge", "ipo"]


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Direct preference optimisation (DPO), with `data.kind = "preference"`: the chosen answer shall become
    likelier than the rejected one, compared with the model without its adapters."""

    loss: PairLoss = "sigmoid"
    """`sigmoid` (DPO), `hinge` (SLiC), or `ipo`, which regresses the mean over an answer's tokens to
    1 / (2 beta)."""
    beta: float = 0.1
    """How much log-probabilities, relative to the reference's, count. The larger, the closer to it."""

    def __post_init__(self) -> None:
        problems = one_of("preference", vars(self), {"loss": get_args(PairLoss)})
        if not self.beta > 0:
            problems.append(f"preference.beta: expected a number above 0, got {self.beta}; 0.1 is usual")
        refuse(problems)
