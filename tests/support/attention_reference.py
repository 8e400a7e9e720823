"""What one process computes: plain softmax attention under a dense mask, and the cases that split it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Rows of document lengths, and the shape of the heads."""

    rows: tuple[tuple[int, ...], ...]
    num_heads: int = 4
    num_kv_heads: int = 4
    width: int = 8
    value_width: int = 8

    @property
    def document_ids_BS(self) -> Tensor:
        return torch.tensor([[d for d, n in enumerate(row) for _ in range(n)] for row in self.rows])

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whole queries, keys, values, and the gradient that arrives at the output."""
        generator = torch.Generator().manual_seed(seed)
        rows, seq = self.document_ids_BS.shape
        shapes = [
            (self.num_heads, self.width),
            (self.num_kv_heads, self.width),
            (self.num_kv_heads, self.value_width),
            (self.num_heads, self.value_width),
        ]
        q, k, v, grad = (torch.randn(rows, seq, *shape, generator=generator) for shape in shapes)
        return q, k, v, grad


def dense_attention(
    q_BSHD: Tensor, k_BSGD: Tensor, v_BSGE: Tensor, document_ids_BS: Tensor, scale: float
) -> Tensor:
    """No kernel, no blocks, no splitting: scores of all pairs, hidden ones set to minus infinity."""
    repeat = q_BSHD.shape[2] // k_BSGD.shape[2]
    k, v = (x.repeat_interleave(repeat, dim=2) for x in (k_BSGD, v_BSGE))
    seq = q_BSHD.shape[1]
    seen = document_ids_BS[:, :, None] == document_ids_BS[:, None]
    seen = seen & torch.ones(seq, seq, dtype=torch.bool).tril()
    scores = torch.einsum("bshd,bthd->bhst", q_BSHD, k) * scale
    return torch.einsum("bhst,bthe->bshe", scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1), v)


def whole_gradients(case: Case, scale: float, seeds: tuple[int, ...] = (0,)) -> tuple[Tensor, ...]:
    """Output of the last seed, and the sum over the seeds of dq, dk, dv (fp64 inside)."""
    totals: list[Tensor] = []
    for seed in seeds:
        q, k, v, grad = (x.double() for x in case.inputs(seed))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = dense_attention(*leaves, case.document_ids_BS, scale)
        grads = torch.autograd.grad(out, leaves, grad)
        totals = [a + b for a, b in zip(totals, grads, strict=True)] if totals else list(grads)
    return out.detach(), *totals


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest deviation over the largest magnitude; not a number counts as infinite."""
    if not torch.isfinite(found).all():
        return float("inf")
    return float(
        (found.detach().double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1e-30)
    )
