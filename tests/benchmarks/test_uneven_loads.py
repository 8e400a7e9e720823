"""Loads of the emulated run: as uneven as asked, and rows of this rank as the plan of clones has them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import even_routing
import fabric
import fabric_group
import flex_rows
import torch
import uneven_loads

from fsdmoe.experts.balance import count_choices
from fsdmoe.experts.dispatch import ClonePolicy, FlexPolicy, Links, Rows, build_dispatcher
from fsdmoe.experts.dispatch.clone_weights import CloneWeights
from fsdmoe.experts.dispatch.flex_transport import FlexPlan
from fsdmoe.experts.router import select_top_k
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.routing_file import save_routed_experts
from fsdmoe.experts.scores import choice_scores
from fsdmoe.kernels.expert_operands import ExpertWeights
from fsdmoe.mesh import MeshConfig

RANKS = uneven_loads.Ranks(ep=8, top_k=4, tokens=512)
TWO, NONE = ClonePolicy(2, 16), ClonePolicy(0)


def test_drawn_loads_are_as_uneven_as_asked() -> None:
    loads_LE = uneven_loads.loads_of("1.7", 6, 64, RANKS)
    assert RANKS.by_rank(loads_LE).amax(1).mean() == pytest.approx(1.7, rel=0.02)
    assert loads_LE.shape == (6, 64)
    with pytest.raises(SystemExit, match="expected a recording or 1 to 4, got 7"):
        uneven_loads.loads_of("7", 6, 64, RANKS)


def test_recorded_loads_take_turns_with_layers(tmp_path: Path) -> None:
    ids_NLK = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [2, 3]]])
    save_routed_experts(tmp_path / "some.safetensors", {"one": ids_NLK}, num_experts=8)
    loads_LE = uneven_loads.loads_of(str(tmp_path / "some.safetensors"), 3, 8, RANKS)
    first, second = [2, 1, 1, 0, 0, 0, 0, 0], [0, 0, 2, 2, 0, 0, 0, 0]
    assert loads_LE.tolist() == [first, second, first]
    with pytest.raises(SystemExit, match="expected loads of 16 experts, got 8"):
        uneven_loads.loads_of(str(tmp_path), 3, 16, RANKS)


@pytest.mark.parametrize("role", [uneven_loads.BUSIEST, uneven_loads.MEAN])
def test_this_rank_takes_the_place_of_the_one_asked_for_in_every_layer(role: str) -> None:
    loads_LE = uneven_loads.loads_of("1.7", 6, 64, RANKS)
    shares_LP = RANKS.by_rank(loads_LE)
    found_LP = RANKS.by_rank(uneven_loads.seen_by(role, loads_LE, RANKS, NONE))
    wanted_L = shares_LP.amax(1) if role == uneven_loads.BUSIEST else 1 + (shares_LP - 1).abs().amin(1)
    measured_L = found_LP[:, 0] if role == uneven_loads.BUSIEST else 1 + (found_LP[:, 0] - 1).abs()
    assert measured_L.tolist() == pytest.approx(wanted_L.tolist())
    assert torch.allclose(found_LP.sort(1).values, shares_LP.sort(1).values)


def routed(loads_E: torch.Tensor) -> torch.Tensor:
    """``[T, K]``: choices with these loads, by a router with the bias for them."""
    generator = torch.Generator().manual_seed(3)
    spec = RouterSpec(num_experts=len(loads_E), top_k=RANKS.top_k)
    router: Any = SimpleNamespace(spec=spec, weight=torch.randn(len(loads_E), 32, generator=generator) / 5)
    x_TD = torch.randn(RANKS.tokens, 32, generator=generator)
    bias_E = even_routing.bias_for(router, x_TD, loads_E)
    return select_top_k(choice_scores(x_TD @ router.weight.t(), spec.score), spec, bias_E)


def test_a_bias_brings_about_the_loads_of_experts() -> None:
    (loads_E,) = uneven_loads.loads_of("1.7", 1, 64, RANKS)
    found_E = count_choices(routed(loads_E), 64)[0].double()
    assert (found_E - loads_E / loads_E.sum() * RANKS.tokens * RANKS.top_k).abs().max() < 8


@pytest.mark.parametrize("role", [uneven_loads.BUSIEST, uneven_loads.HOST])
@pytest.mark.parametrize("chunks", [1, 2])
def test_clones_of_the_emulated_world_get_the_rows_of_the_plan(role: str, chunks: int) -> None:
    loads_LE = uneven_loads.seen_by(role, uneven_loads.loads_of("1.7", 1, 64, RANKS), RANKS, TWO)
    ids_TK = routed(loads_LE[0])
    mine = RANKS.after_cloning(count_choices(ids_TK, 64), TWO)[0][0, 0].item()
    even = RANKS.tokens * RANKS.top_k
    node = fabric.FABRICS_BY_NAME["node"]
    with fabric_group.emulated_fabric(node) as world, uneven_loads.emulated_clones():
        links = Links.of(fabric_group.fabric_meshes(MeshConfig(ep=8), "cpu"))
        d, _ = build_dispatcher("all_to_all", links, num_experts=64, top_k=4, clones=TWO)
        rows = Rows(torch.randn(RANKS.tokens, 8), torch.rand(ids_TK.shape), ids_TK)
        plans: Any = [plan for plan, _ in d.prepare_chunks(rows, chunks)]
        world.records.clear()
        own = ExpertWeights(torch.ones(8, 10, 4), torch.ones(8, 4, 5), None, None)
        received = CloneWeights(plans[0].clones, own, keep=True).wait()
        (load, _) = (record.load for record in world.records)
    # Every chunk has its share; those of 512 rows are off by a few.
    for plan in plans:
        assert chunks * plan.max_rows == pytest.approx(mine * even, rel=0.06, abs=100)
    clones = plans[0].clones.clones
    assert load.nvlink == 160 * max(sum(clones.sent), sum(clones.received)) > 0
    assert (received is not None) == bool(sum(clones.received)) == (role == uneven_loads.HOST)
    if received is not None:
        joined: ExpertWeights = received.args[0]  # type: ignore[attr-defined]
        assert len(joined.down_EDN) == 8 + sum(clones.received)
        assert all(bool((weight == 1).all()) for weight in joined[:2]), "weights of clones are not zeros"


@pytest.mark.parametrize("role", [uneven_loads.BUSIEST, uneven_loads.HOST])
def test_rows_of_the_plan_fit_small_buffers_of_flex(role: str) -> None:
    loads_LE = uneven_loads.seen_by(role, uneven_loads.loads_of("1.7", 1, 64, RANKS), RANKS, TWO)
    ids_TK = routed(loads_LE[0])
    mine = RANKS.after_cloning(count_choices(ids_TK, 64), TWO)[0][0, 0].item()
    fits = {}
    with (
        fabric_group.emulated_fabric(fabric.FABRICS_BY_NAME["node"]),
        uneven_loads.emulated_clones(),
    ):
        links = Links.of(fabric_group.fabric_meshes(MeshConfig(ep=8), "cpu"))
        for clones in (TWO, NONE):
            d: Any
            d, _ = build_dispatcher(
                "flex", links, num_experts=64, top_k=4, flex=FlexPolicy(1.25), clones=clones
            )
            rows = Rows(torch.randn(RANKS.tokens, 8), torch.rand(ids_TK.shape), ids_TK)
            plan, _ = d.prepare(rows)
            fits[clones] = isinstance(plan, FlexPlan)
            if fits[clones]:
                received = plan.table_SC[:, links.ep.size].sum().item()
    assert fits == {TWO: True, NONE: False}
    assert received == pytest.approx(mine * RANKS.tokens * RANKS.top_k, rel=0.03)


@pytest.mark.parametrize("count", [48, pytest.param(2000, marks=pytest.mark.full)])
def test_two_clones_a_rank_fit_buffers_a_quarter_above_an_even_share(count: int) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(128, 8, 8), (64, 8, 8), (256, 8, 32), (8, 2, 4)]  # experts, choices, ranks
    needed = torch.zeros(count, 2)
    for number in range(count):
        num_experts, top_k, ep = shapes[number % len(shapes)]
        skew = (0.3, 0.6, 1.0, 1.25)[number // len(shapes) % 4]
        loads_E = skew * torch.randn(num_experts, generator=random)
        noise_TE = -(-torch.rand(4096, num_experts, generator=random).log()).log()
        ids_TK = (loads_E + noise_TE).topk(top_k).indices  # without repetition, by their loads
        least_rows = len(ids_TK) * top_k // ep // 128
        for column, clones in enumerate((NONE, TWO._replace(least_rows=least_rows))):
            needed[number, column] = flex_rows.needed_rows(ids_TK, num_experts, ep, clones)
    print(f"largest {needed.amax(0).tolist()}, above 1.25: {(needed > 1.25).sum(0).tolist()} of {count}")
    assert (needed[:, 0] > 2).any(), "without clones, not even twice an even share is enough"
    assert (needed[:, 1] <= 1.25).all()
