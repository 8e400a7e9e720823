"""``[optim.muon]``: what Muon does with a matrix, and which parameters it leaves to AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from typing import Literal, get_args

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import at_least, one_of

Scale = Literal["match_rms_adamw", "original"]
Heads = Literal["whole", "each"]
NSDtype = Literal["auto", "bfloat16", "float32"]

LEFT_TO_ADAMW = (
    "*embed*", "*wte.*", "*wpe.*", "*lm_head*", "*head.weight", "*router*", "*gate.weight", "*gate.wg.*",
    "*_gate.weight", "*norm*",
)  # fmt: skip
"""Embeddings, heads, routers, gates of shared experts and norms, by the names that they have in decoders."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Momentum, orthogonalised by Newton–Schulz (docs/optimizers.md)."""

    momentum: float = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """The update looks one step ahead."""
    ns_steps: int = 5
    """Iterations of Newton–Schulz."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Of each iteration. Keller Jordan's: steep at zero, so that small singular values grow fast."""
    ns_dtype: NSDtype = "auto"
    """What it computes in, and what is sent of matrices that lie on several ranks. auto: bfloat16 on a GPU,
    float32 on a CPU, where products in bfloat16 are slow; float32 is for comparing layouts too."""
    scale: Scale = "match_rms_adamw"
    """How large an update is. match_rms_adamw: 0.2 √max(rows, columns), the size of AdamW's, so that rates
    and decays of AdamW can be kept (Moonlight). original: √max(1, rows / columns) (Keller Jordan), with rates
    about 100 times as high."""
    heads: Heads = "whole"
    """Whether q, k and v are one matrix each, or one for each head."""

    def __post_init__(self) -> None:
        problems = at_least("optim.muon", vars(self), {"ns_steps": 1})
        if not 0 <= self.momentum < 1:
            problems.append(
                f"optim.muon.momentum: expected a number 0 to below 1, got {self.momentum}; change it"
            )
        choices = {"scale": get_args(Scale), "heads": get_args(Heads), "ns_dtype": get_args(NSDtype)}
        refuse(problems + one_of("optim.muon", vars(self), choices))

    def ns_dtype_on(self, device_type: str) -> str:
        """What Newton–Schulz computes in on this kind of device."""
        if self.ns_dtype != "auto":
            return self.ns_dtype
        return "float32" if device_type == "cpu" else "bfloat16"

    def factor(self, outputs: int, inputs: int) -> float:
        """What an orthogonal matrix of so many outputs and inputs is multiplied by."""
        if self.scale == "original":
            return sqrt(max(1.0, outputs / inputs))
        return 0.2 * sqrt(max(outputs, inputs))


def is_left_to_adamw(name: str) -> bool:
    """Whether the name is that of a matrix which Muon does not update by itself."""
    return any(fnmatchcase(name, pattern) for pattern in LEFT_TO_ADAMW)
