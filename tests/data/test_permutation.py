"""A shuffled order that is never written down must still be a permutation, and a fair one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.data.permutation import SeededPermutation, hash_indices


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 3000), key=st.text(max_size=8))
def test_every_index_is_hit_exactly_once(size, key):
    assert sorted(SeededPermutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@settings(deadline=None)
@given(
    size=st.integers(1, 2**40),
    key=st.text(max_size=8),
    indices=st.lists(st.integers(0, 2**40 - 1), min_size=1),
)
def test_an_index_goes_to_the_same_place_whoever_asks_with_it(size, key, indices):
    asked = np.array(indices) % size
    permutation = SeededPermutation(size, key)
    together = permutation(asked)
    assert together.tolist() == [int(permutation(asked[i : i + 1])[0]) for i in range(len(asked))]
    assert ((together >= 0) & (together < size)).all()


def test_every_place_is_about_equally_likely_for_every_index():
    size, draws = 10, 1500
    hits = np.zeros((size, size))
    for i in range(draws):
        hits[np.arange(size), SeededPermutation(size, f"key {i}")(np.arange(size))] += 1
    # Each cell is binomial with mean 150 and deviation 12; 100 cells stay within 5 deviations.
    assert np.abs(hits - draws / size).max() < 5 * np.sqrt(draws * 0.1 * 0.9)


def test_neighbours_do_not_stay_neighbours():
    order = SeededPermutation(100_000, "key")(np.arange(100_000))
    assert (np.abs(np.diff(order)) == 1).mean() < 0.001


def test_hashes_of_indices_are_spread_evenly_and_do_not_depend_on_the_slice():
    whole = hash_indices(0, 100_000, "salt")
    assert (whole[700:900] == hash_indices(700, 900, "salt")).all()
    assert abs((whole < np.uint64(2**64 // 100)).mean() - 0.01) < 0.002
