"""The experts' compute: grouped gated MLPs over rows that may each go to several experts.

For each row ``r`` and each of its assignments ``k`` with expert ``e = ids[r, k] >= 0`` and weight ``p``::

    z = W1_e x_r + b1_e        h = φ(z)        y_r += W2_e (p h) + p b2_e         (summed over k in fp32)

``weight_after=True`` computes ``p (W2_e h + b2_e)`` instead: the same value, rounded elsewhere. An id of -1
means "not mine": it contributes nothing and its weight gets a zero gradient.

=========================  ==================================================================================
``experts_mlp``            the seam everything calls; picks one of the next two
``fsdmoe.kernels.triton``  CUDA bf16, where it says it supports the shapes; no biases
``experts_mlp_grouped``    grouped matrix products of plain torch, any device and dtype (``experts_grouped``)
``experts_mlp_reference``  a loop over experts, differentiated by autograd: the definition
=========================  ==================================================================================

Sizes: R rows, K assignments a row, E experts here, D hidden, N expert width (its share under ETP).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.kernels.activations import activate
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.experts_grouped import experts_mlp_grouped


def experts_mlp(
    x_RD: Tensor,
    weights_RK: Tensor,
    ids_RK: Tensor,
    gate_up_E2ND: Tensor,
    down_EDN: Tensor,
    *,
    activation: str = "swiglu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weight_after: bool = False,
    max_rows: int | None = None,
) -> Tensor:
    """``y_RD``; see the module's text. Never waits for the device.

    ``max_rows`` promises that at most so many ids are >= 0; buffers are sized by it instead of by R*K.
    """
    plain = gate_up_bias is None and down_bias is None and not weight_after
    fused = triton_for(x_RD, compiled=True) if plain else None
    if fused is not None and fused.supports(x_RD, gate_up_E2ND, down_EDN, activation):
        return fused.experts_mlp_triton(
            x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN, activation=activation, max_rows=max_rows
        )
    return experts_mlp_grouped(
        x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN, activation=activation, gate_up_bias=gate_up_bias,
        down_bias=down_bias, weight_after=weight_after, max_rows=max_rows,
    )  # fmt: skip


def experts_mlp_reference(
    x_RD: Tensor,
    weights_RK: Tensor,
    ids_RK: Tensor,
    gate_up_E2ND: Tensor,
    down_EDN: Tensor,
    *,
    activation: str = "swiglu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weight_after: bool = False,
    max_rows: int | None = None,
) -> Tensor:
    """The definition: one expert after the other, autograd's own backward."""
    y_RD = torch.zeros_like(x_RD, dtype=torch.promote_types(x_RD.dtype, torch.float32))
    for e in range(gate_up_E2ND.shape[0]):
        row, k = (ids_RK == e).nonzero(as_tuple=True)
        weight = weights_RK[row, k].unsqueeze(-1)
        z = F.linear(x_RD[row], gate_up_E2ND[e], None if gate_up_bias is None else gate_up_bias[e])
        h = activate(z.to(y_RD.dtype), activation)
        y = F.linear((h if weight_after else h * weight).to(x_RD.dtype), down_EDN[e]).to(y_RD.dtype)
        if down_bias is not None:
            y = y + (down_bias[e] if weight_after else weight * down_bias[e])
        y_RD = y_RD.index_add(0, row, y * weight if weight_after else y)
    return y_RD.to(x_RD.dtype)
