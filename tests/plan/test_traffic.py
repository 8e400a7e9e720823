"""Rows that go to a node once, in the planner: over which meshes, how many, how long."""

from __future__ import annotations

import pytest

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.mesh import Degrees
from fsdmoe.models.config import preset_config
from fsdmoe.plan.hardware import gpu_named
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.search import legal_degrees
from fsdmoe.plan.source import Request, read_request
from fsdmoe.plan.traffic import expert_legs, expert_seconds

H200 = gpu_named("h200")
BY_NODE = ExpertsConfig(dispatcher="by_node")


def test_rows_by_node_are_planned_where_experts_are_on_several_nodes() -> None:
    config = read_request(Request("deepseek-v3", 64), {"experts": {"dispatcher": "by_node"}}).config
    assert {each.ep for each in legal_degrees(config, Job.of(config), 64, H200)} == {16, 32, 64}


def test_both_exchanges_are_counted_and_take_their_time_in_turn() -> None:
    job = Job(preset_config("deepseek-v3"), 4096, 64, BY_NODE)
    setting = Setting(degrees=Degrees(1, 64, 1, 1, 1, 64, 1), experts=BY_NODE)
    row = 2 * 7168 * 4096
    between, inside = row * 3.17538, row * 6.43945  # docs/experts.md; (64 - 8) of 64 ranks in either sum
    assert expert_legs(job, setting).out == pytest.approx(between + inside, rel=1e-4)
    seconds = expert_seconds(job, setting, H200)
    assert seconds == pytest.approx([between / H200.network + inside / H200.nvlink] * 4, rel=1e-4)
