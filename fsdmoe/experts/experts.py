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

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.kernels.activations import activation_of
from fsdmoe.kernels.experts import experts_mlp
from fsdmoe.mesh import Axis
from fsdmoe.placement import Placement


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
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (2 * intermediate_size, hidden_size),
            "down_proj": (hidden_size, intermediate_size),
        }
        shapes |= {"gate_up_proj_bias": (2 * intermediate_size,), "down_proj_bias": (hidden_size,)}
        for name, shape in shapes.items():
            parameter = None
            if bias or not name.endswith("bias"):
                parameter = nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Normal weights, zero biases."""
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=std)

    def placements(self) -> Iterator[tuple[str, Placement]]:
        """How ``ep`` and ``etp`` cut each parameter of the whole module."""
        num_experts, hidden, width = self.num_experts, self.hidden_size, self.intermediate_size
        ep = (Axis.EP, 0)
        splits = {
            "gate_up_proj": ((num_experts, 2, width, hidden), (Axis.ETP, 2)),
            "down_proj": ((num_experts, hidden, width), (Axis.ETP, 2)),
            "gate_up_proj_bias": ((num_experts, 2, width), (Axis.ETP, 2)),
            "down_proj_bias": ((num_experts, hidden), (Axis.ETP, 1)),
        }
        for name, parameter in self.named_parameters():
            view, etp = splits[name]
            yield name, Placement("expert", tuple(parameter.shape), view, (ep, etp))

    def forward(
        self, x_RD: Tensor, weights_RK: Tensor, ids_RK: Tensor, *, max_rows: int | None = None
    ) -> Tensor:
        """``y_RD``, this ETP member's part of it; ``ids`` count this rank's experts, -1 is not mine."""
        return experts_mlp(
            x_RD, weights_RK, ids_RK, self.gate_up_proj, self.down_proj,
            activation=self.activation, weight_after=self.weight_after, max_rows=max_rows,
            gate_up_bias=self.gate_up_proj_bias, down_bias=self._whole_down_bias(),
        )  # fmt: skip

    def _whole_down_bias(self) -> Tensor | None:
        bias = self.down_proj_bias
        if bias is None or bias.shape[1] == self.hidden_size:
            return bias
        after = self.hidden_size - self.down_bias_start - bias.shape[1]
        return F.pad(bias, (self.down_bias_start, after))

    def extra_repr(self) -> str:
        return (
            f"{self.gate_up_proj.shape[0]} of {self.num_experts} experts, hidden {self.hidden_size}, "
            f"width {self.down_proj.shape[2]} of {self.intermediate_size}, {self.activation}"
        )
