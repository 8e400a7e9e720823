"""The stream is one stream: whoever reads it, wherever it is cut, whatever changes at the cut."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.config import DataConfig
from fsdmoe.data.stream import DataStream
from tests.support.corpora import (
    memory_config,
    memory_store,
    memory_stores,
    open_streams,
    take_steps,
    tokens_of,
)

ranks = st.integers(1, 4)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12)
# A few sources: their documents' lengths, and a weight.
mixtures = st.lists(st.tuples(lengths, st.floats(0.05, 10.0)), min_size=1, max_size=3)


@st.composite
def configs(draw: st.DrawFn, num_sources: int, weights: list[float]) -> DataConfig:
    assert num_sources == len(weights)
    shuffle = draw(st.booleans())
    return memory_config(
        weights,
        shuffle=shuffle,
        seq_len=draw(st.integers(2, 16)),
        cursors=draw(st.one_of(st.none(), st.integers(1, 9))),
        piece_len=draw(st.one_of(st.none(), st.integers(16, 40))) if shuffle else None,
    )


def through_json(stream: DataStream) -> dict:
    return json.loads(json.dumps(stream.state_dict()))


@settings(max_examples=60, deadline=None)
@given(
    mixture=mixtures,
    data=st.data(),
    before=ranks,
    after=ranks,
    save_at=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_any_number_of_ranks_resumes_the_stream_of_one_rank_at_any_step(
    mixture, data, before, after, save_at, seed
):
    stores = memory_stores([one for one, _ in mixture])
    config = data.draw(configs(len(mixture), [weight for _, weight in mixture]))
    expected = take_steps(open_streams(stores, config, ranks=1, seed=seed), save_at + 4)

    first = open_streams(stores, config, ranks=before, seed=seed)
    consumed = take_steps(first, save_at)
    states = [through_json(stream) for stream in first]
    second = open_streams(stores, config, ranks=after, seed=seed)
    for stream in second:
        assert stream.load_state_dict(states[0]) is None
    consumed += take_steps(second, 4)

    assert all(state == states[0] for state in states), "every rank saves the same position"
    assert _merged(consumed) == _merged(expected)
    assert [rows for _, rows in consumed] == [rows for _, rows in expected]


def _merged(steps):
    """Spans in global order; a span is cut where one rank's rows end, so neighbours are joined again."""
    merged = []
    for spans, _ in steps:
        for span in spans:
            last = merged[-1] if merged else None
            if last and last[:2] == span[:2] and last[3] == span.start:
                merged[-1] = (*last[:3], span.stop)
            else:
                merged.append(tuple(span))
    return merged


def expected_counts(stream: DataStream, source: int) -> list[int]:
    """How often the position says that each token of a source has been read."""
    store, order = stream.stores[source], stream._order
    chunks = order._draw_places(source, 0, stream._position.progress[source].chunks)
    counts = [0] * store.num_tokens
    pieces = [
        (d, s, s + n, 1) for d, s, n in zip(chunks.document_N, chunks.start_N, chunks.length_N, strict=True)
    ]
    cursors = [
        cursor for cursor in stream._position.cursors if cursor is not None and cursor.source == source
    ]
    pieces += [(cursor.document, cursor.offset, cursor.stop, -1) for cursor in cursors]
    for document, start, stop, change in pieces:
        for token in range(store.offsets[document] + start, store.offsets[document] + stop):
            counts[token] += change
    return counts


@settings(max_examples=60, deadline=None)
@given(
    mixture=mixtures,
    data=st.data(),
    steps=st.tuples(st.integers(0, 4), st.integers(0, 6)),
    other_len=st.integers(2, 16),
    rows=st.integers(1, 9),
)
def test_a_resume_under_another_row_length_and_batch_neither_repeats_nor_skips(
    mixture, data, steps, other_len, rows
):
    weights = [weight for _, weight in mixture]
    stores = memory_stores([one for one, _ in mixture])
    config = data.draw(configs(len(mixture), weights))
    first = open_streams(stores, config, ranks=1)
    consumed = tokens_of(take_steps(first, steps[0]))
    changed = memory_config(weights, shuffle=config.shuffle, seq_len=other_len)
    second = open_streams(stores, changed, ranks=1, rows=rows)
    assert second[0].load_state_dict(through_json(first[0])) is None
    consumed += tokens_of(take_steps(second, steps[1]))

    counts = Counter(consumed)
    for source, store in enumerate(stores):
        assert [counts[int(token)] for token in store.shards[0]] == expected_counts(second[0], source)


@settings(max_examples=40, deadline=None)
@given(one=lengths, data=st.data(), num_steps=st.integers(1, 8))
def test_an_epoch_gives_every_token_once(one, data, num_steps):
    stores = memory_stores([one])
    (stream,) = open_streams(stores, data.draw(configs(1, [1.0])), ranks=1, rows=2)
    counts = Counter(tokens_of(take_steps([stream], num_steps)))
    assert [counts[token] for token in range(sum(one))] == expected_counts(stream, 0)

    num_chunks = stream._order.tables[0].num_chunks
    for epoch in range(3):
        chunks = stream._order._draw_places(0, epoch * num_chunks, (epoch + 1) * num_chunks)
        firsts = stores[0].offsets[chunks.document_N] + chunks.start_N
        ranges = [range(first, first + n) for first, n in zip(firsts, chunks.length_N, strict=True)]
        assert sorted(token for tokens in ranges for token in tokens) == list(range(sum(one)))


def test_the_position_has_the_same_size_after_any_number_of_steps():
    stores = memory_stores([[7] * 50, [3] * 9])
    (stream,) = open_streams(stores, memory_config([1, 2], cursors=4), ranks=1)
    take_steps([stream], 2)
    early = stream.state_dict()
    take_steps([stream], 100)
    late = stream.state_dict()
    assert len(late["open"]) == len(early["open"]) == 4
    assert len(late["sources"]) == len(early["sources"]) == 2
    assert len(json.dumps(late)) < len(json.dumps(early)) + 60


def test_a_position_saved_under_the_names_of_version_1_goes_on():
    """The state of a checkpoint written before chunks and cursors had these names."""
    stores = memory_stores([list(range(1, 40)), [5] * 30])
    config = memory_config([1, 3], cursors=4)
    (stream,) = open_streams(stores, config, ranks=1)
    take_steps([stream], 7)
    saved = stream.state_dict()
    before = {
        "version": 1,
        "steps": saved["steps"],
        "order": {"seed": 0, "shuffle": True, "piece_len": saved["order"]["piece_len"], "lanes": 4},
        "holdout": saved["holdout"],
        "sources": [
            {key: source[key] for key in ("name", "fingerprint", "weight", "tokens")}
            | {"units": source["chunks"]}
            for source in saved["sources"]
        ],
        "open": saved["open"],
        "next_lane": saved["next_cursor"],
    }
    (resumed,) = open_streams(stores, config, ranks=1)
    assert resumed.load_state_dict(json.loads(json.dumps(before))) is None
    assert resumed.state_dict() == saved
    assert take_steps([resumed], 3) == take_steps([stream], 3)


def test_steps_prepared_ahead_are_not_part_of_the_saved_position():
    stores = memory_stores([list(range(1, 40))])
    plain = memory_config([1.0])
    (reference,) = open_streams(stores, plain, ranks=1)
    take_steps([reference], 3)
    (ahead,) = open_streams(stores, memory_config([1.0], prefetch=8, num_workers=2), ranks=1)
    with ahead:
        take_steps([ahead], 3)
        assert ahead.state_dict() == reference.state_dict()
    (resumed,) = open_streams(stores, plain, ranks=1)
    resumed.load_state_dict(ahead.state_dict())
    assert take_steps([resumed], 1) == take_steps([reference], 1)


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, 1), (0, 5), (3, 0), (2, 4)])
def test_the_stream_does_not_depend_on_workers_or_prefetch(num_workers, prefetch):
    stores = memory_stores([list(range(1, 40)), [5] * 30])
    expected = take_steps(open_streams(stores, memory_config([1, 3]), ranks=1), 12)
    streams = open_streams(stores, memory_config([1, 3], num_workers=num_workers, prefetch=prefetch), ranks=2)
    assert _merged(take_steps(streams, 12)) == _merged(expected)
    for stream in streams:
        stream.close()


def test_another_seed_gives_another_order():
    stores = memory_stores([list(range(1, 40))])
    a, b = (take_steps(open_streams(stores, memory_config([1.0]), ranks=1, seed=s), 3) for s in (1, 2))
    assert a != b


def test_each_epoch_has_its_own_order():
    stores = memory_stores([[8] * 24])
    (stream,) = open_streams(stores, memory_config([1.0], cursors=1, seq_len=8), ranks=1, rows=24)
    first, second = (tokens_of(take_steps([stream], 1)) for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second


CHANGES = {
    "another seed": (lambda: memory_stores([[9] * 40, [4] * 60]), {"seed": 1}, "seed was 0 and is 1"),
    "another content": (lambda: memory_stores([[9] * 41, [4] * 60]), {}, "source0 has other content"),
    "other weights": (lambda: memory_stores([[9] * 40, [4] * 60]), {"weights": [1, 5]}, "weights were"),
    "other cursors": (lambda: memory_stores([[9] * 40, [4] * 60]), {"cursors": 3}, "cursors was 25 and is 3"),
    "no shuffling": (
        lambda: memory_stores([[9] * 40, [4] * 60]),
        {"shuffle": False},
        "shuffle was True and is False",
    ),
    "another holdout": (
        lambda: memory_stores([[9] * 40, [4] * 60]),
        {"holdout": 0.1},
        "holdout was 0.0 and is 0.1",
    ),
    "swapped sources": (lambda: memory_stores([[9] * 40, [4] * 60])[::-1], {}, "another order"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_position_of_another_data_set_is_refused_with_what_changed(change):
    stores = memory_stores([[9] * 40, [4] * 60])
    (stream,) = open_streams(stores, memory_config([1, 1]), ranks=1)
    take_steps([stream], 2)
    make, keys, expected = CHANGES[change]
    keys = dict(keys)
    seed, weights = keys.pop("seed", 0), keys.pop("weights", [1, 1])
    (other,) = open_streams(make(), memory_config(weights, **keys), ranks=1, seed=seed)
    with pytest.raises(ConfigError, match=expected) as caught:
        other.load_state_dict(stream.state_dict())
    assert "on_change" in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
def test_on_request_a_changed_data_set_goes_on_where_each_source_stood(change, capsys):
    stores = memory_stores([[9] * 40, [4] * 60])
    (stream,) = open_streams(stores, memory_config([1, 1]), ranks=1)
    seen = set(tokens_of(take_steps([stream], 1)))
    make, keys, expected = CHANGES[change]
    keys = dict(keys)
    seed, weights = keys.pop("seed", 0), keys.pop("weights", [1, 1])
    (other,) = open_streams(make(), memory_config(weights, on_change="continue", **keys), ranks=1, seed=seed)
    message = other.load_state_dict(stream.state_dict())
    assert message is not None
    assert expected in message
    assert "set data.on_change" not in message, "it is set"
    places = {
        "another content": "source0 from the beginning; source1 at the saved position",
        "swapped sources": "source1, source0 at the saved position",
    }.get(change, "source0, source1 at the saved position")
    assert message.endswith(f"it goes on with {places}")
    assert expected in capsys.readouterr().err
    read, before = (
        {s.fingerprint: f.tokens_read for s, f in zip(each.stores, each.sources(), strict=True)}
        for each in (other, stream)
    )
    # What was left of a document that is held out by now counts as read.
    assert read == pytest.approx({content: before.get(content, 0) for content in read}, abs=4)
    again = set(tokens_of(take_steps([other], 1)))
    if change != "another content":  # there the tokens of the changed source are new ones under old numbers
        assert not seen & again, "what was read before is not read again within the epoch"


def test_a_position_of_an_unknown_version_is_refused():
    (stream,) = open_streams(memory_stores([[9] * 20]), memory_config([1]), ranks=1)
    with pytest.raises(ConfigError, match="version"):
        stream.load_state_dict({**stream.state_dict(), "version": 99})


def test_held_out_documents_never_enter_the_stream_and_the_order_does_not_notice():
    hashes = [1 if i % 5 == 0 else 2**63 for i in range(40)]
    store = memory_store("a", [6] * 40, hashes=hashes)
    (stream,) = open_streams([store], memory_config([1.0], holdout=0.2), ranks=1)
    held_out = {token for i in range(0, 40, 5) for token in range(6 * i, 6 * i + 6)}
    seen = set(tokens_of(take_steps([stream], 20)))
    assert not seen & held_out
    assert seen | held_out == set(range(240))
