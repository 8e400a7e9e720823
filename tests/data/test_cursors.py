"""Rows of chats and other records with a loss mask: no record is cut that fits a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.data.cursors import RowPlanner, start_position
from fsdmoe.data.holdout import Holdout
from fsdmoe.data.order import ChunkOrder
from fsdmoe.data.spans import NO_SOURCE
from fsdmoe.data.store import TokenStore
from tests.support.corpora import memory_config, memory_store, memory_stores, open_streams, take_steps

SEQ_LEN = 8
PAD = NO_SOURCE


def with_loss_mask(store: TokenStore) -> TokenStore:
    return dataclasses.replace(store, targets=np.ones(store.num_tokens, np.uint8))


def planned(stores: Sequence[TokenStore], num_rows: int, *, cursors: int = 1) -> list[list[tuple[int, int]]]:
    """The rows of documents in file order: the number of each document (or PAD), and its tokens there."""
    tables = [Holdout(stores, 0.0).training_chunks(store, 1 << 30) for store in stores]
    order = ChunkOrder(tables, [1.0] * len(stores), seed=0, shuffle=False)
    planner = RowPlanner(order, start_position(len(stores), cursors), SEQ_LEN)
    return [
        [(PAD if source == NO_SOURCE else document, stop - start) for source, document, start, stop in row]
        for row in (planner.next_rows(1) for _ in range(num_rows))
    ]


def test_a_record_that_does_not_fit_begins_the_next_row_and_a_longer_one_is_cut():
    rows = planned([with_loss_mask(memory_store("a", [5, 4, 3, 8, 12, 9]))], 6)
    assert rows == [
        [(0, 5), (PAD, 3)],
        [(1, 4), (2, 3), (PAD, 1)],
        [(3, 8)],
        [(4, 8)],
        [(4, 4), (PAD, 4)],
        [(5, 8)],
    ]


def test_what_is_left_of_a_row_takes_the_longest_waiting_record_that_fits():
    rows = planned([with_loss_mask(memory_store("a", [5, 4, 6, 3]))], 3, cursors=2)
    assert rows == [[(0, 5), (PAD, 3)], [(2, 6), (PAD, 2)], [(1, 4), (3, 3), (PAD, 1)]]


def test_text_is_cut_anywhere_next_to_records_too():
    assert planned([memory_store("a", [5, 4, 7])], 2) == [[(0, 5), (1, 3)], [(1, 1), (2, 7)]]
    text, chats = memory_stores([[5], [6]])
    mixed = planned([text, with_loss_mask(chats)], 3)
    assert mixed == [[(0, 5), (PAD, 3)], [(0, 6), (0, 2)], [(0, 3), (PAD, 5)]], "text, chat, text, chat"


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    stop_at=st.integers(0, 4),
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 9),
)
def test_no_record_is_split_where_it_fits_and_any_step_resumes_on_any_ranks(
    lengths, stop_at, before, after, seed
):
    stores, config = [with_loss_mask(memory_store("a", lengths))], memory_config([1.0], seq_len=SEQ_LEN)
    whole = open_streams(stores, config, ranks=1, seed=seed)
    steps = take_steps(whole, 5)
    spans = [span for found, _ in steps for span in found]
    for _, document, start, stop in spans:
        assert start % SEQ_LEN == 0, "cut at the end of a full row only"
        assert stop == lengths[document] or stop - start == SEQ_LEN
    assert whole[0].sources()[0].tokens_read == sum(stop - start for _, _, start, stop in spans)

    first = open_streams(stores, config, ranks=before, seed=seed)
    assert take_steps(first, stop_at) == steps[:stop_at]
    resumed = open_streams(stores, config, ranks=after, seed=seed)
    for stream in resumed:
        stream.load_state_dict(first[0].state_dict())
    assert take_steps(resumed, 5 - stop_at) == steps[stop_at:]


def test_every_record_is_read_once_in_an_epoch():
    lengths = [1 + 7 * n % 8 for n in range(40)]
    (stream,) = open_streams([with_loss_mask(memory_store("a", lengths))], memory_config([1.0]), ranks=1)
    times = [0] * len(lengths)
    for spans, _ in take_steps([stream], 20):
        for _, document, _, _ in spans:
            times[document] += 1
    assert max(times) - min(times) <= 2, "a waiting record of an epoch may see the next one begin"
    assert min(times) >= 5


def test_a_position_inside_a_record_reads_its_rest_first():
    """As releases saved it that cut records anywhere."""
    lengths = [5, 6, 7, 4]
    config = memory_config([1.0], shuffle=False)
    cutting = memory_store("a", lengths)
    (old,) = open_streams([cutting], config, ranks=1, rows=1)
    (document, read) = take_steps([old], 1)[0][0][-1][1::2]
    assert (document, read) == (1, 3)
    (new,) = open_streams([with_loss_mask(cutting)], config, ranks=1, rows=1)
    new.load_state_dict(old.state_dict())
    spans = [tuple(span)[1:] for found, _ in take_steps([new], 2) for span in found]
    assert spans == [(1, 3, 6), (2, 0, 7)]


@pytest.mark.parametrize(("with_mask", "cut"), [(True, 2), (False, 0)])
def test_records_longer_than_a_row_are_counted_and_documents_of_text_are_not(with_mask, cut):
    store = memory_store("a", [5, 9, 8, 30])
    (stream,) = open_streams(
        [with_loss_mask(store) if with_mask else store], memory_config([1.0]), ranks=1, rows=1
    )
    (source,) = stream.sources()
    assert source.cut == cut
    assert source.cut_text == ("2 (50.0 %) are longer than data.seq_len and are cut" if cut else "")
