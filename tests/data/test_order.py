"""The mixture against a plain loop that takes one chunk at a time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.data.chunks import build_chunks
from fsdmoe.data.holdout import Holdout
from fsdmoe.data.order import ChunkOrder, Progress
from tests.support.corpora import memory_store, memory_stores

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def order_of(stores, weights, *, shuffle=True, piece_len=20, holdout=0.0):
    split = Holdout(stores, holdout)
    return ChunkOrder([split.training_chunks(s, piece_len) for s in stores], weights, seed=3, shuffle=shuffle)


def plain_merge(order, num_tokens):
    """Take the next chunk of the source that is furthest behind its share, again and again."""
    places, tokens, taken, total = [0] * len(order.tables), [0] * len(order.tables), [], 0
    while total < num_tokens:
        clocks = [Fraction(t) / Fraction(w) for t, w in zip(tokens, order.weights, strict=True)]
        source = clocks.index(min(clocks))
        while (chunk := order.at(source, places[source])).length_N[0] == 0:
            places[source] += 1
        taken.append(
            (source, places[source], int(chunk.document_N[0]), int(chunk.start_N[0]), int(chunk.length_N[0]))
        )
        places[source] += 1
        tokens[source] += taken[-1][-1]
        total += taken[-1][-1]
    return taken


def listed(draw):
    columns = (draw.source_N, draw.place_N, draw.document_N, draw.start_N, draw.length_N)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    mixture=st.lists(st.tuples(lengths, st.sampled_from([0.25, 0.5, 1.0, 3.0, 8.0])), min_size=1, max_size=4),
    num_tokens=st.integers(1, 600),
    shuffle=st.booleans(),
)
def test_the_vectorised_mixture_is_the_plain_one(mixture, num_tokens, shuffle):
    order = order_of(memory_stores([one for one, _ in mixture]), [w for _, w in mixture], shuffle=shuffle)
    drawn = listed(order.draw([Progress()] * len(mixture), num_tokens))
    expected = plain_merge(order, num_tokens)
    assert drawn[: len(expected)] == expected


@settings(max_examples=40, deadline=None)
@given(
    mixture=st.lists(st.tuples(lengths, st.floats(0.05, 9.0)), min_size=1, max_size=3),
    first=st.integers(1, 300),
)
def test_drawing_twice_continues_the_first_draw(mixture, first):
    order = order_of(memory_stores([one for one, _ in mixture]), [w for _, w in mixture])
    start = [Progress()] * len(mixture)
    head = listed(order.draw(start, first))
    progress = list(start)
    for source, place, _, _, length in head:
        progress[source] = Progress(place + 1, progress[source].tokens + length)
    both = head + listed(order.draw(progress, 300))
    whole = listed(order.draw(start, sum(chunk[-1] for chunk in both)))
    assert whole[: len(both)] == both


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(0.1, 5.0), min_size=2, max_size=4), num_tokens=st.integers(500, 3000))
def test_shares_of_tokens_follow_the_weights_to_within_a_chunk(weights, num_tokens):
    stores = memory_stores([[7 + i] * 30 + [60] for i in range(len(weights))])
    draw = order_of(stores, weights, piece_len=60).draw([Progress()] * len(weights), num_tokens)
    tokens = np.array([draw.length_N[draw.source_N == i].sum() for i in range(len(weights))])
    shares = np.array(weights) / sum(weights)
    assert (np.abs(tokens - shares * tokens.sum()) <= 60 * len(weights)).all()


def test_a_source_far_ahead_waits_for_the_others_without_being_drawn():
    order = order_of(memory_stores([[50] * 10, [2] * 10]), [1.0, 1.0], piece_len=1 << 40)
    draw = order.draw([Progress(chunks=1, tokens=10**9), Progress()], 500)
    assert set(draw.source_N.tolist()) == {1}
    assert draw.length_N.sum() < 600, "and not everything up to the other's clock is planned at once"


def test_enough_is_drawn_even_where_documents_are_much_shorter_than_their_mean():
    order = order_of(memory_stores([[1] * 2000 + [100_000]]), [1.0], shuffle=False, piece_len=1 << 40)
    draw = order.draw([Progress()], 1500)
    assert draw.place_N.tolist() == list(range(1500))


@settings(max_examples=60, deadline=None)
@given(one=st.lists(st.integers(1, 200), min_size=1, max_size=20), piece_len=st.integers(1, 80))
def test_chunks_cover_every_token_of_every_document_once(one, piece_len):
    (store,) = memory_stores([one])
    table = build_chunks(store, piece_len, Holdout([store], 0.0).is_held_out)
    chunks = np.arange(table.num_chunks)
    documents, starts = table.locate(chunks)
    covered = sorted(
        (int(d), token)
        for d, s, n in zip(documents, starts, table.lengths(chunks), strict=True)
        for token in range(int(s), int(s + n))
    )
    assert covered == [(d, token) for d, length in enumerate(one) for token in range(length)]
    assert table.lengths(chunks).max() <= piece_len
    assert table.num_training_tokens == sum(one)


def test_the_order_of_the_rest_does_not_depend_on_what_is_held_out():
    store = memory_store("a", [6] * 40, hashes=[1 if i % 5 == 0 else 2**63 for i in range(40)])
    everything, without = (order_of([store], [1.0], holdout=h).draw([Progress()], 100) for h in (0.0, 0.2))
    kept = [chunk for chunk in listed(everything) if chunk[2] % 5]
    assert kept[: len(kept)] == listed(without)[: len(kept)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_follow_each_other_without_a_seam(shuffle):
    order = order_of(memory_stores([[3] * 7]), [1.0], shuffle=shuffle)
    draw = order.draw([Progress()], 3 * 7 * 4)
    assert [sorted(draw.document_N[i : i + 7].tolist()) for i in range(0, 28, 7)] == [list(range(7))] * 4
    assert draw.place_N.tolist() == list(range(len(draw.place_N)))
