"""Which modules become units, who owns what, which slot each unit has: without a process group."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Shard

from fsdmoe.core.placement import Placement, split_parameter
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy
from fsdmoe.fsdp.engine import RunOrder
from fsdmoe.fsdp.memory_plan import PlannedMeshes
from fsdmoe.fsdp.plan import ModelPlan, plan_model
from fsdmoe.fsdp.units import select_units
from fsdmoe.mesh import Axis, MeshConfig, resolve_degrees
from tests.support.coordinates import At
from tests.support.tiny_modules import Block, TinyDecoder


def names(model: nn.Module, policy: FSDPPolicy | None = None) -> list[str]:
    return [unit.name for unit in select_units(model, policy or FSDPPolicy())]


def test_layers_embeddings_and_head_are_units_by_default_and_the_root_comes_last() -> None:
    assert names(TinyDecoder(num_layers=2)) == ["embed", "layers.0", "layers.1", "head", ""]


def test_units_can_be_chosen_by_class_name_class_or_predicate() -> None:
    model = TinyDecoder(num_layers=2)
    by_name = FSDPPolicy(fsdp=FSDPConfig(units=("Block",)))
    by_class = FSDPPolicy(units=(Block,))
    by_predicate = FSDPPolicy(units=lambda name, module: name.endswith("moe"))
    assert names(model, by_name) == names(model, by_class) == ["layers.0", "layers.1", ""]
    assert names(model, by_predicate) == ["layers.0.moe", "layers.1.moe", ""]


def test_a_module_list_inside_a_unit_makes_no_units() -> None:
    layer = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    assert names(nn.Sequential(nn.ModuleList([layer, layer]))) == ["0.0", ""]


def test_experts_in_a_list_which_ranks_run_in_any_order_are_gathered_with_what_is_around_them() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(2, 3)
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    assert names(nn.Sequential(Mixture(), Mixture())) == ["0", "1", ""]
    assert names(Mixture()) == [""]


class Around(nn.Module):
    """As peft builds what it puts around a layer."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        if kind == "modules_to_save":
            self.original_module = layer
            self.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2)})
        else:
            self.base_layer = layer
            self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 2)})
            self.lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(2, 2)} if kind == "dora" else {})


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        ("lora", ["embed.base_layer", "head.base_layer"]),
        (
            "modules_to_save",
            ["embed.original_module", "head.original_module", "head.modules_to_save.default"],
        ),
        ("dora", []),  # it reads the weight outside of the layer's forward: the root has it
    ],
)
def test_units_are_inside_of_adapters_which_may_be_unloaded(kind: str, units: list[str]) -> None:
    model = TinyDecoder(num_layers=1)
    model.embed = Around(model.embed, kind)  # type: ignore[assignment]
    model.head = Around(model.head, kind)  # type: ignore[assignment]
    assert sorted(names(model)) == sorted([*units, "layers.0", ""])


def owned(model: nn.Module) -> dict[str, set[str]]:
    return {unit.name: {o.name for o in unit.owned} for unit in select_units(model, FSDPPolicy())}


def test_every_parameter_has_one_owner_and_tied_ones_belong_to_the_root() -> None:
    plain, tied = TinyDecoder(num_layers=2), TinyDecoder(num_layers=2, tied=True)
    found = owned(plain)
    assert found["embed"] == {"embed.weight"}
    assert found["head"] == {"head.weight"}
    assert found[""] == {"norm.weight"}
    assert set().union(*found.values()) == dict(plain.named_parameters()).keys()
    assert owned(tied)[""] == {"embed.weight", "norm.weight"}
    assert not owned(tied)["embed"]


def test_a_module_that_layers_share_belongs_to_the_root() -> None:
    model = TinyDecoder(num_layers=2)
    model.layers[1].moe = model.layers[0].moe
    found = owned(model)
    assert {name for name in found[""] if ".moe." in name} == {
        f"layers.0.moe.{name}" for name, _ in model.layers[0].moe.named_parameters()
    }
    assert found["layers.0"]
    assert found["layers.1"]


def plan(
    num_ranks: int, model: nn.Module | None = None, degrees: dict[str, int] | None = None, **fsdp: Any
) -> ModelPlan:
    model = model or TinyDecoder(num_layers=4)
    policy = FSDPPolicy(fsdp=FSDPConfig(**fsdp))
    units = select_units(model, policy)
    at = PlannedMeshes(resolve_degrees(MeshConfig(**(degrees or {})), num_ranks))
    return plan_model(units, at, policy)


def test_layers_alternate_between_two_slots_and_keep_theirs_for_life() -> None:
    slots = plan(4).gather_slots
    embed, *layers, head, root = slots.slot_of_unit
    assert layers == [
        1 - embed,
        embed,
        1 - embed,
        embed,
    ]  # an embedding no larger than a layer takes its turn
    assert head == 1 - embed
    assert root not in (embed, head)
    assert len(slots.sizes) == 3


def test_a_vocabulary_wider_than_a_layer_has_one_slot_for_embedding_and_head() -> None:
    model = TinyDecoder()
    model.embed, model.head = nn.Embedding(5000, 16), nn.Linear(16, 5000, bias=False)
    embed, *layers, head, root = plan(4, model).gather_slots.slot_of_unit
    assert embed == head
    assert {embed, root}.isdisjoint(layers)
    assert sorted(set(layers)) == sorted({layers[0], layers[1]})


@pytest.mark.parametrize("fsdp", [{"shard": "grads"}, {"reshard_after_forward": False}])
def test_nobody_shares_a_slot_where_nothing_may_be_evicted(fsdp: dict[str, Any]) -> None:
    slots = plan(4, **fsdp).gather_slots.slot_of_unit
    assert len(set(slots)) == len(slots)
    assert len(set(plan(4, **fsdp).grad_slots.slot_of_unit)) == 3
    assert len(set(plan(4, shard="optimizer").grad_slots.slot_of_unit)) == len(slots)


def test_a_group_over_one_rank_needs_no_slot() -> None:
    assert plan(1).gather_slots.nbytes == plan(1).grad_slots.nbytes == 0
    model = TinyDecoder()
    for layer in model.layers:
        for name in ("gate_up", "down"):
            whole = getattr(layer.moe, name)
            placement = Placement(tuple(whole.shape), ((Axis.EP, Shard(0)),))
            setattr(layer.moe, name, split_parameter(whole, placement, At({Axis.EP: 4})))
    layer = plan(4, model, {"ep": 4}).units[1]
    ways = {group.axis: (group.gathered, group.reduced) for group in layer.groups}
    assert ways == {Axis.FSDP_TP: (True, True), Axis.EDP: (False, False)}
    lean = plan(4, model, {"ep": 4}, lean=True).units[1]
    ways = {group.axis: (group.gathered, group.reduced) for group in lean.groups}
    assert ways == {Axis.FSDP_TP: (True, True), Axis.EDP: (True, False)}
    experts = next(group for group in layer.groups if group.axis == Axis.EDP)
    assert experts.layout.numel == sum(p.numel for p in experts.params) == (2 * 8 * 16 + 16 * 8) * 8 // 4


def test_matrices_come_before_vectors_in_a_buffer() -> None:
    for group in plan(4).units[1].groups:
        ranks = [len(param.placement.global_shape) < 2 for param in group.params]
        assert ranks == sorted(ranks)


def test_the_recorded_order_predicts_until_it_is_wrong_and_then_learns() -> None:
    a, b, c = (object() for _ in range(3))
    order = RunOrder()

    def run(*units: Any) -> list[Any]:
        order.restart()
        return [order.advance(unit) for unit in units]

    assert run(a, b, c) == [None, None, None]
    assert run(a, b, c) == [b, c, None]
    assert run(a, c, b) == [b, None, None]
    assert order.units == [a, c, b]
    assert run(a, c, b) == [c, b, None]
    assert run(a) == [c]
    assert run(a, c, b, b) == [c, b, None, None]
    assert order.units == [a, c, b, b]
