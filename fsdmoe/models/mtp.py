"""Multi-token prediction (DeepSeek-V3): after the last layer, each depth predicts one token further ahead.

Depth d takes the hidden states of depth d-1 and the embedding of the token d ahead, joins them, and runs one
more decoder layer; embedding and head are the model's own. Its targets are the labels, moved d to the left
within each document; a position whose document ends sooner has none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from fsdmoe.kernels.linear import Linear
from fsdmoe.kernels.rms_norm import RMSNorm
from fsdmoe.memory.calls import plain_calls


class Targets(NamedTuple):
    """What one depth reads and predicts, each ``[B, S]``."""

    inputs_BS: torch.Tensor
    labels_BS: torch.Tensor
    mask_BS: torch.Tensor


def next_targets(now: Targets, document_ids_BS: torch.Tensor | None) -> Targets:
    """The targets one token further: this depth's labels become the next depth's inputs.

    A token without loss has no label to take, but its successor is read all the same: it is in the row. The
    last of a document reads itself again: what follows it there belongs to another document."""
    follows_BS = torch.ones_like(now.mask_BS)
    follows_BS[:, -1] = False
    if document_ids_BS is not None:
        follows_BS[:, :-1] = document_ids_BS[:, :-1] == document_ids_BS[:, 1:]
    successors_BS = torch.where(follows_BS, torch.roll(now.inputs_BS, -1, dims=1), now.inputs_BS)
    inputs_BS = torch.where(now.mask_BS, now.labels_BS, successors_BS)
    labels_BS = torch.roll(now.labels_BS, -1, dims=1)
    mask_BS = torch.roll(now.mask_BS, -1, dims=1) & follows_BS
    return Targets(inputs_BS, labels_BS, mask_BS)


def all_targets(now: Targets, document_ids_BS: torch.Tensor | None, num_depths: int) -> list[Targets]:
    """Those of the next token and of every depth beyond."""
    targets = [now]
    for _ in range(num_depths):
        targets.append(next_targets(targets[-1], document_ids_BS))
    return targets


class MTPJoin(nn.Module):
    """The part of a prediction depth before its decoder layer: two norms and the projection back to one
    width."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.enorm = RMSNorm(hidden_size, eps=eps)
        self.hnorm = RMSNorm(hidden_size, eps=eps)
        self.eh_proj = Linear(2 * hidden_size, hidden_size, bias=False)
        self.memory_calls = plain_calls("input_norm")

    def forward(self, embedded_BSD: torch.Tensor, hidden_BSD: torch.Tensor) -> torch.Tensor:
        normed_BSD = self.memory_calls["input_norm"](self._normed, embedded_BSD, hidden_BSD)
        return self.eh_proj(normed_BSD)

    def _normed(self, embedded_BSD: torch.Tensor, hidden_BSD: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.enorm(embedded_BSD), self.hnorm(hidden_BSD)), dim=-1)
