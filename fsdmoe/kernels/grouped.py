"""One matrix product per group of rows, in one call.

Two shapes, both with int32 ``ends_G`` (the row after each group's last)::

    rows x weights     a [M, A],  b [G, A, B]  ->  [M, B]       row r of group g: a[r] @ b[g]
    gradient           a [A, M],  b [M, B]     ->  [G, A, B]    a[:, rows of g] @ b[rows of g]

Rows past ``ends_G[-1]`` are not read, and uninitialised in the result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdmoe.kernels.expert_autograd import Gradient


def grouped_matmul(a: Tensor, b: Tensor, ends_G: Tensor) -> Tensor:
    """``F.grouped_mm`` where it applies; a loop for float64 and for rows that are no multiple of 16 bytes."""
    fits = _aligned(a) and _aligned(b) and b.shape[-1] * b.element_size() % 16 == 0
    fits = fits and a.dtype != torch.float64
    if isinstance(a, FakeTensor) and not (fits and a.dtype == torch.bfloat16):
        # A planned step: torch knows the shape of its grouped product in bf16 only.
        groups = (len(ends_G),) if b.dim() == 2 else ()
        return a.new_empty((*groups, len(a), b.shape[-1]))
    if not fits:
        return grouped_matmul_loop(a, b, ends_G)
    if a.dtype == torch.bfloat16 and a.device.type == "cpu" and not isinstance(a, FakeTensor):
        # CPUs, those with units for bf16 too, take less time for the same sums in fp32, rounded once.
        wide_a = a.float()
        wide_b = b.float()
        if _aligned(wide_a) and _aligned(wide_b):  # a copy of a part of each row has other strides
            return F.grouped_mm(wide_a, wide_b, offs=ends_G).to(a.dtype)
    return F.grouped_mm(a, b, offs=ends_G)


def grouped_matmul_loop(a: Tensor, b: Tensor, ends_G: Tensor) -> Tensor:
    """The plain-torch reference: slow, and it waits for the device to learn where groups end."""
    ends = ends_G.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans])
    tail = a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])
    return torch.cat([*(a[start:end] @ weight for (start, end), weight in zip(spans, b, strict=True)), tail])


def _aligned(matrix: Tensor) -> bool:
    rows, columns = matrix.stride()[-2:]
    leading = rows if columns == 1 else columns
    return 1 in (rows, columns) and leading * matrix.element_size() % 16 == 0


class Projection:
    """The three products of one weight of all experts, ``[E, out, in]``."""

    def __init__(self, weight_EOI: Tensor) -> None:
        self.weight_EOI = weight_EOI

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        return grouped_matmul(x_MI, self.weight_EOI.transpose(1, 2), ends_E)

    def dgrad(self, dy_MO: Tensor, ends_E: Tensor) -> Tensor:
        return grouped_matmul(dy_MO, self.weight_EOI, ends_E)

    def wgrad(self, dy_MO: Tensor, x_MI: Tensor, ends_E: Tensor, *grads: Gradient | None) -> None:
        """``grads``: of the weight, and of A and B."""
        if grads[0] is not None:
            grads[0].put(grouped_matmul(dy_MO.t(), x_MI, ends_E))
