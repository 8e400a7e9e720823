"""The ``adapter`` section: low-rank adapters (LoRA, DoRA) on the model of ``model.hf``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdmoe.core.errors import refuse

ALL_LINEAR = "all-linear"
"""What peft calls all linear layers but the head, with fused experts and routers."""
Kind = Literal["none", "lora", "dora"]


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters to train next to (or instead of) the weights of ``model.hf``; off unless ``rank`` is set."""

    rank: int = 0
    """Of the two factors; 0 trains the model itself, without adapters."""
    kind: Kind = "lora"
    """lora, dora (with a learnt length for each row; peft has it for projections, not for fused experts), or
    none."""
    alpha: float | None = None
    """An update counts alpha / rank; none takes alpha = rank."""
    dropout: float = 0.0
    """Of the adapters' inputs; peft has none for fused experts."""
    target_modules: tuple[str, ...] | None = None
    """Names of the projections with adapters, as in peft, or all-linear (experts and routers too); none takes
    those of attention, as the model has them."""
    target_parameters: tuple[str, ...] | None = None
    """Names of the fused experts' weights with adapters, as in peft; none takes all of them with lora, and []
    leaves experts as they are."""
    freeze_base: bool = True
    """Train adapters alone; false trains the model's own weights with them."""

    def __post_init__(self) -> None:
        problems = []
        if self.rank < 0:
            problems.append(f"adapter.rank: expected 0 (no adapters) or more, got {self.rank}")
        if not 0 <= self.dropout < 1:
            problems.append(f"adapter.dropout: expected at least 0 and less than 1, got {self.dropout}")
        if self.is_on and self.kind == "dora" and self.target_parameters:
            problems.append(
                f"adapter.kind: expected lora for adapter.target_parameters {list(self.target_parameters)}, "
                "got dora, which peft does not have for fused experts; set adapter.target_parameters = []"
            )
        modules = self.target_modules or ()
        if ALL_LINEAR in modules and (len(modules) > 1 or self.target_parameters is not None):
            problems.append(
                f"adapter.target_modules: expected {ALL_LINEAR} alone and without adapter.target_parameters, "
                f"for it has experts and routers too, got {list(modules)}; name the projections instead"
            )
        if self.is_on and self.dropout and self.adapts_experts:
            problems.append(
                f"adapter.dropout: expected 0 with adapters on fused experts, for which peft has none, got "
                f"{self.dropout}; set adapter.target_parameters = [] to adapt attention alone"
            )
        refuse(problems)

    @property
    def is_on(self) -> bool:
        return self.rank > 0 and self.kind != "none"

    @property
    def adapts_experts(self) -> bool:
        """By default: LoRA does, DoRA cannot."""
        return bool(self.target_parameters) or (self.target_parameters is None and self.kind == "lora")
