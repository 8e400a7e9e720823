"""Intervals in, hidden and exposed time out."""

import pytest

from fsdmoe.observe.exposed import exposure, kind_of_traffic, merged, table, without


def test_intervals_that_touch_or_overlap_become_one():
    assert merged([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == [(0, 3), (5, 9)]


@pytest.mark.parametrize(
    ("removed", "left"),
    [
        ([], [(0, 10), (20, 30)]),
        ([(0, 30)], []),
        ([(2, 4), (6, 8)], [(0, 2), (4, 6), (8, 10), (20, 30)]),
        ([(5, 25)], [(0, 5), (25, 30)]),
        ([(-5, 1), (9, 21), (29, 40)], [(1, 9), (21, 29)]),
    ],
)
def test_what_is_removed_is_cut_out(removed, left):
    assert without([(0, 10), (20, 30)], removed) == left


def test_a_transfer_is_hidden_while_anything_computes_and_exposed_else():
    found = exposure([(0, 8), (13, 24)], {"all_to_all": [(4, 14)]})
    assert (found.span, found.compute, found.exposed, found.idle) == (24, 19, 5, 0)
    assert (found.kinds["all_to_all"].hidden, found.kinds["all_to_all"].exposed) == (5, 5)


def test_a_moment_of_two_exposed_kinds_counts_for_each_and_once_in_all():
    found = exposure([(0, 1)], {"gather": [(1, 5)], "all_to_all": [(3, 6)]})
    assert found.exposed == 5
    assert {kind: traffic.exposed for kind, traffic in found.kinds.items()} == {"all_to_all": 3, "gather": 4}


def test_transfers_of_a_kind_at_the_same_time_count_once_in_time_and_each_in_number():
    traffic = exposure([], {"reduce": [(0, 4), (2, 6)]}).kinds["reduce"]
    assert (traffic.total, traffic.exposed, traffic.count) == (6, 6, 2)


def test_what_lies_outside_of_the_span_does_not_count_and_what_is_missing_in_it_is_idle():
    found = exposure([(0, 10)], {"gather": [(8, 12), (30, 40)]}, (5, 20))
    assert (found.span, found.compute, found.exposed, found.idle) == (15, 5, 2, 8)


def test_without_anything_all_is_zero():
    found = exposure([], {})
    assert (found.span, found.compute, found.exposed, found.idle, dict(found.kinds)) == (0, 0, 0, 0, {})
    assert len(table(found)) == 4


def test_the_table_has_figures_of_one_step():
    lines = table(exposure([(0, 0.008)], {"all_to_all": [(0.006, 0.010)]}), num_steps=2)
    assert lines[0].split() == ["a", "step", "5.00", "ms"]
    assert lines[-1].split() == ["all-to-all", "2.00", "ms", "1.00", "ms", "1.00", "ms", "20.0%", "0.5"]


@pytest.mark.parametrize(
    ("collective", "group", "kind"),
    [
        ("all_gather", "mesh_ep", "all_to_all"),
        ("all_to_allv", "default_pg", "all_to_all"),
        ("all_to_all", "mesh_fsdp", "reduce"),
        ("_allgather_base", "mesh_fsdp_tp", "gather"),
        ("_reduce_scatter_base", "mesh_edp", "reduce"),
        ("ncclDevKernel_AllGather_RING_LL", "mesh_tp", "tp"),
        ("ncclDevKernel_SendRecv", "mesh_sequence", "cp"),
        ("ncclDevKernel_SendRecv", "", "other"),
        ("gloo:all_to_all", "", "all_to_all"),
    ],
)
def test_traffic_is_named_by_the_axis_of_its_group_then_by_its_collective(collective, group, kind):
    assert kind_of_traffic(collective, group) == kind
