"""The auxiliary loss of a Hugging Face model over tokens that several ranks hold.

transformers' ``load_balancing_loss_func`` multiplies two means over the tokens of a call, so the mean of what
ranks with different tokens get is not what one rank with all of them would get. Where ranks share rows, the
term is therefore made anew from the router logits that the model hands out.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.balance import joint_balance_loss, statistics_of_logits
from fsdmoe.experts.context import RoutingContext

_NAME = "load_balancing_loss_func"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""What families call it."""


class AuxiliaryLoss:
    """How a model weighs and computes its auxiliary loss; ``out`` is always what a call of it returned."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @functools.cached_property
    def is_known(self) -> bool:
        """Whether the function next to the model's classes computes what we would, tried on random logits."""
        homes = {type(m).__module__ for m in self._module.modules()}
        found = {f for home in homes if (f := getattr(sys.modules.get(home), _NAME, None)) is not None}
        random = torch.Generator().manual_seed(0)
        logits = tuple(torch.randn(32, 8, generator=random) for _ in range(2))
        ours = _joint(logits, 2)
        return len(found) == 1 and torch.allclose(found.pop()(logits, 8, 2), ours, rtol=1e-4)

    def is_in(self, out: Any) -> bool:
        """Whether a call asked for it; ConfigError where the model then had no router logits to make it of.
        transformers answers 0 for those (granite's in 5.17, say), and fails itself once it has labels."""
        found = getattr(out, "aux_loss", None)
        if found is not None and not isinstance(found, Tensor):
            raise ConfigError(
                f"model.hf: expected router logits for the auxiliary loss of {type(self._module).__name__}, "
                "got none: this release of transformers does not keep them; install one that does, or set "
                "output_router_logits = false in the model's configuration to train without that loss"
            )
        return found is not None

    def own(self, out: Any, share: float | Tensor) -> Tensor:
        """The model's own value, weighed by this call's ``share`` of the step's tokens."""
        return self._coefficient() * out.aux_loss * share

    def shared(self, out: Any, routing: RoutingContext) -> Tensor:
        """This rank's part of the value over the tokens of all ranks that share the rows."""
        if not self.is_known:
            raise ConfigError(
                f"mesh.cp: the auxiliary loss of {type(self._module).__name__} is not known here, so it "
                "cannot be computed over several ranks' tokens; set output_router_logits = false in the "
                "model's configuration, or mesh.cp and mesh.tp to 1"
            )
        top_k = int(self._setting("num_experts_per_tok"))
        return self._coefficient() * _joint(out.router_logits, top_k, routing)

    def _coefficient(self) -> float:
        return float(self._setting(*_COEFFICIENTS))

    def _setting(self, *names: str) -> float:
        """A number that the model's forward goes by. A module that keeps it reads it there, whatever its
        configuration calls it."""
        config: Any = self._module.config
        for owner in (self._module, config, config.get_text_config()):
            for name in names:
                if isinstance(value := getattr(owner, name, None), (int, float)):
                    return value
        raise ConfigError(
            f"model.hf: expected {' or '.join(names)} in {type(self._module).__name__} or its configuration, "
            "for the auxiliary loss, got neither; set output_router_logits = false in the model's "
            "configuration to train without that loss"
        )


def _joint(logits: tuple[Tensor, ...], top_k: int, routing: RoutingContext | None = None) -> Tensor:
    """Over the tokens of all ranks in ``routing``, this rank's part of it; without, over these alone."""
    routing = routing or RoutingContext()
    layers = [statistics_of_logits(x.flatten(0, -2), top_k, routing.token_mask_T) for x in logits]
    load_LE, sum_LE = (torch.stack(each) for each in zip(*layers, strict=True))
    return joint_balance_loss(
        load_LE,
        sum_LE,
        top_k=top_k,
        num_global_tokens=routing.num_global_tokens,
        sequence_group=routing.sequence_group,
    )
