"""One weight of all experts with a low-rank update (LoRA), in grouped products of plain torch.

An update is two narrow products next to the wide one, ``W x + B (A x)``; ``B A`` is never made. Its own
gradients need no others, so those of weights that are frozen are not computed.

Sizes: M slots (see ``permute``), E experts here, Q the rank of an update; I and O stand for the width that
goes into a weight and the one that comes out.
"""

from __future__ import annotations

from torch import Tensor

from fsdmoe.kernels.expert_autograd import Gradient
from fsdmoe.kernels.grouped import Projection, grouped_matmul


class LowRank(Projection):
    """Those of a weight and of its update's factors."""

    def __init__(self, weight_EOI: Tensor, a_EQI: Tensor, b_EOQ: Tensor) -> None:
        super().__init__(weight_EOI)
        self.a_EQI = a_EQI
        self.b_EOQ = b_EOQ

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        y_MO = super().forward(x_MI, ends_E)
        narrow_MQ = grouped_matmul(x_MI, self.a_EQI.transpose(1, 2), ends_E)
        y_MO += grouped_matmul(narrow_MQ, self.b_EOQ.transpose(1, 2), ends_E)
        return y_MO

    def dgrad(self, dy_MO: Tensor, ends_E: Tensor) -> Tensor:
        dx_MI = super().dgrad(dy_MO, ends_E)
        dx_MI += grouped_matmul(grouped_matmul(dy_MO, self.b_EOQ, ends_E), self.a_EQI, ends_E)
        return dx_MI

    def wgrad(self, dy_MO: Tensor, x_MI: Tensor, ends_E: Tensor, *grads: Gradient | None) -> None:
        weight, a, b = grads
        super().wgrad(dy_MO, x_MI, ends_E, weight)
        if a is not None:
            a.put(grouped_matmul(grouped_matmul(dy_MO, self.b_EOQ, ends_E).t(), x_MI, ends_E))
        if b is not None:
            narrow_MQ = grouped_matmul(x_MI, self.a_EQI.transpose(1, 2), ends_E)
            b.put(grouped_matmul(dy_MO.t(), narrow_MQ, ends_E))
