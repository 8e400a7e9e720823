"""Rows that are sent again in backward: the same layer as one process, with less kept in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.dispatch import ClonePolicy, Packing
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.memory.config import MemoryConfig, Part
from fsdmoe.memory.layers import keep_less
from fsdmoe.mesh import build_meshes
from fsdmoe.models.memory_parts import prepare_parts
from fsdmoe.testing import run_ranks
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import HIDDEN, Case, Layout, build_layer, check_layout, loss_of, token_parts
from tests.support.saved_activations import saved_activations

LOADS: tuple[dict[str, Any], ...] = (
    {"routing": "random"},
    {"routing": "skewed", "chunks": 2},
    {"routing": "single", "tokens": "one", "chunks": 3},
    {"routing": "dropped", "tokens": "even"},
    {"extras": "shared", "bias": True},
    {"extras": "latent", "weight_after": True},
    {"policy": "expert_choice"},
)
WAYS: tuple[dict[str, Any], ...] = (
    {"dispatcher": "all_to_all"},
    {"dispatcher": "allgather"},
    {"dispatcher": "all_to_all", "clones": ClonePolicy(2)},
)
CASES = [Case(sends_again=True, **way, **load) for load in LOADS for way in WAYS]


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (Layout(4), CASES[::2]),
        pytest.param(Layout(2, tp=2), CASES, marks=pytest.mark.full),
        pytest.param(Layout(4), CASES, marks=pytest.mark.full),
        pytest.param(Layout(2, cp=2), CASES, marks=pytest.mark.full),
    ],
)
def test_a_layer_that_sends_again_equals_one_process(layout: Layout, cases: list[Case]) -> None:
    run_ranks(check_layout, 4, layout, cases)


def _layer(memory: MemoryConfig, chunks: int = 1, **options: Any) -> tuple[MoE, Tensor]:
    torch.manual_seed(5)
    case = Case("all_to_all")
    layer = build_layer(case)
    parts = token_parts(case, dist.get_world_size())
    parallelize_experts(layer, build_meshes(ep=2), dispatcher="all_to_all", chunks=chunks, **options)
    use_local_tensors(layer)
    prepare_parts([layer], memory)
    keep_less([layer], memory)
    return layer, parts[dist.get_rank()].requires_grad_()


def _gradients(layer: MoE, x: Tensor) -> list[Tensor]:
    loss_of(layer(x)[0]).backward()
    found = [parameter.grad for parameter in layer.parameters()]
    return [x.grad, *found]  # type: ignore[list-item]


def _compare(others: tuple[Part, ...], chunks: int, packing: Packing) -> tuple[int, int, int]:
    """Bytes kept without and with, and those of the rows that came here."""
    kept = []
    gradients = []
    for parts in ((), ("dispatch",)):
        layer, x = _layer(MemoryConfig(recompute=(*others, *parts)), chunks, packing=packing)
        kept.append(saved_activations(lambda: layer(x), layer))  # noqa: B023
        layer.zero_grad()
        gradients.append(_gradients(layer, x))
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(found, wanted)
    rows = layer.dispatcher.traffic.bytes_sent["dispatch.again"]
    received = torch.tensor([rows])
    dist.all_reduce(received)
    return kept[0], kept[1], int(received)


@pytest.mark.parametrize(
    ("others", "chunks", "packing"),
    [
        ((), 1, Packing()),
        ((), 3, Packing()),
        (("experts", "router"), 2, Packing()),
        ((), 2, Packing(rows=True, grads=True)),
    ],
)
def test_gradients_are_the_same_bits_and_received_rows_are_not_kept(
    others: tuple[Part, ...], chunks: int, packing: Packing
) -> None:
    for without, kept, sent in run_ranks(_compare, 2, others, chunks, packing):
        assert sent > 0
        assert kept < without
    if not packing.rows:  # rows between the two ranks are as many bytes as are sent again
        found = run_ranks(_compare, 2, others, chunks, packing)
        assert sum(without - kept for without, kept, _ in found) >= found[0][2]


def _twice() -> None:
    layer, x = _layer(MemoryConfig(recompute=("dispatch",)))
    loss = loss_of(layer(x)[0])
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in layer.parameters()]  # type: ignore[union-attr]
    layer.zero_grad()
    loss.backward()
    for parameter, wanted in zip(layer.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, wanted)


def test_backward_may_run_twice() -> None:
    run_ranks(_twice, 2)


def _frozen() -> None:
    layer, x = _layer(MemoryConfig(recompute=("dispatch",)))
    layer.experts.requires_grad_(requires_grad=dist.get_rank() == 0)  # so rank 1 keeps nothing of them
    loss_of(layer(x)[0]).backward()
    assert x.grad is not None
    with torch.no_grad():
        y, _ = layer(x)
    assert y.shape == (x.shape[0], HIDDEN)
    assert layer.dispatcher.traffic.calls["dispatch.again"] == 1, "not in evaluation"


def test_ranks_that_need_no_rows_send_theirs_all_the_same() -> None:
    run_ranks(_frozen, 2)
