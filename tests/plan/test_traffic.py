"""Rows that go to a node once, in the planner: over which meshes, how many, how long."""

from __future__ import annotations

import math

import pytest

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Degrees
from fsdmoe.models.config import preset_config
from fsdmoe.plan.hardware import gpu_named
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.memory import activation_bytes
from fsdmoe.plan.search import legal_degrees
from fsdmoe.plan.source import Request, read_request
from fsdmoe.plan.step_time import estimate_time
from fsdmoe.plan.traffic import expert_legs, expert_seconds, tensor_traffic

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
    assert seconds == pytest.approx([between / H200.network + inside / H200.nvlink] * 4 + [0.0], rel=1e-4)


def test_wrapped_latent_attention_is_handed_all_tokens_whole() -> None:
    model = preset_config("deepseek-v3")
    setting = Setting(degrees=Degrees(1, 4, 1, 2, 1, 1, 1))
    own, wrapped = (
        tensor_traffic(Job(model, 4096, 8, ExpertsConfig(), is_wrapped=is_wrapped), setting, is_dense=False)
        for is_wrapped in (False, True)
    )
    latents = model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim  # type: ignore[operator]
    assert own / wrapped == pytest.approx((latents + model.hidden_size) / (2 * model.hidden_size))


def test_rows_that_are_sent_again_are_counted_in_the_layers_that_do_so() -> None:
    job = Job(preset_config("qwen3-30b-a3b"), 4096, 8, ExpertsConfig())
    plain, half, every = (
        Setting(degrees=Degrees(1, 8, 1, 1, 1, 8, 1), memory=memory)
        for memory in (
            MemoryConfig(),
            MemoryConfig(recompute=("dispatch",), layers="0-23"),
            MemoryConfig(recompute=("dispatch",)),
        )
    )
    legs = expert_legs(job, plain)
    assert legs.again == 0
    assert expert_legs(job, half).again == pytest.approx(legs.out / 2)
    assert expert_legs(job, every) == legs._replace(again=legs.out)
    kept = [activation_bytes(job, setting) for setting in (plain, every)]
    rows = 8 * (1 - math.comb(112, 8) / math.comb(128, 8))  # ranks that hold one of a token's eight experts
    assert kept[0] - kept[1] == pytest.approx(48 * 4096 * rows * 2048 * 2, rel=1e-2)
    times = [estimate_time(job, setting, H200).experts for setting in (plain, half, every)]
    assert times == sorted(times)
    assert times[2] - times[0] == pytest.approx(48 * expert_seconds(job, every, H200).again, rel=1e-2)
