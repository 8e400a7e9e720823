"""Newton–Schulz: the nearest matrix with singular values near 1, for a batch of matrices of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdmoe.kernels.backend import triton_for

_EPS = 1e-7


def newton_schulz(x_NRC: torch.Tensor, coefficients: Sequence[float], steps: int) -> torch.Tensor:
    """Iterate ``X = a X + (b X Xᵀ + c (X Xᵀ)²) X`` from ``X / ‖X‖``, in the dtype of ``x_NRC``.

    Of the two products that are symmetric a kernel, where there is one, computes one triangle. ``a`` is added
    to the diagonal of the second: adding ``a X`` to the third product would copy X first. ``‖X‖²`` is the
    trace of the first product, and its scale goes into the second one's factors: no matrix is read for it.

    Args:
        x_NRC: Matrices of one shape.
        coefficients: ``a``, ``b`` and ``c`` of each iteration.
        steps: How many of them.
    """
    a, b, c = coefficients
    is_tall = x_NRC.shape[1] > x_NRC.shape[2]  # the short side squared is the smaller product
    x = x_NRC
    product = symmetric_product_of(x)
    for number in range(steps):
        gram = product(x, is_tall=is_tall)
        factors_N3 = None
        if number == 0:
            norm_N = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32).sqrt().clamp_min(_EPS)
            # c (s² X Xᵀ)² + b s² X Xᵀ + a, times the s of the X that is multiplied by it
            factors_N3 = torch.stack((norm_N.pow(-5), norm_N.pow(-3), norm_N.reciprocal()), 1)
        factor = product(gram, alpha=c, added=gram, beta=b, diagonal=a, factors_N3=factors_N3)
        x = torch.bmm(x, factor) if is_tall else torch.bmm(factor, x)
    return x


def symmetric_product(
    x_NRC: torch.Tensor,
    *,
    is_tall: bool = False,
    alpha: float = 1.0,
    added: torch.Tensor | None = None,
    beta: float = 0.0,
    diagonal: float | torch.Tensor = 0.0,
    factors_N3: torch.Tensor | None = None,
) -> torch.Tensor:
    """``alpha x xᵀ + beta added``, or with ``is_tall`` of ``xᵀ x``; ``added`` is symmetric. ``diagonal`` is
    added to the diagonal, where something is added. ``factors_N3`` multiply ``alpha``, ``beta`` and
    ``diagonal`` of each matrix."""
    left, right = (x_NRC.mT, x_NRC) if is_tall else (x_NRC, x_NRC.mT)
    if added is None:
        return torch.bmm(left, right) * alpha if alpha != 1 else torch.bmm(left, right)
    if factors_N3 is not None:
        of_product, of_added, of_diagonal = factors_N3.to(x_NRC.dtype).unsqueeze(2).unbind(1)
        left, added = left * of_product.unsqueeze(2), added * of_added.unsqueeze(2)
        diagonal = diagonal * of_diagonal
    out = torch.baddbmm(added, left, right, beta=beta, alpha=alpha)
    out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out


def symmetric_product_of(x_NRC: torch.Tensor) -> Any:
    """The kernel, where one takes these matrices; else :func:`symmetric_product`."""
    fused = triton_for(x_NRC)
    takes = fused is not None and fused.supports_symmetric(x_NRC)
    return fused.symmetric_product_triton if takes else symmetric_product
