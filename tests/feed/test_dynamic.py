"""Dealing the documents of a step: every token once, the same plan on every rank, groups of several sizes."""

from __future__ import annotations

from collections import Counter

import torch

from fsdmoe.context_parallel.split import PADDING
from fsdmoe.data import Batch
from fsdmoe.feed.dynamic import SharedRow, replan_documents
from tests.support.parallel_case import LENGTH, ROWS, rows_of


def replan(batches: list[Batch], rank: int, *, num_ranks: int = 4, max_tokens: int = 6) -> list[SharedRow]:
    return replan_documents(
        batches, rank=rank, num_ranks=num_ranks, sizes=(1, 2, 4), max_tokens=max_tokens, multiple_of=2
    )


def numbered(step: int) -> Batch:
    """Rows whose tokens are all different, so that each can be followed."""
    columns = dict(rows_of(step).columns)
    columns["tokens_BS"] = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    return Batch(**columns)


def test_every_token_is_dealt_to_one_rank_with_all_that_belongs_to_it() -> None:
    batch = numbered(0)
    flat = {name: column.flatten() for name, column in batch.columns.items()}
    seen: Counter[int] = Counter()
    for rank in range(4):
        for row, split in replan([batch], rank):
            own = split.index_RBL[rank % split.size, 0]
            for place in own[own != PADDING].tolist():
                token = int(row.tokens_BS[0, place])
                seen[token] += 1
                for name in ("labels_BS", "positions_BS", "loss_mask_BS"):
                    assert getattr(row, name)[0, place] == flat[name][token]
    assert seen == Counter(range(ROWS * LENGTH))


def test_ranks_agree_on_sizes_that_suit_the_documents() -> None:
    planned = [replan([numbered(0)], rank) for rank in range(4)]
    assert len({len(rows) for rows in planned}) == 1
    sizes = [[split.size for _, split in rows] for rows in planned]
    assert {size for of_rank in sizes for size in of_rank} >= {1, 4}, "a row of one document needs 4 ranks"
    for slot in zip(*planned, strict=True):
        for rank, (row, split) in enumerate(slot):
            first = slot[rank // split.size * split.size]
            assert torch.equal(row.tokens_BS, first.batch.tokens_BS)
            assert split.local_len <= 6
            assert split.local_len % 2 == 0


def test_micro_batches_of_the_data_package_make_no_difference() -> None:
    whole = numbered(1)
    halves = [
        Batch(**{name: column[rows] for name, column in whole.columns.items()})
        for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))
    ]
    for (one, _), (other, _) in zip(replan([whole], 2), replan(halves, 2), strict=True):
        assert torch.equal(one.tokens_BS, other.tokens_BS)


def test_a_rank_without_documents_still_runs_a_row_of_padding() -> None:
    columns = {name: column[:1, :8] for name, column in numbered(0).columns.items()}
    planned = [replan([Batch(**columns)], rank, max_tokens=8) for rank in range(4)]
    empty = [split for rows in planned for _, split in rows if split.seq_len == 0]
    assert empty, "one document on one rank leaves the others without"
    assert all((split.index_RBL == PADDING).all() for split in empty)
