"""``by_node``: rows go to a node once. Ranks of one machine are told that they are on several nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.dispatch import ExpertLayout, Links, Packing, Rows, build_dispatcher
from fsdmoe.kernels.send_order import index_rows
from fsdmoe.mesh import MeshConfig, build_meshes
from fsdmoe.testing import requires_transformers, run_ranks
from tests.behaviour.huggingface import test_causal_lm_layouts as wrapped
from tests.support import parallel_case
from tests.support.moe_case import Case, Layout, check_layout
from tests.support.parallel_case import FEW, Course, compare, one_process

NUM_EXPERTS, TOP_K, WIDTH = 16, 4, 128


def _tell_nodes(size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(size)


# One layer


def _check_layout(node_size: int, layout: Layout, cases: list[Case]) -> float:
    _tell_nodes(node_size)
    return check_layout(layout, cases)


HARD: tuple[dict[str, Any], ...] = (
    {"routing": "skewed", "chunks": 3, "extras": "shared"},
    {"routing": "single", "top_k": 1},
    {"routing": "dropped", "tokens": "one"},
    {"bias": True, "weight_after": True},
    {"policy": "expert_choice"},
)
MORE: tuple[dict[str, Any], ...] = (
    *(
        {"routing": a, "tokens": b}
        for a in ("random", "skewed", "dropped")
        for b in ("even", "uneven", "one")
    ),
    {"extras": "latent", "tokens": "one", "chunks": 2},
    {"extras": "gated"},
    {"top_k": 8},
    {"policy": "padded", "chunks": 2},
)
FOUR = [Layout(4), Layout(4, tp=2, cp=2)]
EIGHT = [Layout(8), Layout(4, tp=2), Layout(4, dp_outer=2), Layout(4, 2, tp=2), Layout(8, cp=4)]


def test_a_layer_equals_one_process() -> None:
    run_ranks(_check_layout, 4, 2, Layout(4), [Case("by_node", **options) for options in HARD])


ACROSS = [(4, 2, layout) for layout in FOUR]
ACROSS += [
    # Others are refused: a node has one rank of a group, or all of them.
    (8, size, layout)
    for layout in EIGHT
    for size in (2, 4)
    if layout.etp < size < layout.ep * layout.etp
]


@pytest.mark.full
@pytest.mark.parametrize(("world", "node_size", "layout"), ACROSS, ids=str)
def test_every_layout_of_a_layer_equals_one_process(world: int, node_size: int, layout: Layout) -> None:
    run_ranks(_check_layout, world, node_size, layout, [Case("by_node", **o) for o in (*HARD, *MORE)])


# Training


def _train(
    node_size: int, family: str, layout: parallel_case.Layout, steps: int, optimizers: tuple[str, ...]
) -> dict[str, Course]:
    _tell_nodes(node_size)
    return parallel_case.train_parallel(family, layout, steps, optimizers)


EP4 = MeshConfig(dp_shard=4, ep=4)
TRAINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunks": 3},
    "sub-batches": {"sub_batches": 2},
    "layers recomputed": {"recompute": ("layer",), "chunks": 2},
    "experts recomputed": {"recompute": ("experts", "router", "norms")},
    "rows in host memory": {"offload": ("expert_input",)},
    "two micro-batches": {"micro_batches": 2},
    "context parallel": {"mesh": MeshConfig(dp_shard=2, cp=2, ep=4)},
    "tensor parallel": {"mesh": MeshConfig(dp_shard=2, tp=2, ep=4), "sub_batches": 2},
    "ranks without rows": {"dynamic": True, "max_tokens": 6},
    "data parallel": {"mesh": MeshConfig(dp_shard=8, ep=4)},
    "eight": {"mesh": MeshConfig(dp_shard=4, tp=2, ep=8), "chunks": 2},
    "expert tensor parallel": {"mesh": MeshConfig(dp_shard=8, ep=4, etp=2)},
}
QUICK = ("layers recomputed", "deepseek_v3")


@pytest.mark.parametrize(
    ("case", "family", "steps", "optimizers"),
    [
        pytest.param(*QUICK, 2, ("sgd",), marks=pytest.mark.full),  # which sees the scale of gradients
        *(
            pytest.param(case, family, FEW, ("sgd", "adamw"), marks=pytest.mark.full)
            for case in TRAINED
            for family in ("deepseek_v3", "qwen3_moe", "gpt_oss")
        ),
    ],
)
def test_training_equals_one_process(case: str, family: str, steps: int, optimizers: tuple[str, ...]) -> None:
    layout = parallel_case.Layout(**({"mesh": EP4, "dispatcher": "by_node"} | TRAINED[case]))
    mesh = layout.mesh
    world, how = mesh.dp_shard * mesh.cp * mesh.tp, (steps, optimizers)
    for of_rank in run_ranks(_train, world, 2 * mesh.etp, family, layout, *how, timeout=300.0):
        for optimizer, course in of_rank.items():
            wanted = one_process(family, optimizer, layout.dynamic, layout.num_layers)
            compare(course, wanted, f"{case}, {family}, {optimizer}")


def _train_wrapped(family: str, layout: parallel_case.Layout) -> tuple[Course, float]:
    _tell_nodes(2)
    return wrapped.train_parallel(family, layout)


@pytest.mark.full
@requires_transformers
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_a_wrapped_model_trains_as_one_process(family: str) -> None:
    layout = parallel_case.Layout(EP4, chunks=2, dispatcher="by_node")
    for course, _ in run_ranks(_train_wrapped, 4, family, layout):
        compare(course, wrapped.one_process(family, 4), family)


# What is sent


def _tables(world: int) -> list[Tensor]:
    """Choices of every rank's tokens; rank 1 has none."""
    tables = []
    for rank in range(world):
        random = torch.Generator().manual_seed(rank)
        size = 0 if rank == 1 else 5 + 3 * rank
        table = torch.rand(size, NUM_EXPERTS, generator=random).argsort(1)[:, :TOP_K]
        tables.append(table.masked_fill(torch.rand(table.shape, generator=random) < 0.2, -1))
    return tables


def _exchange(node_size: int, dispatcher: str, packs: bool) -> tuple[dict[str, int], int, list[Tensor]]:
    """Traffic, waits of the host, and the output and gradients of this rank's tokens."""
    _tell_nodes(node_size)
    world, rank = dist.get_world_size(), dist.get_rank()
    d, _ = build_dispatcher(
        dispatcher, Links.of(build_meshes(ep=world)), num_experts=NUM_EXPERTS, top_k=TOP_K,
        packing=Packing(packs, packs),
    )  # fmt: skip
    ids = _tables(world)[rank]
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(len(ids), WIDTH, generator=random, requires_grad=True)
    weights = torch.rand(ids.shape, generator=random, requires_grad=True)
    plan, rows = d.prepare(Rows(x, weights, ids))
    rows = d.gather(plan, d.dispatch(plan, rows))
    held = torch.where(rows.ids_RK >= 0, rows.weights_RK, 0).sum(1, keepdim=True)
    y = d.restore(plan, d.combine(plan, d.reduce(plan, rows.x_RD * held)))
    gradients = torch.autograd.grad(y, (x, weights), torch.randn(y.shape, generator=random))
    return dict(d.traffic.bytes_sent), d.traffic.host_syncs, [y.detach(), *gradients]


@pytest.mark.parametrize(
    ("world", "node_size"),
    [(4, 2), pytest.param(8, 2, marks=pytest.mark.full), pytest.param(8, 4, marks=pytest.mark.full)],
)
def test_bytes_are_those_of_the_routing_map(world: int, node_size: int) -> None:
    """Told from sets of (token, node) and (token, rank), in plain Python."""
    tables, num_nodes = [table.tolist() for table in _tables(world)], world // node_size
    per_rank, per_node = NUM_EXPERTS // world, NUM_EXPERTS // num_nodes

    def rows(source: int, block: int, size: int) -> int:
        return sum(any(e >= 0 and e // size == block for e in choices) for choices in tables[source])

    found = run_ranks(_exchange, world, node_size, "by_node", False)
    for rank, (sent, host_syncs, _) in enumerate(found):
        node, place = divmod(rank, node_size)
        counterparts = range(place, world, node_size)
        to_nodes = sum(rows(rank, other, per_node) for other in range(num_nodes) if other != node)
        from_nodes = sum(rows(other, node, per_node) for other in counterparts if other != rank)
        neighbours = [node * node_size + other for other in range(node_size) if other != place]
        handed_on = sum(rows(source, other, per_rank) for source in counterparts for other in neighbours)
        handed_to = sum(
            rows(source, rank, per_rank)
            for other in neighbours
            for source in range(other % node_size, world, node_size)
        )
        width, labels = 4 * WIDTH, 8 * TOP_K
        assert sent == {
            "counts": (world - 1) * (2 * world + 2 + num_nodes) * 4,
            "dispatch": to_nodes * (width + labels),
            "hand_on": handed_on * (width + labels),
            "hand_back": handed_to * width,
            "combine": from_nodes * width,
            "combine.backward": to_nodes * width,
            "hand_back.backward": handed_on * width,
            "hand_on.backward": handed_to * (width + labels // 2),
            "dispatch.backward": from_nodes * (width + labels // 2),
        }
        assert host_syncs == 1


def test_rows_in_eight_bits_are_rounded_once_on_both_exchanges() -> None:
    by_rank, by_node = (run_ranks(_exchange, 4, 2, name, True) for name in ("all_to_all", "by_node"))
    for (_, _, one), (_, _, other) in zip(by_rank, by_node, strict=True):
        for wanted, found in zip(one, other, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "chosen", "wanted"), [(1, 1, 0.690), (8, 4, 0.493), (16, 4, None), (4, 2, None)]
)
def test_the_formula_counts_rows_between_nodes(groups: int, chosen: int, wanted: float | None) -> None:
    """DeepSeek-V3: 256 experts, top 8, 64 ranks on 8 nodes, with and without groups of experts."""
    layout = ExpertLayout(256, 8, 64, 1, 8, groups, chosen)
    random = torch.Generator().manual_seed(0)
    allowed_TG = torch.rand(8_000, groups, generator=random).argsort(1) < chosen
    scores_TE = torch.rand(8_000, 256, generator=random)
    ids_TK = scores_TE.masked_fill(~allowed_TG.repeat_interleave(256 // groups, 1), -1).topk(8).indices
    by_node, by_rank = (index_rows(ids_TK, blocks, 256 // blocks)[2] / 8_000 for blocks in (8, 64))
    counted = {"by_node": by_node[1:8].sum().item(), "all_to_all": by_rank[8:64].sum().item()}
    for dispatcher, rows in counted.items():
        assert layout.rows_between_nodes(dispatcher) == pytest.approx(rows, rel=0.02)
    others = by_rank[[rank for rank in range(64) if rank % 8]].sum().item()
    assert layout.rows_per_token("by_node") == pytest.approx(counted["by_node"] + others, rel=0.02)
    ratio = layout.rows_between_nodes("by_node") / layout.rows_between_nodes("all_to_all")
    assert wanted is None or ratio == pytest.approx(wanted, abs=5e-4)
    print(f"{groups} groups, {chosen} a token: {ratio:.3f} of the rows between nodes")


def _refused(node_size: int, ep: int) -> str:
    _tell_nodes(node_size)
    with pytest.raises(ConfigError) as caught:
        build_dispatcher("by_node", Links.of(build_meshes(ep=ep)), num_experts=8, top_k=2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("node_size", "ep", "nodes"),
    [
        (4, 4, "all ranks on one node"),
        (2, 2, "node 0 on ranks 0-1, 1 on ranks 2-3"),  # each group on one
        (1, 4, "node 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3"),  # each rank on one
    ],
)
def test_groups_that_are_not_spread_evenly_are_refused_on_all_ranks(
    node_size: int, ep: int, nodes: str
) -> None:
    wanted = (
        f"experts.dispatcher: by_node expected each group of mesh.ep = {ep} ranks to have equally many, two "
        f"or more, on each of several nodes, got {nodes}; set experts.dispatcher "
        f'= "all_to_all"{"" if "one node" in nodes else ", or another mesh.ep"}'
    )
    assert run_ranks(_refused, 4, node_size, ep) == [wanted] * 4
