"""The emulated fabric: recorded times are the formula's, and clones exchange what they should."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fabric  # noqa: E402
import fabric_group  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from fsdmoe.core.compat import all_gather, reduce_scatter  # noqa: E402
from fsdmoe.core.ring_send_recv import RingSendRecv  # noqa: E402
from fsdmoe.experts.dispatch import Links, Rows, build_dispatcher  # noqa: E402
from fsdmoe.mesh import Axis, MeshConfig  # noqa: E402

NODE, NODES = fabric.FABRICS_BY_NAME["node"], fabric.FABRICS_BY_NAME["nodes"]
EIGHT = fabric.Place(tuple(range(8)), 0, 8)
WHOLE = fabric.Place(tuple(range(64)), 0, 8)
ACROSS = fabric.Place(tuple(range(0, 64, 8)), 0, 8)
GB = 1e9


@pytest.mark.parametrize(
    ("place", "load", "seconds"),
    [
        (EIGHT, EIGHT.passed_on(8 * GB), 15e-6 + 7 / 300),
        (EIGHT, EIGHT.reduced(8 * GB), 15e-6 + 14 / 300),
        (EIGHT, EIGHT.exchanged([GB] * 8, [GB] * 8), 15e-6 + 7 / 300),
        (EIGHT, EIGHT.exchanged([GB] * 8, [2 * GB] * 8), 15e-6 + 14 / 300),
        (WHOLE, WHOLE.passed_on(64 * GB), 30e-6 + 63 / 300),  # eight cards of 50 outrun NVLink
        (WHOLE, WHOLE.exchanged([GB] * 64, [GB] * 64), 30e-6 + 56 / 50),
        (ACROSS, ACROSS.passed_on(8 * GB), 30e-6 + 7 / 50),
        (EIGHT, EIGHT.copied(3 * GB, peer=1), 15e-6 + 3 / 300),
        (WHOLE, WHOLE.copied(3 * GB, peer=63), 30e-6 + 3 / 50),
    ],
)
def test_a_transfer_takes_latency_and_bytes_over_bandwidth(place, load, seconds):
    assert NODES.seconds(load, leaves_node=place.leaves_node) == pytest.approx(seconds, rel=1e-9)
    assert fabric.FABRICS_BY_NAME["free"].seconds(load, leaves_node=place.leaves_node) == 0


def test_the_presets_are_fixed():
    assert (NODE.nvlink, NODE.latency, NODE.domain, NODE.num_sms) == (300e9, 15e-6, 8, 16)
    assert (NODES.network, NODES.network_latency, NODES.world) == (50e9, 30e-6, 64)


def test_collectives_of_every_axis_are_recorded_with_their_time_and_kind():
    with fabric_group.emulated_fabric(NODES) as world:
        meshes = fabric_group.fabric_meshes(MeshConfig(ep=8, tp=2), "cpu")
        own = torch.ones(1000)
        all_gather(own.new_empty(32_000), own, meshes.group(Axis.FSDP))
        reduce_scatter(own, own.repeat(8), meshes.group(Axis.EDP))
        dist.all_to_all_single(own.new_empty(8000), own.repeat(8), group=meshes.group(Axis.EP))
        dist.all_reduce(own, group=meshes.group(Axis.TP))
        seen = [(r.kind, r.collective, r.ranks, r.seconds) for r in world.records]
    assert seen == [
        ("gather", "all_gather", 32, pytest.approx(30e-6 + 128_000 * 31 / 32 / 4 / 50e9)),
        ("reduce", "reduce_scatter", 8, pytest.approx(30e-6 + 32_000 * 7 / 8 / 50e9)),
        ("all_to_all", "all_to_all", 8, pytest.approx(15e-6 + 28_000 / 300e9)),
        ("tp", "all_reduce", 2, pytest.approx(15e-6 + 4000 / 300e9)),
    ]


def test_the_other_ranks_are_clones():
    with fabric_group.emulated_fabric(NODE, 4):
        own = torch.arange(3.0)
        gathered, part = torch.empty(12), torch.empty(3)
        all_gather(gathered, own, None)
        reduce_scatter(part, torch.arange(12.0), None)
        total, most = own.clone(), own.clone()
        dist.all_reduce(total)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        pieces = [torch.empty(3) for _ in range(4)]
        dist.all_gather(pieces, own)
        said = [None] * 4
        dist.all_gather_object(said, "me")
        received = RingSendRecv(own, torch.empty(3), None).wait()
    assert gathered.tolist() == own.repeat(4).tolist()
    assert torch.stack(pieces).tolist() == own.repeat(4, 1).tolist()
    assert part.tolist() == [0, 4, 8]
    assert (total.tolist(), most.tolist(), received.tolist()) == ([0, 4, 8], [0, 1, 2], [0, 1, 2])
    assert said == ["me"] * 4


def test_rows_arrive_from_every_clone_as_this_rank_keeps_them_and_come_back():
    with fabric_group.emulated_fabric(NODE, 4):
        rows, send = torch.arange(10.0).view(10, 1), [2, 5, 0, 3]
        arrived = torch.empty(8, 1)
        dist.all_to_all_single(arrived, rows, [2] * 4, send)
        back = torch.empty(10, 1)
        dist.all_to_all_single(back, arrived, send, [2] * 4)
    assert arrived.flatten().tolist() == [0, 1] * 4
    assert back[:2].tolist() == rows[:2].tolist()
    assert set(back.flatten().tolist()) == {0, 1}


def test_a_rank_that_keeps_nothing_for_itself_receives_other_rows_or_zeros():
    with fabric_group.emulated_fabric(NODE, 2):
        out = torch.full((2, 1), 9.0)
        dist.all_to_all_single(out, torch.ones(3, 1), [1, 1], [0, 3])
        assert out.flatten().tolist() == [1, 1]
        dist.all_to_all_single(out, torch.ones(0, 1), [1, 1], [0, 0])
        assert out.flatten().tolist() == [0, 0]


def test_rows_by_node_are_charged_to_the_network_and_then_to_nvlink():
    with fabric_group.emulated_fabric(NODES) as world:
        meshes = fabric_group.fabric_meshes(MeshConfig(ep=64), "cpu")
        d, _ = build_dispatcher("by_node", Links.of(meshes), num_experts=64, top_k=8)
        ids = torch.arange(8).repeat(10, 1) * 7 + torch.arange(10)[:, None] % 8
        plan, rows = d.prepare(Rows(torch.randn(10, 100), torch.rand(10, 8), ids))
        world.records.clear()
        d.gather(plan, d.dispatch(plan, rows))
        loads = [record.load for record in world.records]
        seconds = [record.seconds for record in world.records]
        to_nodes = sum(plan.between.rows_sent[1:])
    # Rows and their labels, on either way. The other ranks are clones, so a node gets from each what this
    # rank keeps for its own.
    assert [load.nvlink for load in loads[:2]] == [load.network for load in loads[2:]] == [0, 0]
    most = max(to_nodes, 7 * plan.between.rows_sent[0])
    assert [load.network for load in loads[:2]] == [most * 400, most * 64]
    most = max(sum(plan.rows_sent[1:]), 7 * plan.rows_sent[0])
    assert [load.nvlink for load in loads[2:]] == [most * 400, most * 64]
    assert seconds[0] == pytest.approx(30e-6 + loads[0].network / 50e9)
    assert seconds[2] == pytest.approx(15e-6 + loads[2].nvlink / 300e9)


def test_keys_that_have_an_option_of_their_own_are_not_set_by_key() -> None:
    script = [sys.executable, str(ROOT / "benchmarks/emulated_run.py"), "--tiny", "--chunks", "2"]
    given = ["--set", "data.seq_len=64", "experts.chunks=4", "optim.lr=1e-3"]
    done = subprocess.run([*script, *given], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "--set: data.seq_len, experts.chunks is set by an option of its own" in done.stderr


@pytest.mark.full
def test_a_whole_step_runs_on_a_cpu() -> None:
    script = [sys.executable, str(ROOT / "benchmarks/emulated_run.py"), "--tiny", "--tp", "2"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "node / free" in done.stdout
    for kind in ("all-to-all", "gather", "reduce", "tp "):
        assert f"\n{kind}" in done.stdout
