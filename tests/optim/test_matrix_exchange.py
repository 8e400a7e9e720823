"""What Muon sends: the plan against what ranks send, and against two other ways."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdmoe.config import Config, build_config
from fsdmoe.core.axes import MeshConfig, resolve_degrees
from fsdmoe.fsdp.memory_plan import PlannedMeshes
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import Muon, MuonConfig
from fsdmoe.optim.matrix_exchange import assign_blocks, plan_exchange
from fsdmoe.optim.muon import _Step
from fsdmoe.plan.fake_step import fake_step
from fsdmoe.plan.job import Job, Setting, engine_plan
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, run_sharded, shard_tiny
from tests.support.matrix_volume import ExchangeVolume, count_volume, planned_matrices


@contextmanager
def counted() -> Iterator[list[int]]:
    """Elements that this rank hands to each exchange for other ranks."""
    sent: list[int] = []
    start = _Step._start

    def count(self: Any, outgoing: torch.Tensor, counts_from: list[int], counts_to: list[int]) -> Any:
        assert outgoing.numel() == sum(counts_to)
        sent.append(sum(counts_to) - counts_to[dist.get_rank()])
        return start(self, outgoing, counts_from, counts_to)

    with mock.patch.object(_Step, "_start", count):
        yield sent


def send(degrees: dict[str, int]) -> tuple[int, int]:
    """Elements that all ranks send in a step, and what the plan says."""
    case = Case(degrees=degrees)
    meshes = build_meshes(**degrees)
    model = shard_tiny(case, meshes)
    optimizer = Muon(model, muon=MuonConfig(ns_dtype="float32"))
    run_sharded(model, case, 0)
    with counted() as sent:
        optimizer.step()
    assert len(sent) == 2, "one exchange each way"
    total = torch.tensor(sum(sent))
    dist.all_reduce(total)
    params = [param.matrices for param in optimizer._matrices]
    return int(total), count_volume(params, assign_blocks(params, meshes), meshes).sent


@pytest.mark.parametrize(
    ("world", "degrees"), [(3, {}), (4, {"dp_outer": 2, "ep": 2}), (4, {"tp": 2, "etp": 2})]
)
def test_ranks_send_what_the_formula_says(world: int, degrees: dict[str, int]) -> None:
    for sent, planned in run_ranks(send, world, degrees):
        assert sent == planned > 0


def config_of(preset: str, layers: int | None, world: int, mesh: dict[str, int]) -> Config:
    model = {"preset": preset} | ({} if layers is None else {"num_hidden_layers": layers})
    given = {
        "model": model, "mesh": mesh, "optim": {"name": "muon"}, "data": {"seq_len": 128},
        "train": {"micro_batch_size": 1, "global_batch_size": world},
    }  # fmt: skip
    problems: list[str] = []
    config = build_config(given, {}, world, problems, needs_data=False)
    assert config is not None, problems
    return config


def planned(config: Config, world: int) -> tuple[ExchangeVolume, int]:
    """Of all ranks, and what the first one sends."""
    plan = engine_plan(Job.of(config), Setting.of(config, world))
    params = planned_matrices([group for unit in plan.model.units for group in unit.groups])
    blocks = assign_blocks(params, plan.at)
    first = plan_exchange(params, blocks, 0, plan.at)
    return count_volume(params, blocks, plan.at), sum(first.parts_to) + sum(first.results_to)


def compare(preset: str, layers: int | None, world: int, mesh: dict[str, int]) -> ExchangeVolume:
    config = config_of(preset, layers, world, mesh)
    volume, first = planned(config, world)
    with counted() as sent:
        fake_step(config, world)
    assert sent[0] + sent[1] == sent[2] + sent[3] == first
    return volume


def test_a_rank_of_64_sends_the_boundaries_of_its_slices() -> None:
    volume = compare("qwen3-30b-a3b", 1, 64, {"ep": 8})
    assert volume.sent < 0.04 * volume.owned
    assert volume.owned < 0.04 * volume.gathered


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{}, {"ep": 8}, {"dp_outer": 2, "ep": 8}])
@pytest.mark.parametrize("world", [64, 256])
@pytest.mark.parametrize(("preset", "layers"), [("qwen3-30b-a3b", None), ("deepseek-v3", 6)])
def test_large_worlds_send_what_is_planned(
    preset: str, layers: int | None, world: int, mesh: dict[str, int]
) -> None:
    volume = compare(preset, layers, world, mesh)
    assert volume.sent < volume.owned < volume.gathered


def test_work_is_shared_by_those_who_hold_a_part() -> None:
    config = config_of("qwen3-30b-a3b", 2, 8, {"dp_outer": 2})
    plan = engine_plan(Job.of(config), Setting.of(config, 8))
    at = PlannedMeshes(resolve_degrees(MeshConfig(dp_outer=2), 8))
    params = planned_matrices([group for unit in plan.model.units for group in unit.groups])
    blocks = assign_blocks(params, at)
    assert all(block.owner % 4 in {piece.rank for piece in block.pieces} for block in blocks)
    assert {block.owner // 4 for block in blocks} == {0, 1}, "both replicas compute"
    assert count_volume(params, blocks, at).busiest < 1.1
