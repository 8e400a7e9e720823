"""Load over time as a picture: bounded columns, and colours that mean something."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.observe.heatmap import LoadHistory, heatmap_image


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 9), st.integers(1, 80))
def test_columns_stay_bounded_lose_no_count_and_keep_their_order(max_columns, num_records):
    history = LoadHistory(max_columns)
    for record in range(num_records):
        history.add(torch.tensor([1.0, float(record)]))
    ones, sums = history.counts_EC()
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
    for _ in range(5):
        history.add(load_E)
    assert load_E.tolist() == [1.0, 1.0, 1.0]


def cell_colours(counts_EC):
    """One pixel of each cell, after checking that cells are blocks of one colour."""
    image = heatmap_image(counts_EC)
    assert image.dtype == torch.uint8
    num_experts, num_columns = counts_EC.shape
    height, width = image.shape[1] // num_experts, image.shape[2] // num_columns
    assert image.shape == (3, num_experts * height, num_columns * width)
    cells = image[:, ::height, ::width]
    assert torch.equal(cells.repeat_interleave(height, 1).repeat_interleave(width, 2), image)
    return cells.permute(1, 2, 0).tolist()


def test_colours_tell_under_even_over_dead_and_no_tokens_apart():
    counts_EC = torch.tensor(
        [[4.0, 1.0, 16.0, 0.0], [4.0, 4.0, 0.0, 0.0], [4.0, 7.0, 0.0, 0.0], [4.0, 4.0, 0.0, 0.0]]
    )
    cells = cell_colours(counts_EC)
    assert [cells[expert][0] for expert in range(4)] == [[247, 247, 247]] * 4
    under, over = cells[0][1], cells[2][1]
    assert under[2] > under[0]  # blue
    assert over[0] > over[2]  # red
    assert cells[0][1] == [33, 102, 172]  # a quarter: the deepest blue
    assert cells[0][2] == [178, 24, 43]  # four times: the deepest red
    assert cells[1][2] == [0, 0, 0]
    assert [cells[expert][3] for expert in range(4)] == [[150, 150, 150]] * 4


def test_more_load_is_never_less_red():
    relative = torch.linspace(0.3, 3.9, 40)
    rest = 8.0 - relative
    counts_EC = torch.stack([relative, *[rest / 7] * 7])  # eight experts, mean 1
    reds = [colour[0] - colour[2] for colour in cell_colours(counts_EC)[0]]
    assert reds == sorted(reds)
    assert reds[0] < 0 < reds[-1]


def test_many_experts_and_columns_take_one_pixel_each():
    assert heatmap_image(torch.ones(512, 1024)).shape == (3, 512, 1024)


def test_an_empty_history_is_refused():
    with pytest.raises(ValueError, match="at least one expert and column"):
        heatmap_image(LoadHistory(4).counts_EC())
