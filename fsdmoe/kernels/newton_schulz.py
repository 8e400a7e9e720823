"""Newton–Schulz: the nearest matrix with singular values near 1, for a batch of matrices of one shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_EPS = 1e-7


def newton_schulz(x_NRC: torch.Tensor, coefficients: Sequence[float], steps: int) -> torch.Tensor:
    """Iterate ``X = a X + (b X Xᵀ + c (X Xᵀ)²) X`` from ``X / ‖X‖``, in the dtype of ``x_NRC``.

    Args:
        x_NRC: Matrices of one shape; it may be overwritten.
        coefficients: ``a``, ``b`` and ``c`` of each iteration.
        steps: How many of them.
    """
    a, b, c = coefficients
    is_tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = x_NRC.mT if is_tall else x_NRC  # the short side squared is the smaller product
    norm_N = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x / norm_N.clamp_min(_EPS).to(x.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if is_tall else x
