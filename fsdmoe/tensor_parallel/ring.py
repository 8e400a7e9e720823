"""Gather and scatter in pieces, each passed on to the next rank while the caller works on the one before::

    rank 1 of 4   step        0         1         2         3
    gather        works on    piece 1   piece 0   piece 3   piece 2
                  receives    piece 0   piece 3   piece 2
    scatter       works on    piece 0   piece 3   piece 2   piece 1
                  sends                 sum of 0  sum of 3  sum of 2

One piece is on the wire at any time, so what a rank sends in all is what the collective would. On a GPU the
transfers run on the communicator's stream: starting one waits for what the current stream has been given
before, and ``wait`` holds up the current stream, not the host.

R ranks, B rows, s tokens of a row on a rank, S = R s, D any width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsdmoe.ring_send_recv import RingSendRecv
from fsdmoe.tensor_parallel.group import TensorGroup, pieces_to_rows


def gather_while(x_BsD: Tensor, tensor: TensorGroup, consume: Callable[[int, Tensor], None]) -> Tensor:
    """All tokens, as ``TensorGroup.gather`` gives them. ``consume(rank, x_BsD)`` is called for every rank's
    stretch, from this rank's own backwards, while the next one travels."""
    pieces_RBsD = x_BsD.new_empty((tensor.size, *x_BsD.shape))
    pieces_RBsD[tensor.rank] = x_BsD
    for step in range(tensor.size):
        at = (tensor.rank - step) % tensor.size
        coming = None
        if step < tensor.size - 1:
            coming = RingSendRecv(pieces_RBsD[at], pieces_RBsD[(at - 1) % tensor.size], tensor.group)
        try:
            consume(at, pieces_RBsD[at])
        finally:  # also after an error: what was sent must be received, or the next exchange would hang
            if coming is not None:
                coming.wait()
    return pieces_to_rows(pieces_RBsD)


def scatter_while(
    produce: Callable[[int], Tensor], tensor: TensorGroup, meanwhile: Callable[[], None] | None = None
) -> Tensor:
    """This rank's stretch ``[B, s, D]`` of the sum over all ranks. ``produce(rank)`` is called once for every
    rank and gives this rank's part of that one's stretch, fresh and contiguous, while the sum of the one
    before travels; ``meanwhile`` is called besides while the last one does."""
    total_BsD = produce((tensor.rank - 1) % tensor.size)
    for step in range(1, tensor.size):
        coming = RingSendRecv(total_BsD, torch.empty_like(total_BsD), tensor.group)
        try:
            part_BsD = produce((tensor.rank - 1 - step) % tensor.size)
            if meanwhile is not None and step == tensor.size - 1:
                meanwhile()
        finally:
            total_BsD = coming.wait()
        total_BsD += part_BsD
    return total_BsD
