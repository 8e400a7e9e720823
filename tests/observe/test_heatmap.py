"""Load over time: bounded columns that outlive a start, and colours that mean something."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.observe.heatmap import SPAN, LoadHistory, load_tones


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 9), st.integers(1, 80))
def test_columns_stay_bounded_lose_no_count_and_keep_their_order(max_columns, num_records):
    history = LoadHistory(max_columns)
    for record in range(num_records):
        history.add(record + 1, {"a": torch.tensor([1.0]), "b": torch.tensor([float(record), 0.0])})
    counts = history.counts()
    (ones,), (sums, _) = counts["a"], counts["b"]
    assert 1 <= len(ones) <= max_columns
    per_column = history.records_per_column
    assert ones[:-1].tolist() == [per_column] * (len(ones) - 1)  # all full but the last
    assert 1 <= ones[-1] <= per_column
    assert ones.sum() == num_records
    expected = [
        sum(range(num_records)[start : start + per_column]) for start in range(0, num_records, per_column)
    ]
    assert sums.tolist() == expected


def test_adding_leaves_the_given_counts_alone():
    history, load_E = LoadHistory(2), torch.ones(3)
    for step in range(5):
        history.add(step, {"a": load_E})
    assert load_E.tolist() == [1.0, 1.0, 1.0]


def numbered(history, first, last):
    """Record every step's number as its count."""
    for step in range(first, last + 1):
        history.add(step, {"a": torch.tensor([float(step), 1.0]), "b": torch.tensor([2.0])})


@pytest.mark.parametrize("num_before", [4, 7, 8, 13])
def test_a_resumed_history_goes_on_where_it_was(tmp_path, num_before):
    whole, killed = LoadHistory(8), LoadHistory(8)
    numbered(whole, 1, 20)
    numbered(killed, 1, num_before)
    killed.save(tmp_path / "loads.npz")
    resumed = LoadHistory.load(tmp_path / "loads.npz", 8, until=num_before)
    numbered(resumed, num_before + 1, 20)
    assert (resumed.first_step, resumed.last_step) == (1, 20)
    for layer, counts_EC in whole.counts().items():
        assert torch.equal(resumed.counts()[layer], counts_EC)


def test_steps_beyond_the_resumed_one_are_forgotten(tmp_path):
    history = LoadHistory(8)
    numbered(history, 1, 13)  # two steps a column
    history.save(tmp_path / "loads.npz")
    resumed = LoadHistory.load(tmp_path / "loads.npz", 8, until=9)
    assert resumed.last_step == 8
    assert resumed.counts()["a"][1].tolist() == [2.0] * 4
    numbered(resumed, 10, 11)
    assert resumed.counts()["a"][0].tolist() == [3.0, 7.0, 11.0, 15.0, 21.0]
    assert LoadHistory.load(tmp_path / "loads.npz", 8, until=0).counts() == {}


def test_a_damaged_file_another_width_and_another_model_are_taken_as_they_are(tmp_path):
    history = LoadHistory(8)
    numbered(history, 1, 8)
    history.save(tmp_path / "loads.npz")
    narrow = LoadHistory.load(tmp_path / "loads.npz", 3, until=8)
    assert narrow.counts()["a"][1].tolist() == [4.0, 4.0]
    narrow.add(9, {"other": torch.ones(5)})
    assert {name: tuple(counts.shape) for name, counts in narrow.counts().items()} == {"other": (5, 1)}
    assert narrow.first_step == 9
    (tmp_path / "loads.npz").write_bytes(b"PK not a whole file")
    assert LoadHistory.load(tmp_path / "loads.npz", 8, until=8).counts() == {}


def test_tones_tell_under_even_over_dead_and_no_tokens_apart():
    counts_EC = torch.tensor(
        [[4.0, 1.0, 32.0, 0.0], [4.0, 2.0, 0.0, 0.0], [4.0, 8.0, 0.0, 0.0], [4.0, 5.0, 0.0, 0.0]]
        + [[4.0, 4.0, 0.0, 0.0]] * 4
    )
    tones_EC = load_tones(counts_EC)
    assert tones_EC[:, 0].tolist() == [0.0] * 8
    assert tones_EC[:3, 1].tolist() == [-2.0, -1.0, 1.0]
    assert tones_EC[:2, 2].tolist() == [SPAN, -2 * SPAN], (
        "eight times is shown as four, nothing as less than all"
    )
    assert np.isnan(tones_EC[:, 3]).all()
