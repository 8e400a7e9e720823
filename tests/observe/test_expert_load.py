"""The four figures of balance: by hand, at their limits, and whatever the load."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.observe import expert_load
from fsdmoe.observe.expert_load import LoadFigures, loads_to_host


def load_figures(load_E: torch.Tensor) -> LoadFigures:
    return expert_load.load_figures({"layer": load_E})["layer"]


def test_an_even_load_is_one_zero_zero_one():
    assert load_figures(torch.full((8,), 12.0)) == LoadFigures(1.0, 0.0, 0.0, pytest.approx(1.0))


def test_everything_on_one_expert_is_the_worst():
    figures = load_figures(torch.tensor([0.0, 0.0, 40.0, 0.0]))
    assert figures == LoadFigures(4.0, pytest.approx(math.sqrt(3)), 0.75, 0.0)


def test_a_load_worked_out_by_hand():
    figures = load_figures(torch.tensor([6.0, 3.0, 3.0, 0.0]))
    assert figures.max_over_mean == pytest.approx(2.0)
    assert figures.cv == pytest.approx(math.sqrt((9 + 0 + 0 + 9) / 4) / 3)
    assert figures.dead_fraction == 0.25
    assert figures.entropy == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(4)) / math.log(4))


def test_without_a_routed_token_only_the_dead_fraction_is_defined():
    assert load_figures(torch.zeros(5)) == LoadFigures(None, None, 1.0, None)


def test_a_count_that_is_not_finite_leaves_every_figure_undefined():
    assert load_figures(torch.tensor([1.0, float("nan")])) == LoadFigures(None, None, None, None)


def test_one_expert_alone_is_even():
    assert load_figures(torch.tensor([9.0])) == LoadFigures(1.0, 0.0, 0.0, 1.0)


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"load of layer: expected one count per expert.*\(2, 3\)"):
        load_figures(torch.zeros(2, 3))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=64).filter(any), st.integers(1, 50))
def test_figures_stay_in_their_ranges_and_do_not_depend_on_scale(counts, factor):
    load_E = torch.tensor(counts, dtype=torch.float32)
    figures = load_figures(load_E)
    num_experts = len(counts)
    assert 1 - 1e-6 <= figures.max_over_mean <= num_experts + 1e-6
    assert 0 <= figures.cv <= math.sqrt(num_experts - 1) + 1e-6
    assert figures.dead_fraction == counts.count(0) / num_experts
    assert 0 <= figures.entropy <= 1
    scaled = load_figures(load_E.double() * factor)
    assert scaled.max_over_mean == pytest.approx(figures.max_over_mean)
    assert scaled.entropy == pytest.approx(figures.entropy, abs=1e-9)


def test_layers_do_not_mix_whatever_their_sizes_and_order():
    loads = {
        "layers.9": torch.tensor([6.0, 3.0, 3.0, 0.0]),
        "layers.1": torch.zeros(2),
        "layers.2": torch.tensor([float("nan"), 1.0, 1.0, 1.0]),
        "layers.0": torch.ones(4),
    }
    together = expert_load.load_figures(loads)
    assert list(together) == list(loads)
    for layer, load_E in loads.items():
        assert together[layer] == load_figures(load_E)


def test_layers_of_different_sizes_and_types_reach_the_host_unchanged():
    loads = {
        "layers.1": torch.tensor([1, 2, 3]),
        "layers.4": torch.tensor([0.5, 8.0]),
        "mtp.0": torch.ones(4),
    }
    host = loads_to_host(loads)
    assert list(host) == list(loads)
    for layer, load_E in loads.items():
        assert host[layer].tolist() == load_E.tolist()
    assert loads_to_host({}) == {}
