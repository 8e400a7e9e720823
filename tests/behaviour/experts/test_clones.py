"""Experts cloned to other ranks equal one process, for even loads to all rows for one expert."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.dispatch import ClonePolicy, FlexPolicy
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.router import Router
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.fsdp import FSDPPolicy, fully_shard
from fsdmoe.mesh import MeshConfig, build_meshes
from fsdmoe.parallel.quantized_layers import apply_recipe
from fsdmoe.parallel.quantized_state import QuantizedState
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.behaviour.test_layouts import losses
from tests.support import parallel_case
from tests.support.moe_case import Case, Layout, check_case, check_layout
from tests.support.parallel_case import FEW, compare, one_process, train_parallel
from tests.support.random_programs import layout as random_layout
from tests.support.random_programs.draw import Program
from tests.support.random_programs.model import Shape
from tests.support.random_programs.run import run_programs

TWO = ClonePolicy(2)
LOADS: tuple[dict[str, Any], ...] = (
    {"routing": "random", "tokens": "even"},
    {"routing": "random"},
    {"routing": "skewed"},
    {"routing": "skewed", "tokens": "one", "chunks": 2},
    {"routing": "one", "top_k": 1},
    {"routing": "one", "top_k": 1, "tokens": "one", "chunks": 3},
    {"routing": "dropped", "chunks": 2},
    {"routing": "skewed", "extras": "shared", "weight_after": True},
    {"routing": "skewed", "extras": "latent", "top_k": 8},
    {"routing": "skewed", "bias": True},
    {"policy": "expert_choice"},
    {"policy": "padded", "chunks": 2},
)


def cases(*policies: ClonePolicy) -> list[Case]:
    ways = ("all_to_all", "flex")
    return [Case(way, clones=policy, **load) for load in LOADS for policy in policies for way in ways]


SAMPLE = [
    (4, Layout(4), slice(0, None, 5)),
    pytest.param(4, Layout(2, tp=2), slice(1, None, 7), marks=pytest.mark.full),
]
EVERY = [
    (world_size, Layout(ep, tp=tp, cp=cp), slice(None))
    for world_size in (2, 4, 8)
    for ep in (2, 4, 8)
    for tp, cp in ((1, 1), (2, 1), (1, 2))
    if ep <= world_size and tp * cp <= world_size
]


@pytest.mark.parametrize(
    ("world_size", "layout", "some"),
    [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.full) for each in EVERY)],
    ids=str,
)
def test_a_layer_with_clones_equals_one_process(world_size: int, layout: Layout, some: slice) -> None:
    each = cases(TWO, TWO._replace(keep=False), ClonePolicy(1, 2))[some]
    worst = max(run_ranks(check_layout, world_size, layout, each))
    print(f"{layout}: worst relative error {worst:.1e} over {len(each)} cases")


def _tight_and_apart() -> None:
    meshes = build_meshes(ep=2)
    for chunks in (1, 3):
        case = Case("flex", "skewed", clones=TWO, chunks=chunks, flex=FlexPolicy(rows=0.5))
        errors = check_case(case, meshes)
        assert max(errors.values()) <= 1e-5, errors
    with pytest.raises(ConfigError, match="one NVLink domain, got ep 2 over several"):
        check_case(Case("flex", clones=TWO, flex=FlexPolicy(domain=1)), meshes)


def test_rows_that_do_not_fit_are_computed_without_clones() -> None:
    run_ranks(_tight_and_apart, 2)


def test_a_layer_that_is_run_again_exchanges_alike_on_ranks_with_clones_and_without() -> None:
    shapes = (
        Shape(layers=("moe",), plan=(0,), recompute="layer", clones=(1, 0, True)),
        Shape(layers=("moe",), plan=(0,), recompute="layer", clones=(1, 0, False), chunks=2),
        Shape(layers=("moe",), plan=(0,), recompute="layer", clones=(1, 0, True), frozen=("layers",)),
    )
    precision = {"param_dtype": "float32", "reduce_dtype": "float32"}
    steps = tuple(("micro", seed, "full", True) for seed in (86, 94))
    programs = [
        Program(random_layout.Layout(2, ep=2), precision=precision, shape=shape, ops=steps)
        for shape in shapes
    ]
    for verdict in run_programs(list(programs), timeout=15.0):
        assert not verdict.problem
        assert len(verdict.done) == 2


def test_a_backward_may_run_twice_and_an_evaluation_in_inference_mode_may_come_first() -> None:
    precision = {"param_dtype": "float32", "reduce_dtype": "float32"}
    twice = (("forward", 2, 84, "full"), ("backward", 2, True, 0.5, True), ("backward", 2, False, 0.5, True))
    ops = (("eval", "inference", 49, "full"), *twice, ("micro", 22, "full", True))
    programs = [
        Program(
            random_layout.Layout(2, ep=2),
            precision=precision,
            shape=Shape(layers=("moe",), plan=(0,), clones=(2, 0, keep), flex_rows=flex_rows),
            ops=ops,
        )
        for flex_rows in (0.0, 8.0)
        for keep in (True, False)
    ]
    for verdict in run_programs(list(programs), timeout=15.0):
        assert not verdict.problem
        assert len(verdict.done) == len(ops)


def _layer_with_clones(dispatcher: str, keep: bool, frozen: Sequence[str] = (), recipe: str = "bf16") -> MoE:
    torch.manual_seed(0)
    layer = MoE(Router(RouterSpec(num_experts=8, top_k=2), 64), GroupedExperts(8, 64, 32))
    with torch.no_grad():
        layer.gate.weight[:2] *= 5
    meshes, flex = build_meshes(ep=2), FlexPolicy(rows=8.0)
    clones = TWO._replace(keep=keep)
    parallelize_experts(layer, meshes, dispatcher=dispatcher, clones=clones, flex=flex)
    for name in frozen:
        layer.experts.get_parameter(name).requires_grad_(False)
    precision = PrecisionConfig(param_dtype="float32")
    if recipe != "bf16":
        precision = replace(precision, recipe=recipe, emulate=True, covers=("experts",))
    apply_recipe(_Model(layer), precision)
    fully_shard(layer, meshes, FSDPPolicy(precision=precision))
    return layer


def _rows() -> Tensor:
    return torch.randn(256, 64).abs().requires_grad_()


def _weights_of(*nums: int) -> int:
    """How many tensors there are of so many experts' projections."""
    shapes = {(num, 64, width) for num in nums for width in (32, 64)}
    return sum(issubclass(type(each), Tensor) and tuple(each.shape) in shapes for each in gc.get_objects())


def kept_weights(dispatcher: str, keep: bool, frozen: Sequence[str], recipe: str) -> list[int]:
    """Of a layer's own experts with clones behind them, and of clones alone: after forward, and when the
    gradient has come to the layer's input."""
    layer, x_TD = _layer_with_clones(dispatcher, keep, frozen, recipe), _rows()
    before = _weights_of(1, 2)
    loss = layer(x_TD, RoutingContext())[0].sum()
    found = [_weights_of(5, 6), _weights_of(1, 2) - before]
    x_TD.register_hook(lambda _: found.extend((_weights_of(5, 6), _weights_of(1, 2) - before)))
    loss.backward()
    return found


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("frozen", [(), ("gate_up_proj", "down_proj")], ids=["trained", "frozen"])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "flex"])
def test_weights_of_clones_are_kept_until_backward_and_own_ones_next_to_them_are_not(
    dispatcher: str, frozen: Sequence[str], recipe: str
) -> None:
    kept = run_ranks(kept_weights, 2, dispatcher, True, frozen, recipe)
    # With all_to_all only ranks that have clones keep some.
    assert sorted(kept) in ([[0, 0, 0, 0], [0, 2, 0, 0]], [[0, 2, 0, 0]] * 2)
    for each in run_ranks(kept_weights, 2, dispatcher, False, frozen, recipe):
        assert each[:3] == [0, 0, 0]


def gradients_after_one_for_the_input(dispatcher: str) -> dict[str, float]:
    """Largest relative differences of gradients from those of a backward alone. Where one projection is
    trained alone, its gradient is not computed late."""
    found = {}
    for keep, frozen in itertools.product((True, False), ((), ("gate_up_proj",), ("down_proj",))):
        grads = []
        for asks_first in (False, True):
            layer, x_TD = _layer_with_clones(dispatcher, keep, frozen), _rows()
            loss = layer(x_TD, RoutingContext())[0].square().sum()
            if asks_first:
                torch.autograd.grad(loss, x_TD, retain_graph=True)
            loss.backward()
            assert layer.dispatcher.traffic.calls["clones"] > 0
            grads.append([p.grad.full_tensor() for p in layer.experts.parameters() if p.grad is not None])
        pairs = zip(*grads, strict=True)
        found[f"{keep} {frozen}"] = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    return found


@pytest.mark.parametrize("dispatcher", ["all_to_all", "flex"])
def test_a_gradient_of_the_input_alone_leaves_nothing_for_the_next_backward(dispatcher: str) -> None:
    for found in run_ranks(gradients_after_one_for_the_input, 2, dispatcher):
        assert max(found.values()) < 1e-5, found


class _Model(nn.Module):
    """One layer, numbered as those are that a recipe covers."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.layers[0](x_TD, RoutingContext())[0]


def _step_by_recipe(recipe: str, is_coded: bool, **keys: Any) -> tuple[list[Tensor], dict[str, int]]:
    """Output, the gradient of the input, and those of weights; and what was sent."""
    torch.manual_seed(0)
    layer = MoE(Router(RouterSpec(num_experts=8, top_k=2), 64), GroupedExperts(8, 64, 32))
    with torch.no_grad():
        layer.gate.weight[:2] *= 5
    is_recomputed = keys.pop("recompute", False)
    meshes = build_meshes(ep=2)
    parallelize_experts(layer, meshes, flex=FlexPolicy(rows=8.0), **keys)
    precision = PrecisionConfig(param_dtype="float32")
    if recipe != "bf16":
        precision = replace(
            precision, recipe=recipe, emulate=True, covers=("experts",), quantized_weights=is_coded
        )
    apply_recipe(_Model(layer), precision)
    layer.experts.policy = layer.experts.policy._replace(recompute=is_recomputed)
    model = fully_shard(_Model(layer), meshes, FSDPPolicy(precision=precision))
    x_TD = _rows()
    y_TD = model(x_TD)
    (y_TD * torch.linspace(0.5, 1.5, 64)).sum().backward()
    assert x_TD.grad is not None
    grads = [p.grad.full_tensor() for p in layer.experts.parameters() if p.grad is not None]
    return [y_TD.detach(), x_TD.grad, *grads], dict(layer.dispatcher.traffic.bytes_sent)


def clones_by_recipe(recipe: str, is_coded: bool) -> list[tuple[list[bool], list[float], int]]:
    """With clones in every way: whether output and the gradient of the input are those without; errors of
    weights' gradients over those without, from what no recipe gives; and bytes of clones."""
    exact, _ = _step_by_recipe("bf16", False, dispatcher="all_to_all")
    found = []
    for number, (dispatcher, keep) in enumerate(itertools.product(("all_to_all", "flex"), (True, False))):
        keys: dict[str, Any] = {"dispatcher": dispatcher, "chunks": 1 + number % 2, "recompute": number == 3}
        plain, _ = _step_by_recipe(recipe, is_coded, **keys)
        cloned, sent = _step_by_recipe(recipe, is_coded, clones=TWO._replace(keep=keep), **keys)
        errors = [
            float((mine - true).norm() / (theirs - true).norm())
            for mine, theirs, true in zip(cloned[2:], plain[2:], exact[2:], strict=True)
        ]
        same = [torch.equal(*pair) for pair in zip(cloned[:2], plain[:2], strict=True)]
        found.append((same, errors, sent["clones"] // (1 if keep else 2)))
    return found


@pytest.mark.parametrize(
    ("recipe", "is_coded"),
    [("fp8_blockwise", True), ("mxfp8", False), pytest.param("fp8_blockwise", False, marks=pytest.mark.full)],
)
def test_clones_are_as_exact_as_a_recipe_without_them_and_codes_travel(recipe: str, is_coded: bool) -> None:
    of_expert = 3 * 32 * 64
    found = [each for of_rank in run_ranks(clones_by_recipe, 2, recipe, is_coded) for each in of_rank]
    for same, errors, sent in found:
        assert all(same)
        assert 0.8 < min(errors) <= max(errors) < 1.3, errors
        assert sent in (0, of_expert + 8 if is_coded else 4 * of_expert)
    assert sum(sent > 0 for _, _, sent in found) == 4, "of one of both ranks, each time"


def _statistics_of_weights(dispatcher: str, clones: ClonePolicy) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = MoE(Router(RouterSpec(num_experts=8, top_k=2), 64), GroupedExperts(8, 64, 32))
    with torch.no_grad():
        layer.gate.weight[:2] *= 5
    meshes = build_meshes(ep=2)
    parallelize_experts(layer, meshes, dispatcher=dispatcher, flex=FlexPolicy(rows=8.0), clones=clones)
    precision = PrecisionConfig(
        param_dtype="float32", recipe="mxfp8", emulate=True, covers=("experts",), statistics=1
    )
    covered = apply_recipe(_Model(layer), precision)
    assert covered is not None
    model = fully_shard(_Model(layer), meshes, FSDPPolicy(precision=precision))
    state = QuantizedState(covered.states, precision.statistics)
    state.follow(model, meshes)
    model(_rows()).square().sum().backward()
    assert (layer.dispatcher.traffic.calls["clones"] > 0) is (clones.slots > 0)
    figures = state.end_step()
    assert figures is not None
    return {name: of_name["weight"] for name, of_name in figures.items()}


def statistics_of_weights(dispatcher: str) -> list[dict[str, Any]]:
    return [_statistics_of_weights(dispatcher, clones) for clones in (ClonePolicy(0), TWO)]


@pytest.mark.parametrize("dispatcher", ["all_to_all", "flex"])
def test_statistics_of_a_recipe_count_each_expert_once(dispatcher: str) -> None:
    for plain, cloned in run_ranks(statistics_of_weights, 2, dispatcher):
        assert len(plain) == 2
        assert cloned == plain


MODELS: dict[str, dict[str, Any]] = {
    "two micro-batches": {"micro_batches": 2},
    "layers recomputed": {"recompute": ("layer",), "chunks": 2},
    "experts recomputed": {"recompute": ("experts", "router", "norms")},
    "sub-batches": {"sub_batches": 2},
    "dynamic groups, ranks without rows": {"dynamic": True, "max_tokens": 6},
    "whole gradients": {"shard": "optimizer"},
    "flex": {"dispatcher": "flex", "micro_batches": 2},
    "flex, layers recomputed": {"dispatcher": "flex", "recompute": ("layer",), "chunks": 2},
    "flex, experts recomputed": {"dispatcher": "flex", "recompute": ("experts", "router", "norms")},
    "flex, ep in two copies": {"dispatcher": "flex", "ep": 2, "shard": "optimizer"},
}


@pytest.mark.full
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_model_with_clones_trains_as_one_process(family: str, case: str) -> None:
    options = dict(MODELS[case])
    mesh = MeshConfig(dp_shard=4, ep=options.pop("ep", 4))
    if case == "sub-batches":
        mesh = MeshConfig(dp_shard=2, ep=2)
    layout = parallel_case.Layout(mesh, clones=2, **options)
    for of_rank in run_ranks(train_parallel, mesh.dp_shard, family, layout, FEW, timeout=300.0):
        for optimizer, course in of_rank.items():
            wanted = one_process(family, optimizer, layout.dynamic, layout.num_layers)
            compare(course, wanted, f"{case}, {family}, {optimizer}")


@pytest.mark.full
def test_a_hundred_steps_with_clones_have_the_losses_of_those_without(tmp_path: Path) -> None:
    shared = {"mesh__ep": 4, "train__steps": 100, "train__eval_interval": -1, "optim__lr": 1e-3}
    plain = losses(tmp_path / "plain", 4, **shared)
    cloned = losses(tmp_path / "cloned", 4, **shared, experts__clones=2, experts__clone_rows=0)
    assert len(plain) == len(cloned) == 100
    for (found, _), (wanted, _) in zip(cloned, plain, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
