"""Splitting packed rows: every token once, with its columns, equal counts, equal work."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.context_parallel.split import PADDING, SequenceSplit, shard_batch, split_documents, split_rows
from fsdmoe.core.errors import ConfigError
from fsdmoe.testing import run_ranks
from tests.support.attention_work import work_R

SIZES = st.sampled_from([1, 2, 3, 4, 8])
ROWS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=3)


@dataclass(frozen=True)
class Columns:
    """The columns of a batch, as the data package returns them."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor
    document_ids_BS: torch.Tensor
    loss_mask_BS: torch.Tensor


def columns_of(lengths: list[int]) -> Columns:
    """One row whose tokens count up, so that a label is its token + 1."""
    document_ids = torch.tensor([[d for d, n in enumerate(lengths) for _ in range(n)]])
    positions = torch.tensor([[p for n in lengths for p in range(n)]])
    tokens = torch.arange(100, 100 + sum(lengths))[None]
    has_next = torch.tensor([[p < n - 1 for n in lengths for p in range(n)]])
    return Columns(tokens, (tokens + 1) * has_next, positions, document_ids, has_next)


@settings(deadline=None, max_examples=60)
@given(ROWS, SIZES, st.sampled_from([1, 4]))
def test_every_token_is_on_exactly_one_rank(rows: list[list[int]], size: int, multiple_of: int) -> None:
    split = split_documents(rows, size, multiple_of=multiple_of)
    assert split.local_len % multiple_of == 0
    for number, row in enumerate(rows):
        places = split.index_RBL[:, number].flatten()
        assert sorted(places[places != PADDING].tolist()) == list(range(sum(row)))
    assert split.num_padding == split.index_RBL.numel() - sum(map(sum, rows))


@settings(deadline=None, max_examples=60)
@given(ROWS, SIZES)
def test_ranks_hold_equally_many_tokens_of_a_row_up_to_one(rows: list[list[int]], size: int) -> None:
    split = split_documents(rows, size)
    counts_RB = (split.index_RBL != PADDING).sum(2)
    assert (counts_RB.amax(0) - counts_RB.amin(0)).max() <= 1


@settings(deadline=None, max_examples=30)
@given(ROWS, SIZES)
def test_gathering_is_the_inverse_of_splitting(rows: list[list[int]], size: int) -> None:
    split = split_documents(rows, size)
    whole = torch.zeros(len(rows), split.seq_len, 2)
    for number, row in enumerate(rows):
        whole[number, : sum(row)] = torch.randn(sum(row), 2)
    assert torch.equal(split.unshard([split.shard(whole, rank) for rank in range(size)]), whole)


def test_each_document_is_cut_in_zig_zag() -> None:
    split = split_documents([[16, 8]], 2)
    first = [0, 1, 2, 3, 12, 13, 14, 15]
    assert split.index_RBL[0, 0].tolist() == [*first, 16, 17, 22, 23]
    assert split.position_RBL[0, 0].tolist() == [*first, 0, 1, 6, 7]
    assert split.document_RBL[1, 0].tolist() == [0] * 8 + [1] * 4


def test_rows_that_the_ranks_divide_need_no_padding_whatever_their_documents() -> None:
    lengths = [13, 1, 7, 2, 25, 3, 3, 10]
    assert sum(lengths) % 8 == 0
    assert split_documents([lengths], 8).num_padding == 0
    assert split_documents([[*lengths, 3]], 8).num_padding == 5


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_work_is_balanced_on_packed_rows_where_cutting_rows_is_not(size: int) -> None:
    lengths = [6000, 1000, 800, 392]
    work = work_R(split_documents([lengths], size)).double()
    assert (work.max() - work.min()) / work.mean() < 0.01
    # The same zig-zag over the row as a whole, each token still attending in its own document.
    position = torch.cat([torch.arange(n) for n in lengths])
    chunks = (position + 1).double().tensor_split(2 * size)
    row_work = torch.stack([chunks[r].sum() + chunks[-1 - r].sum() for r in range(size)])
    assert (row_work.max() - row_work.min()) / row_work.mean() > 0.3


def test_work_is_balanced_even_among_documents_shorter_than_the_chunks() -> None:
    work = work_R(split_documents([[4] * 300, [5] * 240], 4)).double()
    assert (work.max() - work.min()) / work.mean() < 0.02


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), SIZES)
def test_labels_positions_and_masks_travel_with_their_tokens(lengths: list[int], size: int) -> None:
    whole = columns_of(lengths)
    split = split_rows(whole.document_ids_BS, size)
    seen = 0
    for rank in range(size):
        part = shard_batch(whole, split, rank)
        real = part.document_ids_BS != PADDING
        assert not part.loss_mask_BS[~real].any()
        with_loss = part.loss_mask_BS
        # The label is the next token of the document, also where that token went to another rank.
        assert torch.equal(part.labels_BS[with_loss], part.tokens_BS[with_loss] + 1)
        starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        tokens = 100 + starts[part.document_ids_BS[real]] + part.positions_BS[real]
        assert torch.equal(part.tokens_BS[real], tokens)
        assert torch.equal(part.positions_BS[real], split.position_RBL[rank][real])
        seen += int(with_loss.sum())
    assert seen == int(whole.loss_mask_BS.sum())


def gather_over_ranks() -> bool:
    split = split_documents([[5, 9], [1, 13]], dist.get_world_size())
    whole = torch.arange(28.0).view(2, 14)
    return torch.equal(split.gather(split.shard(whole, dist.get_rank()), dist.group.WORLD), whole)


def test_ranks_gather_whole_rows() -> None:
    assert all(run_ranks(gather_over_ranks, 3))


def test_the_split_depends_on_lengths_alone() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    by_ids, by_lengths = split_rows(ids, 2), split_documents([[3, 2, 3]], 2)
    relabelled = split_rows(torch.tensor([[7, 7, 7, 3, 3, 9, 9, 9]]), 2)
    for name in SequenceSplit.__dataclass_fields__:
        values = [getattr(split, name) for split in (by_ids, by_lengths, relabelled)]
        assert all(torch.equal(torch.as_tensor(values[0]), torch.as_tensor(x)) for x in values[1:])


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.cp: expected a positive number, got 0"):
        split_documents([[4]], 0)
