"""Collectives in two stages, on four ranks as two nodes of two: what one collective gives."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.compat import all_gather, reduce_scatter
from fsdmoe.errors import ConfigError
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.fsdp.buffer import BufferPool, Scratch
from fsdmoe.fsdp.node_stages import NodeStages
from fsdmoe.mesh import Axis, Meshes, _ranks_of_a_node, build_meshes
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]


def meshes_of_two_nodes(**degrees: int) -> Meshes:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return build_meshes(**degrees)


def test_nodes_must_have_equal_parts_of_an_axis_and_more_than_one_rank_each() -> None:
    assert _ranks_of_a_node([0, 0, 1, 1]) == 2
    assert _ranks_of_a_node([rank // 8 for rank in range(64)]) == 8
    assert _ranks_of_a_node([0, 0, 0, 0]) is None, "one node"
    assert _ranks_of_a_node([0, 1, 2]) is None, "one rank in each"
    assert _ranks_of_a_node([0, 0, 0, 1, 1]) is None, "three and two"
    assert _ranks_of_a_node([2]) is None


def _collectives() -> tuple[bool, bool, list[bool]]:
    meshes, rank, size, numel = meshes_of_two_nodes(), dist.get_rank(), dist.get_world_size(), 6
    groups = meshes.node_groups(Axis.FSDP)
    assert groups is not None
    stages = NodeStages(groups, Scratch(BufferPool(torch.device("cpu"), [], register=False), 8), "x", 8)
    world, same = meshes.group(Axis.FSDP), []
    torch.manual_seed(rank)
    for dtype in DTYPES:
        own = torch.randint(-8, 8, (numel,)).to(dtype)
        found, wanted = (torch.zeros(numel * size).to(dtype) for _ in range(2))
        all_gather(wanted, own, world)
        for stage in stages.gather(found, own):
            stage(False)
        same.append(torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)))
        in_place = torch.zeros(numel * size).to(
            dtype
        )  # as after a cast: from this rank's slice of the result
        in_place[rank * numel : (rank + 1) * numel] = own
        for stage in stages.gather(in_place, in_place[rank * numel : (rank + 1) * numel]):
            stage(False)
        same.append(torch.equal(in_place.view(torch.uint8), wanted.view(torch.uint8)))
    full = torch.randint(-8, 8, (numel * size,)).float()  # whole numbers: sums are exact in any order
    out, wanted = torch.zeros(numel), torch.zeros(numel)
    reduce_scatter(wanted, full, world)
    for stage in stages.reduce(out, full):
        stage(False)
    sizes = groups.inside.size() == groups.across.size() == 2
    return sizes, torch.equal(out, wanted), same


def test_two_stages_gather_and_sum_as_one_collective() -> None:
    for sizes, sums, same in run_ranks(_collectives, 4):
        assert sizes
        assert sums
        assert same == [True] * 2 * len(DTYPES)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def _gradients(fsdp: FSDPConfig) -> list[dict[str, torch.Tensor]]:
    """Of two steps of two micro-batches, in one collective and in two stages."""
    meshes, found = meshes_of_two_nodes(), []
    for across_nodes in ("flat", "two_stages"):
        torch.manual_seed(0)
        policy = FSDPPolicy(
            fsdp=replace(fsdp, across_nodes=across_nodes),  # type: ignore[arg-type]
            precision=PrecisionConfig(param_dtype="float32"),
        )
        model = fully_shard(Layers(), meshes, policy)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1 + dist.get_rank())
        gradients = {}
        for _ in range(2):
            optim.zero_grad()
            for last in (False, True):
                with engine_of(model).micro_batch(last=last):
                    model(torch.randn(4, 12)).square().mean().backward()
            gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            optim.step()
        found.append(gradients)
        assert bool(engine_of(model).groups[0].context.nodes) == (across_nodes == "two_stages")
    return found


@pytest.mark.parametrize(
    "fsdp",
    [FSDPConfig(), FSDPConfig(lean=True, reduce="last"), FSDPConfig(grad_exchange="bf16_all_to_all")],
    ids=["plain", "lean, last", "bf16"],
)
def test_a_model_trains_alike_in_two_stages(fsdp: FSDPConfig) -> None:
    for flat, staged in run_ranks(_gradients, 4, fsdp):
        for name, gradient in flat.items():
            torch.testing.assert_close(staged[name], gradient, rtol=1e-5, atol=1e-7)


def _axes_with_nodes(degrees: dict[str, int]) -> list[bool]:
    meshes = meshes_of_two_nodes(**degrees)
    return [meshes.node_groups(axis) is not None for axis in (Axis.FSDP, Axis.FSDP_TP, Axis.EDP)]


def test_only_axes_that_span_nodes_are_concerned() -> None:
    assert run_ranks(_axes_with_nodes, 4, {"ep": 2}) == [[True, True, False]] * 4
    assert run_ranks(_axes_with_nodes, 4, {"tp": 2}) == [[False, True, True]] * 4
    assert run_ranks(_axes_with_nodes, 4, {"dp_outer": 2}) == [[False, False, False]] * 4


def test_other_words_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"fsdp\.across_nodes: expected one of flat, two_stages, got 'tree'"
    ):
        FSDPConfig(across_nodes="tree")  # type: ignore[arg-type]
