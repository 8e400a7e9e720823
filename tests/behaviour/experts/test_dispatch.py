"""Every dispatcher over every layout of ranks equals the layer in one process: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdmoe.experts.dispatch import Links, build_dispatcher
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import (
    Case,
    Layout,
    build_layer,
    check_layout,
    loss_of,
    relative,
    run,
    token_parts,
)

SPLIT = ("allgather", "all_to_all", "flex")
ROUTINGS, TOKENS = ("random", "skewed", "dropped"), ("even", "uneven", "one")


def dispatchers_for(layout: Layout) -> tuple[str, ...]:
    """A world of one EP rank can use all of them: with nobody to send to, they must still agree."""
    return ("local", *SPLIT) if layout.ep == 1 else SPLIT


VARIANTS: tuple[dict[str, Any], ...] = (
    {"bias": True},
    {"bias": True, "weight_after": True},
    {"extras": "shared"},
    {"extras": "gated"},
    {"extras": "latent"},
    {"top_k": 1},
    {"top_k": 8},
    {"policy": "expert_choice"},
    {"policy": "padded"},
    {"chunks": 2},
    {"chunks": 3, "extras": "shared", "routing": "skewed"},
    {"chunks": 5, "extras": "latent", "tokens": "one"},
    {"chunks": 3, "policy": "expert_choice"},
    {"chunks": 2, "policy": "padded", "routing": "random", "tokens": "even"},
)


def cases_for(layout: Layout) -> list[Case]:
    dispatchers = dispatchers_for(layout)
    plain = [Case(d, routing, tokens) for d in dispatchers for routing in ROUTINGS for tokens in TOKENS]
    return plain + [Case(d, **options) for d in dispatchers for options in VARIANTS]


def layouts_of(world_size: int) -> Iterator[Layout]:
    """Every (ep, etp, edp) times every (tp, cp, dp_shard); dp_outer apart, since EP never spans it."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for ep in sizes:
        for etp in sizes:
            for tp in sizes:
                for cp in sizes:
                    if world_size % (ep * etp) == 0 and world_size % (tp * cp) == 0:
                        yield Layout(ep, etp, tp, cp)
    if world_size >= 4:
        yield Layout(2, 1, dp_outer=2)
        yield Layout(1, 2, tp=2, dp_outer=2)


SAMPLE = [
    (2, Layout(1, 2), slice(1, None, 6)),
    (4, Layout(2, 2), slice(1, None, 3)),
    (4, Layout(4, tp=2, cp=2), slice(0, None, 3)),  # EP 4 with one data-parallel rank
    pytest.param(2, Layout(2), slice(0, None, 2), marks=pytest.mark.full),
    pytest.param(2, Layout(1, 2), slice(0, None, 3), marks=pytest.mark.full),
    pytest.param(4, Layout(2, dp_outer=2), slice(1, None, 5), marks=pytest.mark.full),
    pytest.param(8, Layout(8, tp=4), slice(0, None, 5), marks=pytest.mark.full),
    pytest.param(8, Layout(2, 2, tp=2, cp=2), slice(1, None, 5), marks=pytest.mark.full),
    pytest.param(8, Layout(2, 4, cp=2), slice(2, None, 7), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world_size", "layout", "some"), SAMPLE, ids=str)
def test_a_split_layer_equals_one_process(world_size: int, layout: Layout, some: slice) -> None:
    cases = cases_for(layout)[some]
    cases = [case for n, case in enumerate(cases) if case.dispatcher != "flex" or n % 3 == 0]
    worst = max(run_ranks(check_layout, world_size, layout, cases))
    print(f"{layout}: worst relative error {worst:.1e} over {len(cases)} cases")


EVERY = [(world_size, layout) for world_size in (2, 4, 8) for layout in layouts_of(world_size)]


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "layout"), EVERY, ids=str)
def test_every_layout_equals_one_process(world_size: int, layout: Layout) -> None:
    """tp and cp change which ranks hold an expert, and nothing else: their layouts take turns with cases."""
    cases = cases_for(layout)
    if layout.dp_outer == 1 and layout.tp * layout.cp > 1:
        cases = cases[EVERY.index((world_size, layout)) % 3 :: 3]
    run_ranks(check_layout, world_size, layout, cases)


def _loads_and_rows(case: Case, layout: Layout) -> tuple[list[float], int]:
    torch.manual_seed(1234)
    layer, x = build_layer(case), token_parts(case, dist.get_world_size())[dist.get_rank()]
    parallelize_experts(layer, build_meshes(ep=layout.ep, etp=layout.etp), dispatcher=case.dispatcher)
    use_local_tensors(layer)
    received = []
    layer.experts.register_forward_pre_hook(lambda _, args: received.append(args[0].shape[0]))
    _, aux = layer(x)
    return aux.load_E.tolist(), received[0]


def test_the_hard_cases_are_what_they_say() -> None:
    skewed = run_ranks(_loads_and_rows, 4, Case("all_to_all", "skewed", "uneven"), Layout(4))
    loads = torch.tensor([load for load, _ in skewed]).sum(0)
    assert (loads > 0).tolist() == [True] * 3 + [False] * 5  # experts without tokens
    assert [rows for _, rows in skewed][2:] == [0, 0]  # ranks that receive nothing
    assert sum(skewed[1][0]) == 0  # a rank that brings nothing


def _in_bf16(dispatcher: str, layout: Layout) -> list[float]:
    torch.manual_seed(1)
    case = Case(dispatcher, tokens="uneven", extras="shared")
    whole, x = build_layer(case), token_parts(case, dist.get_world_size())[dist.get_rank()].bfloat16()
    split = build_layer(case)
    split.load_state_dict(whole.state_dict())
    parallelize_experts(split, build_meshes(ep=layout.ep, etp=layout.etp), dispatcher=dispatcher)
    use_local_tensors(split)
    y, dx = run(whole.bfloat16(), x)
    my_y, my_dx = run(split.bfloat16(), x)
    return [relative(my_y.float(), y.float()), relative(my_dx.float(), dx.float())] if len(x) else []


@pytest.mark.parametrize("layout", [pytest.param(Layout(4), marks=pytest.mark.full), Layout(2, 2)], ids=str)
@pytest.mark.parametrize("dispatcher", SPLIT)
def test_bf16_rows_travel_and_stay_within_their_rounding(dispatcher: str, layout: Layout) -> None:
    errors = [error for errors in run_ranks(_in_bf16, 4, dispatcher, layout) for error in errors]
    assert max(errors) < 1e-2


def _recomputed(dispatcher: str) -> float:
    torch.manual_seed(1)
    case = Case(dispatcher, tokens="uneven", extras="shared")
    layer, x = build_layer(case), token_parts(case, dist.get_world_size())[dist.get_rank()]
    parallelize_experts(layer, build_meshes(ep=2, etp=2), dispatcher=dispatcher)
    use_local_tensors(layer)
    _, dx = run(layer, x)
    kept = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    again = x.clone().requires_grad_()
    loss_of(checkpoint(lambda x: layer(x)[0], again, use_reentrant=False)).backward()
    errors = [relative(parameter.grad, kept[name]) for name, parameter in layer.named_parameters()]
    return max(*errors, relative(again.grad, dx))


@pytest.mark.parametrize("dispatcher", SPLIT)
def test_a_recomputed_layer_has_the_same_gradients(dispatcher: str) -> None:
    assert max(run_ranks(_recomputed, 4, dispatcher)) == 0.0


def _frozen(dispatcher: str, frozen: str) -> bool:
    torch.manual_seed(1)
    layer, x = build_layer(Case(dispatcher)), torch.randn(5, 16)
    parallelize_experts(layer, build_meshes(ep=2), dispatcher=dispatcher)
    use_local_tensors(layer)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    loss_of(layer(x)[0]).backward()  # x needs no gradient here
    return all(
        (parameter.grad is None) == name.startswith(frozen) for name, parameter in layer.named_parameters()
    )


@pytest.mark.parametrize("frozen", ["gate", "experts"])
@pytest.mark.parametrize("dispatcher", SPLIT)
def test_frozen_parts_need_no_gradient_and_hang_nobody(dispatcher: str, frozen: str) -> None:
    assert all(run_ranks(_frozen, 2, dispatcher, frozen))


def test_without_gradients_nothing_is_kept() -> None:
    layer = build_layer(Case("local"))
    dispatcher, _ = build_dispatcher("local", Links.alone(), num_experts=8, top_k=3)
    layer.exchange_by(dispatcher)
    with torch.no_grad():
        y, aux = layer(torch.randn(2, 5, 16))
    assert y.shape == (2, 5, 16)
    assert not y.requires_grad
    assert aux.load_E.sum() == 2 * 5 * 3
