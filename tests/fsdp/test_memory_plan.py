"""The dry run against the real thing: bytes of every buffer, and what really travels."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core import compat
from fsdmoe.experts.moe import GroupedExperts
from fsdmoe.experts.parallel import split_experts
from fsdmoe.fsdp import (
    FSDPConfig,
    FSDPPolicy,
    MemoryPlan,
    engine_of,
    exchange,
    layout,
    plan_memory,
)
from fsdmoe.fsdp.memory_plan import PlannedMeshes
from fsdmoe.mesh import Axis, MeshConfig, build_meshes, resolve_degrees
from fsdmoe.models import build_model
from fsdmoe.models.config import preset_config
from fsdmoe.optim import AdamW
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, run_sharded, shard_tiny
from tests.support.saved_activations import saved_activations
from tests.support.tiny_modules import TinyDecoder

BF16 = PrecisionConfig()


def nbytes(tensors: list[torch.Tensor | None]) -> int:
    distinct = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None
    }
    return sum(distinct.values())


def build_and_plan(case: Case) -> tuple[MemoryPlan, dict[str, int]]:
    """The plan, and what a real engine allocates and moves in its second step."""
    meshes = build_meshes(**case.degrees)
    policy = FSDPPolicy(fsdp=FSDPConfig(**case.fsdp), precision=case.precision, grad_divisor=1.0)
    plan = plan_memory(
        TinyDecoder(meshes, **case.model), meshes.degrees, policy, micro_batches=case.micro_batches
    )
    model = shard_tiny(case, meshes)
    engine, optimizer = engine_of(model), AdamW(model)
    run_sharded(model, case, 0)
    optimizer.step()
    optimizer.zero_grad()
    counting = Counting()
    with mock.patch.object(exchange, "dist", counting), mock.patch.object(compat, "dist", counting):
        run_sharded(model, case, 1)
    slots = {id(u.slot): u.slot for u in engine.units if u.slot}.values()
    grad_slots = {id(u.grads.slot): u.grads.slot for u in engine.units if u.grads.slot}.values()
    found = {
        "main_weights": nbytes([g.weights.main for g in engine.groups]),
        "gradients": nbytes([g.grad.main for g in engine.groups]),
        "weights": nbytes([g.weights.cast for g in engine.groups]),
        "moments": nbytes([flat for moments in optimizer._moments for flat in moments.flat]),
        "gather_slots": nbytes([b for s in slots for b in s.buffers.values()]),
        "grad_slots": nbytes([b for s in grad_slots for b in s.buffers.values()]),
        **counting.received,
    }
    return plan, found


class Counting:
    """``torch.distributed`` as the engine sees it, adding up what this rank receives."""

    def __init__(self) -> None:
        self.received = {"gathered": 0, "reduced": 0, "replicated": 0, "num": 0}

    def __getattr__(self, name: str) -> Any:
        function = getattr(dist, name)
        kind = {
            "all_gather": "gathered",
            "reduce_sca": "reduced",
            "all_to_all": "reduced",
            "all_reduce": "replicated",
        }
        if name[:10] not in kind:
            return function

        def call(first: torch.Tensor, *others: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
            size, largest = group.size(), max((first, *others), key=torch.numel)
            share = largest.numel() * largest.element_size() * (size - 1) // size
            self.received[kind[name[:10]]] += 2 * share if name == "all_reduce" else share
            self.received["num"] += 1
            return function(first, *others, group=group, async_op=async_op)

        return call


CASES = [
    pytest.param(2, Case(), marks=pytest.mark.full),
    (2, Case(precision=BF16, micro_batches=2)),
    (2, Case(precision=PrecisionConfig(grad_dtype="bfloat16"), fsdp={"lean": True})),
    (2, Case(precision=BF16, fsdp={"lean": True}, degrees={"ep": 2})),
    (2, Case(precision=BF16, fsdp={"shard": "grads"}, micro_batches=2)),
    (2, Case(precision=BF16, fsdp={"shard": "optimizer"}, micro_batches=2)),
    (2, Case(precision=BF16, fsdp={"grad_exchange": "bf16_all_to_all"}, model={"tied": True})),
    (4, Case(precision=BF16, degrees={"ep": 2, "dp_outer": 2})),
    (4, Case(degrees={"tp": 2, "ep": 2})),
]


@pytest.mark.parametrize(("world", "case"), CASES)
def test_the_plan_is_what_a_run_allocates_and_moves(world: int, case: Case) -> None:
    for plan, found in run_ranks(build_and_plan, world, case):
        for key in ("weights", "main_weights", "gradients", "moments", "gather_slots", "grad_slots"):
            assert getattr(plan, key) == found[key], key
        assert plan.traffic.gathered == found["gathered"]
        assert plan.traffic.reduced == found["reduced"]
        assert plan.traffic.replicated == found["replicated"]
        assert plan.traffic.num_collectives == found["num"]


def test_lent_gradients_and_activations_are_not_counted_together() -> None:
    model, degrees = TinyDecoder(), resolve_degrees(MeshConfig(), 2)
    lean = FSDPPolicy(fsdp=FSDPConfig(lean=True))
    once, twice = (plan_memory(model, degrees, lean, micro_batches=n) for n in (1, 2))
    assert once.gradients == once.lent > 1000
    assert once.peak(once.lent + 7) == once.total + 7
    assert once.peak(7) == once.total
    assert twice.peak(7) == twice.total + 7
    kept = plan_memory(model, degrees, FSDPPolicy())
    assert kept.peak(7) == kept.total + 7


def meta_model(preset: str, **degrees: int) -> tuple[nn.Module, PlannedMeshes]:
    at = PlannedMeshes(resolve_degrees(MeshConfig(**degrees), 1024))
    model = build_model(preset_config(preset))
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            split_experts(module, at)
    return model, at


def test_a_laptop_plans_for_1024_ranks() -> None:
    degrees = {"ep": 64, "dp_shard": 1024}
    model, _ = meta_model("qwen3-235b-a22b", **degrees)
    searches = layout._plan
    searches.cache_clear()
    plan = plan_memory(model, resolve_degrees(MeshConfig(**degrees), 1024))
    assert searches.cache_info().misses < 10, "94 layers that are alike are planned once"
    assert plan.num_parameters == pytest.approx(235.1e9, rel=0.001)
    # 2 bytes of weights, 4 of main weights, 4 of gradients, 8 of moments, each in 1,024 shards
    sharded = plan.weights + plan.main_weights + plan.gradients + plan.moments
    assert sharded == pytest.approx(18 * plan.num_parameters / 1024, rel=0.005)
    assert plan.padding * 1024 / plan.num_parameters < 0.005
    experts_of_a_layer = 128 * 3 * 1536 * 4096 * 2 / 64
    assert 2 * experts_of_a_layer < plan.gather_slots < 2 * experts_of_a_layer + 4 * 152_000 * 4096
    assert any("slots" in name for name, _ in plan.table())


def test_planned_meshes_have_the_sizes_of_real_ones() -> None:
    at = PlannedMeshes(resolve_degrees(MeshConfig(dp_outer=2, cp=2, tp=4, ep=8), 64))
    sizes = {axis: at.size(axis) for axis in Axis}
    assert sizes[Axis.DP_SHARD] == 4
    assert sizes[Axis.FSDP] == 8
    assert sizes[Axis.FSDP_TP] == 32
    assert sizes[Axis.EDP] == 4
    assert sizes[Axis.WORLD] == 64
    assert all(at.rank(axis) == 0 for axis in Axis)


def test_activations_are_counted_on_meta_tensors_without_the_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
        x = torch.empty(10, 32, requires_grad=True)
    # the input of each linear, and ReLU's output, which is the second linear's input
    assert saved_activations(lambda: model(x), model) == 4 * 10 * (32 + 64)
