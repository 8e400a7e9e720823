"""One matrix product per group of rows, in one call.

Two shapes, both with int32 ``ends_G`` (the row after each group's last)::

    rows x weights     a [M, A],  b [G, A, B]  ->  [M, B]       row r of group g: a[r] @ b[g]
    gradient           a [A, M],  b [M, B]     ->  [G, A, B]    a[:, rows of g] @ b[rows of g]

Rows past ``ends_G[-1]`` are not read, and uninitialised in the result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor


def grouped_matmul(a: torch.Tensor, b: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """``F.grouped_mm`` where it applies; a loop for float64 and for rows that are no multiple of 16 bytes."""
    fits = _aligned(a) and _aligned(b) and b.shape[-1] * b.element_size() % 16 == 0
    fits = fits and a.dtype != torch.float64
    if isinstance(a, FakeTensor) and not (fits and a.dtype == torch.bfloat16):
        # A planned step: torch knows the shape of its grouped product in bf16 only.
        groups = (len(ends_G),) if b.dim() == 2 else ()
        return a.new_empty((*groups, len(a), b.shape[-1]))
    return F.grouped_mm(a, b, offs=ends_G) if fits else grouped_matmul_loop(a, b, ends_G)


def grouped_matmul_loop(a: torch.Tensor, b: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """The plain-torch reference: slow, and it waits for the device to learn where groups end."""
    ends = ends_G.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans])
    tail = a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])
    return torch.cat([*(a[start:end] @ weight for (start, end), weight in zip(spans, b, strict=True)), tail])


def _aligned(matrix: torch.Tensor) -> bool:
    rows, columns = matrix.stride()[-2:]
    leading = rows if columns == 1 else columns
    return 1 in (rows, columns) and leading * matrix.element_size() % 16 == 0
