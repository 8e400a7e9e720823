"""The routed experts' weights, fused as Hugging Face stores them, and their compute.

::

    gate_up_proj       [E, 2I, H]   first I rows the gates, last I the ups     view [E, 2, I, H]
    down_proj          [E, H, I]
    gate_up_proj_bias  [E, 2I]      optional (gpt-oss)                         view [E, 2, I]
    down_proj_bias     [E, H]       optional

EP splits E. ETP splits the width I of both halves; ``down_proj_bias`` has no width, so ETP splits its H: each
member adds its stretch of the bias to its partial output, and the members' sum has the whole bias once. Thus
no two ranks of an (ep, etp) group hold the same element, and no gradient needs a sum over ETP.

The module is built whole (on the meta device if it is large); :mod:`fsdmoe.experts.parallel` splits it.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.kernels.activations import activation_of
from fsdmoe.kernels.experts import experts_mlp
from fsdmoe.mesh import Axis
from fsdmoe.placement import Placement, Shape


class GroupedExperts(nn.Module):
    """All experts of a layer (of this rank, once split)."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        weight_after: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_of(activation)
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.weight_after = weight_after
        self.down_bias_start = 0
        for name, placement in self._all_placements().items():
            parameter = None
            if bias or not name.endswith("bias"):
                parameter = nn.Parameter(torch.empty(placement.global_shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Normal weights, zero biases; nothing on the meta device."""
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=std)

    def placements(self) -> dict[str, Placement]:
        """How ``ep`` and ``etp`` cut each parameter of the whole module."""
        return {name: self._all_placements()[name] for name, _ in self.named_parameters()}

    def _all_placements(self) -> dict[str, Placement]:
        hidden, width = self.hidden_size, self.intermediate_size
        cut = functools.partial(expert_placement, self.num_experts)
        return {
            "gate_up_proj": cut((2 * width, hidden), (2, width, hidden), 2),
            "down_proj": cut((hidden, width), (hidden, width), 2),
            "gate_up_proj_bias": cut((2 * width,), (2, width), 2),
            "down_proj_bias": cut((hidden,), (hidden,), 1),
        }

    def forward(
        self, x_RD: Tensor, weights_RK: Tensor, ids_RK: Tensor, *, max_rows: int | None = None
    ) -> Tensor:
        """``y_RD``, this ETP member's part of it; ``ids`` count this rank's experts, -1 is not mine."""
        down_bias = whole_down_bias(self.down_proj_bias, self.hidden_size, self.down_bias_start)
        return experts_mlp(
            x_RD, weights_RK, ids_RK, self.gate_up_proj, self.down_proj,
            activation=self.activation, weight_after=self.weight_after, max_rows=max_rows,
            gate_up_bias=self.gate_up_proj_bias, down_bias=down_bias,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"{self.gate_up_proj.shape[0]} of {self.num_experts} experts, hidden {self.hidden_size}, "
            f"width {self.down_proj.shape[2]} of {self.intermediate_size}, {self.activation}"
        )


def expert_placement(num_experts: int, shape: Shape, view: Shape, etp_dim: int) -> Placement:
    """Of a parameter ``[E, *shape]`` seen as ``[E, *view]``: EP splits E, ETP one dim of that view."""
    splits = ((Axis.EP, 0), (Axis.ETP, etp_dim))
    return Placement("expert", (num_experts, *shape), (num_experts, *view), splits)


def whole_down_bias(bias_EH: Tensor | None, hidden_size: int, start: int) -> Tensor | None:
    """This ETP member's stretch of the bias, from ``start`` on, among zeros for those of the others."""
    if bias_EH is None or bias_EH.shape[1] == hidden_size:
        return bias_EH
    return F.pad(bias_EH, (start, hidden_size - start - bias_EH.shape[1]))
