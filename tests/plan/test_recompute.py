"""``memory.recompute = "auto"``: what is recomputed, by recorded free memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdmoe.config import Config
from fsdmoe.core.errors import ConfigError
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.plan.estimate import HEADROOM
from fsdmoe.plan.hardware import GIB
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.memory import estimate_memory
from fsdmoe.plan.recompute import decide_memory, free_bytes
from fsdmoe.testing import requires_peft, requires_transformers, run_ranks
from tests.support.config_building import build
from tests.support.hf_tiny import tiny_hf

ADAPTERS: dict[str, Any] = {
    "model": {"hf": "configs/qwen3-30b-a3b", "random_weights": True},
    "adapter": {"rank": 8},
    "data": {"kind": "python-stdlib", "tokenizer": "bytes", "seq_len": 4096},
    "train": {"micro_batch_size": 4, "global_batch_size": 4},
}
NATIVE: dict[str, Any] = {
    "model": {"preset": "qwen3-30b-a3b"},
    "mesh": {"ep": 8},
    "data": {"seq_len": 4096},
    "train": {"global_batch_size": 128, "micro_batch_size": 2},
}


def config_of(given: dict[str, Any], world_size: int) -> Config:
    config, problems = build(given | {"memory": {"recompute": "auto"}}, world_size)
    assert config is not None, problems
    return config


def chosen(given: dict[str, Any], world_size: int, gib: float) -> tuple[MemoryConfig, str]:
    """The choice, and what is told of it."""
    decision = decide_memory(config_of(given, world_size), world_size, int(gib * GIB))
    return decision.config.memory, decision.told["memory.recompute"]


@requires_peft
def test_layers_with_adapters_are_recomputed_as_far_as_memory_asks_for_it() -> None:
    memory, told = chosen(ADAPTERS, 1, 139.8)
    assert memory.recompute == ()
    assert told.startswith("nothing (plan: ")
    memory, told = chosen(ADAPTERS, 1, 100)
    assert memory.recompute == ("layer",)
    first, last = map(int, memory.layers.split("-"))
    assert first == 0
    assert 10 < last < 40, "no more layers than needed"
    assert f"layer in layers 0-{last} (plan: " in told
    assert "recomputing nothing 1" in told


def test_a_native_decoder_recomputes_cheap_parts_before_whole_layers() -> None:
    config = config_of(NATIVE, 64)
    job, setting = Job.of(config), Setting.of(config, 64)
    whole = estimate_memory(job, setting).total / GIB / (1 - HEADROOM)
    assert chosen(NATIVE, 64, whole + 1)[0].recompute == ()
    assert chosen(NATIVE, 64, whole - 1)[0].recompute in (("norms",), ("layer",))
    memory, _ = chosen(NATIVE, 64, whole - 4)
    needed = estimate_memory(job, replace(setting, memory=memory)).total
    assert needed <= (1 - HEADROOM) * (whole - 4) * GIB


def test_what_fits_in_no_way_recomputes_most_and_says_so() -> None:
    decision = decide_memory(config_of(NATIVE, 64), 64, 2 * GIB)
    assert decision.config.memory.recompute == ("layer",)
    assert decision.config.memory.layers == "all"
    assert decision.told["memory.recompute"].endswith("; it may not fit)")


def test_without_a_gpu_nothing_is_recomputed() -> None:
    decision = decide_memory(config_of(NATIVE, 64), 64, None)
    assert decision.config.memory.recompute == ()
    assert decision.told == {"memory.recompute": "nothing (there is no GPU whose memory is a limit)"}


def test_nothing_is_chosen_that_another_feature_refuses() -> None:
    graphs = NATIVE | {"train": NATIVE["train"] | {"graphs": "layer"}}
    decision = decide_memory(config_of(graphs, 64), 64, 2 * GIB)
    assert decision.config.memory.recompute == (), "each choice begins with norms, or is layers"


def test_parts_that_are_named_are_left_as_they_are() -> None:
    config, _ = build(NATIVE | {"memory": {"recompute": ["experts"]}}, 64)
    assert config is not None
    decision = decide_memory(config, 64, 2 * GIB)
    assert decision.config is config
    assert decision.told == {}


def test_auto_stands_alone() -> None:
    with pytest.raises(ConfigError, match=r"memory\.recompute: expected auto alone, or parts, got"):
        MemoryConfig(recompute=("auto", "layer"))


def open_policy() -> None:
    policy = ParallelPolicy(memory=MemoryConfig(recompute=("auto",)))
    with pytest.raises(ConfigError, match=r'memory\.recompute: expected parts, got "auto", which train\.py'):
        parallelize(tiny_hf("qwen3_moe"), build_meshes(), policy)


@requires_transformers
def test_a_loop_of_ones_own_names_parts() -> None:
    run_ranks(open_policy, 1)


def least_free(shared: bool) -> int | None:
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (100 + 50 * rank, 200))
        name = "one" if shared else f"GPU {rank}"
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=name))
        return free_bytes(torch.device("cuda"))


def test_all_ranks_decide_by_the_one_with_the_least_memory() -> None:
    assert run_ranks(least_free, 2, False) == [100, 100]
    assert run_ranks(least_free, 2, True) == [50, 50], "two ranks share a GPU"
