"""What is sent, counted at the collectives: as the routing map implies, and as the closed formula says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.capacity import pad_to_capacity, within_capacity
from fsdmoe.experts.config import CapacityConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.dispatch import FlexPolicy, Links, Rows, build_dispatcher
from fsdmoe.experts.dispatch.flex_transport import FlexPlan
from fsdmoe.experts.dispatch.volume import ALL_TO_ALL_COST, ExpertLayout, choose_dispatcher
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.round_robin import select_round_robin
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.mesh import Axis, Meshes, build_meshes
from fsdmoe.testing import run_ranks
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import Case, build_layer

HIDDEN, NUM_EXPERTS = 12, 16


def _counted_run(dispatcher: str, ep: int, etp: int, tables: list[Tensor], dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """Run all phases, forward and backward, with compute that returns its input; what this rank counted."""
    meshes = build_meshes(ep=ep, etp=etp)
    top_k, flex = tables[0].shape[1], FlexPolicy(rows=8.0)
    d, _ = build_dispatcher(dispatcher, Links.of(meshes), num_experts=NUM_EXPERTS, top_k=top_k, flex=flex)
    ids = tables[dist.get_rank()]
    x = torch.randn(len(ids), HIDDEN, dtype=dtype, requires_grad=True)
    weights = torch.rand(ids.shape, requires_grad=True)
    plan, rows = d.prepare(Rows(x, weights, ids))
    rows = d.gather(plan, d.dispatch(plan, rows))
    y = rows.x_RD * rows.weights_RK.sum(1, keepdim=True).to(dtype)
    d.restore(plan, d.combine(plan, d.reduce(plan, y))).float().sum().backward()
    num_pairs = int((rows.ids_RK >= 0).sum())
    if isinstance(plan, FlexPlan):
        assert rows.x_RD.shape[0] == plan.bounds.rows
        assert num_pairs <= plan.bounds.pairs
    else:
        assert rows.x_RD.shape[0] == sum(plan.rows_gathered)
        assert num_pairs == plan.max_rows
    coordinates = meshes.rank(Axis.EDP), meshes.rank(Axis.EP), meshes.rank(Axis.ETP)
    return coordinates, dict(d.traffic.bytes_sent), d.traffic.host_syncs


def _implied(
    dispatcher: str, ep: int, etp: int, tables: list[Tensor], at: tuple[int, int, int], itemsize: int
) -> dict[str, int]:
    """Bytes by phase, told from the routing map alone: sets of (token, rank) in plain Python."""
    per_rank = NUM_EXPERTS // ep

    def rows(source: int, member: int, target: int) -> int:
        table = tables[(at[0] * ep + source) * etp + member].tolist()
        if dispatcher == "allgather":
            return len(table)
        return sum(any(e >= 0 and e // per_rank == target for e in choices) for choices in table)

    _, me, member = at
    width, num_ids = HIDDEN * itemsize, tables[0].shape[1]
    sent = sum(rows(me, member, other) for other in range(ep) if other != me)
    received = sum(rows(other, member, me) for other in range(ep) if other != me)
    mine, all_rows = (
        sum(rows(source, m, me) for source in range(ep) for m in members)
        for members in ([member], range(etp))
    )
    if dispatcher == "flex":  # straight to and from all members
        own, (mine, all_rows) = rows(me, member, me), (0, 0)
        sent = etp * sum(rows(me, member, other) for other in range(ep)) - own
        received = sum(rows(other, m, me) for other in range(ep) for m in range(etp)) - own
    implied = {
        "dispatch": sent * (width + 8 * num_ids),  # rows, fp32 weights, int32 ids
        "combine": received * width,
        "combine.backward": sent * width,
        "dispatch.backward": received * (width + 4 * num_ids),  # gradients of rows and weights
        "gather": mine * (etp - 1) * (width + 8 * num_ids),
        "reduce": (all_rows - mine) * width,
        "reduce.backward": mine * (etp - 1) * width,
        "gather.backward": (all_rows - mine) * (width + 4 * num_ids),
        "counts": (ep * etp - 1) * (2 * ep + 2) * 4,
    }
    return {phase: num_bytes for phase, num_bytes in implied.items() if num_bytes}


def _random_tables(world_size: int, top_k: int) -> list[Tensor]:
    tables = []
    for rank in range(world_size):
        table = torch.rand(0 if rank == 1 else 5 + 3 * rank, NUM_EXPERTS).argsort(1)[:, :top_k]
        tables.append(table.masked_fill(torch.rand(table.shape) < 0.2, -1))
    return tables


@pytest.mark.parametrize(
    ("world_size", "ep", "etp"),
    [
        (2, 1, 2),
        (4, 2, 2),
        (4, 2, 1),
        (4, 4, 1),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((2, 2, 1), (8, 4, 2))),
    ],
)
@pytest.mark.parametrize("dispatcher", ["allgather", "all_to_all", "flex"])
def test_bytes_sent_are_those_of_the_routing_map(dispatcher: str, world_size: int, ep: int, etp: int) -> None:
    tables = _random_tables(world_size, top_k=4)
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        for at, sent, host_syncs in run_ranks(_counted_run, world_size, dispatcher, ep, etp, tables, dtype):
            sent = {phase: num_bytes for phase, num_bytes in sent.items() if num_bytes}
            assert sent == _implied(dispatcher, ep, etp, tables, at, itemsize)
            assert host_syncs == 1


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (4, 2), pytest.param(8, 1, marks=pytest.mark.full)])
@pytest.mark.parametrize("dispatcher", ["allgather", "all_to_all", "flex"])
def test_bytes_under_forced_balance_follow_the_closed_formula(dispatcher: str, ep: int, etp: int) -> None:
    """The router's round-robin loads all ranks alike: T·K·(ep-1)/ep rows leave a rank with T tokens."""
    num_tokens, top_k = 2 * NUM_EXPERTS, 2
    spec = RouterSpec(num_experts=NUM_EXPERTS, top_k=top_k)
    table = select_round_robin(num_tokens, spec, torch.device("cpu"))
    owners = table // (NUM_EXPERTS // ep)
    assert (owners[:, 0] != owners[:, 1]).all()  # or a token would travel once for both its experts
    out, back = 2 * HIDDEN + 8 * top_k, 2 * HIDDEN
    over_ep = num_tokens * (ep - 1) if dispatcher == "allgather" else num_tokens * top_k * (ep - 1) // ep
    over_etp = (num_tokens * ep if dispatcher == "allgather" else num_tokens * top_k) * (etp - 1)
    formula = {
        "dispatch": over_ep * out,
        "combine": over_ep * back,
        "gather": over_etp * out,
        "reduce": over_etp * back,
    }
    if dispatcher == "flex":  # the same bytes, in one phase a direction
        formula |= {"dispatch": (over_ep + over_etp) * out, "combine": (over_ep + over_etp) * back}
        formula |= {"gather": 0, "reduce": 0}
    tables = [table] * (ep * etp)
    for _, sent, _ in run_ranks(_counted_run, ep * etp, dispatcher, ep, etp, tables, torch.bfloat16):
        counted = {phase: sent.get(phase, 0) for phase in formula}
        assert counted == formula
    print(f"{dispatcher} ep {ep} etp {etp}: counted {counted}, formula {formula}")


def test_local_dispatch_without_etp_sends_nothing_and_never_waits() -> None:
    d, _ = build_dispatcher("local", Links.alone(), num_experts=NUM_EXPERTS, top_k=2)
    rows = Rows(torch.randn(3, HIDDEN), torch.rand(3, 2), torch.tensor([[0, 1], [2, -1], [3, 4]]))
    plan, rows = d.prepare(rows)
    d.restore(plan, d.combine(plan, d.reduce(plan, d.gather(plan, d.dispatch(plan, rows)).x_RD)))
    assert not d.traffic.bytes_sent
    assert d.traffic.host_syncs == 0


def _bytes_of_a_layer(extras: str) -> int:
    layer = build_layer(Case("all_to_all", "skewed", extras=extras))
    parallelize_experts(layer, build_meshes(ep=2), dispatcher="all_to_all")
    use_local_tensors(layer)
    x = torch.randn(10, 16)
    x[:, 0] = 1.0  # all choose the first three experts, which rank 0 holds
    layer(x)
    return layer.dispatcher.traffic.bytes_sent["dispatch"]


def test_a_latent_layer_sends_rows_of_the_latent_width() -> None:
    full, latent = (run_ranks(_bytes_of_a_layer, 2, extras)[1] for extras in ("none", "latent"))
    assert full == 10 * (16 * 4 + 3 * 8)
    assert latent == 10 * (8 * 4 + 3 * 8)


TABLE = [  # (experts, top-k, ep, etp) -> the cheaper in expectation
    ((8, 2, 8, 1), "all_to_all"),  # Mixtral
    ((8, 2, 4, 1), "all_to_all"),
    ((8, 2, 2, 1), "allgather"),
    ((8, 2, 4, 2), "all_to_all"),
    ((8, 8, 8, 1), "allgather"),  # every token needs every expert
    ((64, 6, 8, 1), "all_to_all"),
    ((128, 8, 4, 1), "allgather"),  # Qwen3-30B-A3B
    ((128, 8, 8, 1), "all_to_all"),
    ((128, 8, 16, 2), "all_to_all"),
    ((256, 8, 64, 1), "all_to_all"),  # DeepSeek-V3
    ((256, 8, 2, 4), "allgather"),
    ((256, 8, 1, 4), "local"),
]


@pytest.mark.parametrize(("layout", "expected"), TABLE, ids=str)
def test_auto_picks_the_cheaper_in_expectation(layout: tuple[int, int, int, int], expected: str) -> None:
    """The cost that auto reckons with is measured here on random routing, without its formula."""
    num_experts, top_k, ep, etp = layout
    choice = choose_dispatcher(ExpertLayout(num_experts, top_k, ep, etp))
    print(f"{choice.dispatcher:10s} {choice.reason}")
    assert choice.dispatcher == expected
    with_clones = choose_dispatcher(ExpertLayout(num_experts, top_k, ep, etp), clones=2)
    assert with_clones.dispatcher == ("local" if ep == 1 else "all_to_all")
    if ep == 1:
        return
    owners = torch.rand(4000, num_experts).argsort(1)[:, :top_k] // (num_experts // ep)
    needed = torch.zeros(4000, ep).scatter_(1, owners, 1.0).mean().item()  # share of ranks that a token needs
    everyone = ep * etp - 1
    assert ExpertLayout(num_experts, top_k, ep, etp).rows_per_token("all_to_all") == pytest.approx(
        needed * everyone, rel=0.02
    )
    assert (needed * everyone * ALL_TO_ALL_COST < everyone) == (expected == "all_to_all")


def test_unknown_and_unfit_dispatchers_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"experts.dispatcher: expected one of auto, local, allgather, all_to_all, by_node, flex, got",
    ):
        build_dispatcher("ring", Links.alone(), num_experts=8, top_k=2)


def _refusals() -> list[str]:
    links = Links.of(build_meshes(ep=2))
    messages = []
    for name, num_experts in (("local", 8), ("all_to_all", 7)):
        with pytest.raises(ConfigError) as caught:
            build_dispatcher(name, links, num_experts=num_experts, top_k=2)
        messages.append(str(caught.value))
    return messages


def test_layouts_that_do_not_fit_are_refused_with_a_fix() -> None:
    local, uneven = run_ranks(_refusals, 2)[0]
    assert local == (
        "experts.dispatcher: tokens have to reach experts on other ranks, got mesh.ep = 2; set mesh.ep = 1, "
        'or experts.dispatcher = "auto"'
    )
    assert uneven == "mesh.ep: expected a divisor of the 7 experts, got 2; choose one of 1, 7"


def _padded_runs(dispatcher: str) -> list[tuple[int, int, list[int]]]:
    """Four routings, padded to capacity: rows received, waits of the host, rows of each local expert."""
    meshes = build_meshes(ep=2)
    return [_padded_run(dispatcher, meshes, seed) for seed in range(4)]


def _padded_run(dispatcher: str, meshes: Meshes, seed: int) -> tuple[int, int, list[int]]:
    flex = FlexPolicy(rows=8.0)
    d, _ = build_dispatcher(dispatcher, Links.of(meshes), num_experts=NUM_EXPERTS, top_k=2, flex=flex)
    random = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    ids_TK = torch.rand(24, NUM_EXPERTS, generator=random).topk(2).indices
    weights_TK = torch.ones(24, 2)
    capacity = CapacityConfig(factor=1.0, pad_to_max=True)
    kept_TK = within_capacity(ids_TK, weights_TK, NUM_EXPERTS, capacity, RoutingContext())
    padded = pad_to_capacity(ids_TK.masked_fill(~kept_TK, -1), weights_TK * kept_TK, NUM_EXPERTS, 3)
    plan, rows = d.prepare(Rows(torch.zeros(24, HIDDEN), padded[1], padded[0]))
    rows = d.gather(plan, d.dispatch(plan, rows))
    local = rows.ids_RK[rows.ids_RK >= 0].bincount(minlength=NUM_EXPERTS // 2)
    num_rows = int((rows.ids_RK >= 0).any(1).sum()) if dispatcher == "flex" else sum(plan.rows_received)
    return num_rows, d.traffic.host_syncs, local.tolist()


@pytest.mark.parametrize("dispatcher", ["all_to_all", "allgather", "flex"])
def test_padded_capacity_fixes_what_experts_compute_and_not_what_travels(dispatcher: str) -> None:
    """As docs/routing.md says of pad_to_max."""
    runs = run_ranks(_padded_runs, 2, dispatcher)
    assert {tuple(local) for run in runs for _, _, local in run} == {(6,) * 8}
    assert {syncs for run in runs for _, syncs, _ in run} == {1}
    received = {rows for run in runs for rows, _, _ in run}
    assert received == {48} if dispatcher == "allgather" else len(received) > 1
