"""The auxiliary loss of a Hugging Face model over tokens that several ranks hold.

transformers' ``load_balancing_loss_func`` multiplies two means over the tokens of a call, so the mean of what
ranks with different tokens get is not what one rank with all of them would get. Where ranks share rows, the
term is therefore made anew from the router logits that the model hands out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.errors import ConfigError
from fsdmoe.experts.balance import joint_balance_loss, statistics_of_logits
from fsdmoe.experts.context import RoutingContext


class AuxiliaryLoss:
    """How a model weighs and computes its auxiliary loss; ``out`` is always what a call of it returned."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_known = False

    def recognise(self, out: Any) -> None:
        """See whether the model computes what we would; before the first :meth:`shared`."""
        if getattr(out, "aux_loss", None) is None:
            return
        expected = self._joint(out, None, None, None)
        tolerance = 1e-3 if out.router_logits[0].dtype == torch.float32 else 2e-2
        self._is_known = torch.allclose(out.aux_loss.float(), expected, rtol=tolerance)

    def own(self, out: Any, share: float | Tensor) -> Tensor:
        """The model's own value, weighed by this call's ``share`` of the step's tokens."""
        return self._coefficient() * out.aux_loss * share

    def shared(self, out: Any, routing: RoutingContext) -> Tensor:
        """This rank's part of the value over the tokens of all ranks that share the rows."""
        if not self._is_known:
            raise ConfigError(
                f"mesh.cp: the auxiliary loss of {type(self._module).__name__} is not known here, so it "
                "cannot be computed over several ranks' tokens; set output_router_logits = false in the "
                "model's configuration, or mesh.cp and mesh.tp to 1"
            )
        group, mask_T = routing.sequence_group, routing.token_mask_T
        return self._coefficient() * self._joint(out, routing.num_global_tokens, group, mask_T)

    def _joint(
        self,
        out: Any,
        num_tokens: int | float | Tensor | None,
        group: dist.ProcessGroup | None,
        mask_T: Tensor | None,
    ) -> Tensor:
        top_k = int(self._config.num_experts_per_tok)
        layers = [statistics_of_logits(x.flatten(0, -2), top_k, mask_T) for x in out.router_logits]
        load_LE, sum_LE = (torch.stack(each) for each in zip(*layers, strict=True))
        return joint_balance_loss(
            load_LE, sum_LE, top_k=top_k, num_global_tokens=num_tokens, sequence_group=group
        )

    def _coefficient(self) -> float:
        own: Any = getattr(self._module, "router_aux_loss_coef", None)
        return float(self._config.router_aux_loss_coef if own is None else own)

    @property
    def _config(self) -> Any:
        return self._module.config
