"""The order in which rows are sent: one row a token and rank, rank after rank, with the right labels."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.permute import sum_rows, take_rows
from fsdmoe.kernels.send_order import index_rows, order_rows
from tests.support.send_order_case import draw, expected_rows


@pytest.mark.parametrize(("num_ranks", "per_rank", "num_ids"), [(4, 2, 3), (2, 4, 3), (8, 1, 2), (1, 8, 3)])
def test_rows_stand_rank_after_rank_with_weights_and_ids_of_their_token(
    num_ranks: int, per_rank: int, num_ids: int
) -> None:
    x_TD, weights_TK, ids_TK = draw(9, num_ranks * per_rank, num_ids)
    index_TP, _, counts_C = index_rows(ids_TK, num_ranks, per_rank)
    wanted = expected_rows(ids_TK, num_ranks, per_rank)
    order = order_rows(weights_TK, ids_TK, index_TP, counts_C, per_rank).first(len(wanted))
    weights_MK, labels_MK = order.labels()
    found = [(*each, labels) for each, labels in zip(wanted, labels_MK.tolist(), strict=True)]
    assert found == [(token, rank, local, local) for token, rank, local in wanted]
    tokens = [token for token, _, _ in wanted]
    torch.testing.assert_close(weights_MK, weights_TK[tokens], rtol=0, atol=0)
    torch.testing.assert_close(take_rows(x_TD, order.permutation), x_TD[tokens], rtol=0, atol=0)
    copies_T = torch.tensor([tokens.count(token) for token in range(len(x_TD))])
    back_TD = sum_rows(x_TD[tokens], order.permutation)
    torch.testing.assert_close(back_TD, x_TD * copies_T.unsqueeze(1))


def test_no_tokens_make_no_rows() -> None:
    _, weights_TK, ids_TK = draw(0, 8, 3)
    index_TP, _, counts_C = index_rows(ids_TK, 4, 2)
    order = order_rows(weights_TK, ids_TK, index_TP, counts_C, 2)
    assert order.labels_ML.shape == (0, 6)
    assert order.permutation.num_slots == 0
