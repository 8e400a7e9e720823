"""Rows: boundaries kept, every successor asked for once, nothing lost."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.data.packing import pack_rows, split_rows
from fsdmoe.data.spans import Spans
from tests.support.corpora import memory_config, memory_store, memory_stores, open_streams


def spans_of(*pieces):
    return Spans(*np.array(pieces, dtype=np.int64).reshape(-1, 4).T)


def test_a_row_holds_the_end_of_one_document_and_the_beginning_of_another():
    (store,) = memory_stores([[5, 2, 9]])
    batch = pack_rows(spans_of((0, 0, 2, 5), (0, 1, 0, 2), (0, 2, 0, 3)), [store], 8, 1)
    assert batch.tokens_BS.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch.labels_BS.tolist() == [[3, 4, 0, 6, 0, 8, 9, 10]]
    assert batch.loss_mask_BS.tolist() == [[True, True, False, True, False, True, True, True]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]


def test_a_document_that_goes_on_in_the_next_row_is_a_new_segment_with_its_label_kept():
    (store,) = memory_stores([[7]])
    batch = pack_rows(spans_of((0, 0, 0, 7)), [store], 4, 2)
    assert batch.labels_BS.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]], (
        "the padding is a segment of its own"
    )
    assert batch.loss_mask_BS.tolist() == [[True] * 4, [True, True, False, False]]


def test_only_wanted_targets_carry_loss():
    store = dataclasses.replace(memory_store("a", [6]), targets=np.array([0, 0, 1, 1, 0, 1], np.uint8))
    batch = pack_rows(spans_of((0, 0, 0, 3), (0, 0, 3, 6)), [store], 3, 2)
    assert batch.loss_mask_BS.tolist() == [[False, True, True], [False, True, False]]
    assert batch.labels_BS.tolist() == [[0, 2, 3], [0, 5, 0]]


@settings(max_examples=40, deadline=None)
@given(
    one=st.lists(st.integers(1, 50), min_size=1, max_size=10),
    seq_len=st.integers(2, 16),
    seed=st.integers(0, 9),
)
def test_every_token_but_a_documents_last_is_asked_for_its_successor(one, seq_len, seed):
    stores = memory_stores([one])
    (stream,) = open_streams(stores, memory_config([1.0], seq_len=seq_len), ranks=1, seed=seed)
    lasts = {int(offset) - 1 for offset in stores[0].offsets[1:]}
    for batch in stream.next_step():
        for tokens, labels, mask in zip(batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, strict=True):
            for token, label, wanted in zip(tokens.tolist(), labels.tolist(), mask.tolist(), strict=True):
                assert wanted == (token not in lasts)
                assert label == (token + 1 if wanted else 0)


@settings(max_examples=40, deadline=None)
@given(
    one=st.lists(st.integers(1, 50), min_size=1, max_size=10),
    seq_len=st.integers(2, 16),
    seed=st.integers(0, 9),
)
def test_segments_are_runs_of_one_document_with_positions_from_zero(one, seq_len, seed):
    stores = memory_stores([one])
    (stream,) = open_streams(stores, memory_config([1.0], seq_len=seq_len), ranks=1, seed=seed)
    for batch in stream.next_step():
        for tokens, positions, ids in zip(
            batch.tokens_BS, batch.positions_BS, batch.document_ids_BS, strict=True
        ):
            assert ids.tolist() == sorted(ids.tolist())
            assert set(ids.tolist()) == set(range(int(ids[-1]) + 1))
            for segment in ids.unique():
                run = tokens[ids == segment]
                assert (run == run[0] + torch.arange(len(run))).all()
                assert positions[ids == segment].tolist() == list(range(len(run)))
                assert len(np.unique(np.searchsorted(stores[0].offsets, run.numpy(), side="right"))) == 1


def test_a_batch_is_split_into_micro_batches_in_row_order_and_moves_as_one():
    (store,) = memory_stores([[12]])
    batch = pack_rows(spans_of((0, 0, 0, 12)), [store], 2, 6)
    parts = split_rows(batch, 2)
    assert torch.cat([part.tokens_BS for part in parts]).equal(batch.tokens_BS)
    assert [part.num_tokens for part in parts] == [4, 4, 4]
    assert int(parts[-1].to("cpu").loss_mask_BS.sum()) == 3
    assert {tensor.dtype for tensor in (batch.tokens_BS, batch.labels_BS, batch.positions_BS)} == {
        torch.int64
    }
    assert batch.loss_mask_BS.dtype == torch.bool


def test_rows_of_a_batch_come_from_different_documents():
    (stream,) = open_streams(memory_stores([[100] * 30]), memory_config([1.0], cursors=12), ranks=1)
    stream.next_step()
    assert len({span.document for span in stream.consumed_documents()}) == 12


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=10), seq_len=st.integers(2, 16))
def test_without_packing_a_row_has_one_document_and_padding_without_loss(lengths, seq_len):
    stores = memory_stores([lengths])
    config = memory_config([1.0], seq_len=seq_len, pack=False)
    (stream,) = open_streams(stores, config, ranks=1)
    batches = stream.next_step()
    for batch in batches:
        assert (batch.document_ids_BS <= 1).all()
        assert not batch.loss_mask_BS[batch.document_ids_BS > 0].any()
    tokens = torch.cat([batch.tokens_BS[batch.document_ids_BS == 0] for batch in batches]).tolist()
    starts = stores[0].offsets
    spans = [(int(starts[span.document]), span) for span in stream.consumed_documents()]
    assert tokens == [first + t for first, span in spans for t in range(span.start, span.stop)]
