"""Tokens with choices, and the rows that each rank is to get of them."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(num_tokens: int, num_experts: int, num_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and ids, some of which are none; the first token goes nowhere."""
    random = torch.Generator().manual_seed(0)
    ids_TK = torch.rand(num_tokens, num_experts, generator=random).argsort(1)[:, :num_ids]
    ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=random) < 0.3, -1)
    ids_TK[:1] = -1
    x_TD = torch.randn(num_tokens, 8, generator=random)
    return x_TD, torch.rand(num_tokens, num_ids, generator=random), ids_TK


def expected_rows(ids_TK: Tensor, num_ranks: int, per_rank: int) -> list[tuple[int, int, list[int]]]:
    """Token, rank and the rank's own ids of each row, in sending order."""
    return [
        (
            token,
            rank,
            [each - rank * per_rank if each >= 0 and each // per_rank == rank else -1 for each in ids],
        )
        for rank in range(num_ranks)
        for token, ids in enumerate(ids_TK.tolist())
        if any(each >= 0 and each // per_rank == rank for each in ids)
    ]
