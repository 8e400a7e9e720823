"""Capacity: who is dropped, and padding that makes every shape constant. Expert choice: who is picked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.capacity import even_share, pad_to_capacity, within_capacity
from fsdmoe.experts.config import CapacityConfig, ExpertChoiceConfig, ExpertsConfig
from fsdmoe.experts.expert_choice import select_by_experts
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.router import Router, RouterSpec, RoutingContext


def _kept_by_hand(
    ids_TK: Tensor, weights_TK: Tensor, num_experts: int, config: CapacityConfig, context: RoutingContext
) -> list[list[bool]]:
    """The definition, choice by choice."""
    num_tokens, top_k = ids_TK.shape
    targets = num_experts if config.per == "expert" else context.num_devices
    sequences = [0] * num_tokens
    if config.scope == "sequence" and context.sequence_ids_T is not None:
        sequences = context.sequence_ids_T.tolist()
    counted = [True] * num_tokens if context.token_mask_T is None else context.token_mask_T.tolist()
    choices = [(t, k) for t in range(num_tokens) for k in range(top_k) if ids_TK[t, k] >= 0]
    by_weight = config.policy == "probability"
    choices.sort(key=lambda c: -(weights_TK[c].item() * by_weight) if counted[c[0]] else 1.0)
    kept = [[False] * top_k for _ in range(num_tokens)]
    taken: dict[tuple[int, int], int] = {}
    for t, k in choices:
        place = sequences[t], int(ids_TK[t, k]) * targets // num_experts
        tokens = sum(counted[u] for u in range(num_tokens) if sequences[u] == sequences[t])
        limit = math.ceil(round(config.factor * tokens * top_k / targets, 9))
        kept[t][k] = taken.get(place, 0) < limit
        taken[place] = taken.get(place, 0) + kept[t][k]
    return kept


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_choices_are_kept_as_defined(data: st.DataObject) -> None:
    num_devices = data.draw(st.sampled_from([1, 2, 4]))
    num_experts = num_devices * data.draw(st.integers(1, 3))
    top_k, num_tokens = data.draw(st.integers(1, min(3, num_experts))), data.draw(st.integers(1, 20))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    config = CapacityConfig(
        factor=data.draw(st.sampled_from([0.3, 1.0, 1.1, 1.25, 4.0])),
        scope=data.draw(st.sampled_from(["sub_sequence", "sequence"])),
        policy=data.draw(st.sampled_from(["probability", "position"])),
        per=data.draw(st.sampled_from(["expert", "device"])),
    )
    scores_TE = torch.randn(num_tokens, num_experts) + torch.arange(num_experts)  # later experts are crowded
    weights_TK, ids_TK = scores_TE.softmax(-1).topk(top_k)
    ids_TK = ids_TK.masked_fill(torch.rand(num_tokens, top_k) < 0.1, -1)
    context = RoutingContext(
        sequence_ids_T=torch.randint(3, (num_tokens,)).sort().values,
        num_sequences=3,
        token_mask_T=torch.rand(num_tokens) < 0.8 if data.draw(st.booleans()) else None,
        num_devices=num_devices,
    )
    kept_TK = within_capacity(ids_TK, weights_TK, num_experts, config, context)
    assert kept_TK.tolist() == _kept_by_hand(ids_TK, weights_TK, num_experts, config, context)


def test_equal_weights_are_kept_in_the_order_of_positions() -> None:
    ids_TK, weights_TK = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    context = RoutingContext(
        sequence_ids_T=torch.zeros(6, dtype=torch.int64),
        sequence_positions_T=torch.tensor([5, 4, 3, 2, 1, 0]),
    )
    kept_TK = within_capacity(ids_TK, weights_TK, 2, CapacityConfig(factor=1.0, scope="sequence"), context)
    assert kept_TK.flatten().tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("choices", "bins", "factor", "expected"),
    [(10, 1, 1.1, 11), (64, 8, 1.25, 10), (7, 2, 1.0, 4), (0, 4, 2.0, 0)],
)
def test_the_share_is_rounded_up_but_not_by_rounding_errors(
    choices: int, bins: int, factor: float, expected: int
) -> None:
    assert even_share(choices, bins, factor) == expected
    assert even_share(torch.tensor(choices), bins, factor).item() == expected


def test_a_dropped_choice_has_no_weight_and_no_gradient() -> None:
    router = Router(RouterSpec(num_experts=4, top_k=2), 8, ExpertsConfig(capacity=CapacityConfig(factor=0.5)))
    free = Router(router.spec, 8)
    free.load_state_dict(router.state_dict())
    x_TD = torch.randn(16, 8)
    routing, dropless = router(x_TD), free(x_TD)
    kept_TK = routing.ids_TK >= 0
    assert 0 < kept_TK.sum() < 32
    assert torch.equal(routing.load_E, dropless.load_E)  # the demand, not what was let through
    assert torch.equal(routing.weights_TK, dropless.weights_TK * kept_TK)
    assert routing.ids_TK[kept_TK].bincount(minlength=4).max() <= 4
    for expert in range(4):  # by probability: nobody was dropped for a lower weight
        weights_A, stays_A = (
            dropless.weights_TK[dropless.ids_TK == expert],
            kept_TK[dropless.ids_TK == expert],
        )
        if not stays_A.all():
            assert weights_A[stays_A].min() >= weights_A[~stays_A].max()
    mine = torch.autograd.grad(routing.weights_TK.sum(), router.weight)[0]
    theirs = torch.autograd.grad((dropless.weights_TK * kept_TK).sum(), free.weight)[0]
    torch.testing.assert_close(mine, theirs)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.5, 1.0, 1.25, 3.0]))
@settings(max_examples=60, deadline=None)
def test_padding_fills_every_expert_to_the_same_count(
    num_tokens: int, num_experts: int, top_k: int, factor: float
) -> None:
    top_k = min(top_k, num_experts)
    torch.manual_seed(num_tokens)
    weights_TK, ids_TK = (
        (torch.randn(num_tokens, num_experts) + torch.arange(num_experts)).softmax(-1).topk(top_k)
    )
    capacity = even_share(num_tokens * top_k, num_experts, factor)
    kept_TK = within_capacity(
        ids_TK, weights_TK, num_experts, CapacityConfig(factor=factor), RoutingContext()
    )
    ids_TK = ids_TK.masked_fill(~kept_TK, -1)
    weights_TK = weights_TK * kept_TK
    padded_TC, weights_TC = pad_to_capacity(ids_TK, weights_TK, num_experts, capacity)
    loads = padded_TC[padded_TC >= 0].bincount(minlength=num_experts)
    assert loads.tolist() == [capacity] * num_experts
    before = torch.zeros(num_tokens, num_experts).scatter_add(1, ids_TK.clamp_min(0), weights_TK)
    after = torch.zeros(num_tokens, num_experts).scatter_add(1, padded_TC.clamp_min(0), weights_TC)
    assert torch.equal(before, after)  # what is added weighs nothing


def test_padded_shapes_do_not_depend_on_the_routing() -> None:
    config = ExpertsConfig(capacity=CapacityConfig(factor=1.5, pad_to_max=True))
    shapes = set()
    for skew in (0.0, 5.0):
        router = Router(RouterSpec(num_experts=8, top_k=2), 16, config)
        with torch.no_grad():
            router.weight[0] += skew
        routing = router(torch.randn(32, 16) + 1.0)
        loads = routing.ids_TK[routing.ids_TK >= 0].bincount(minlength=8)
        shapes.add((tuple(routing.ids_TK.shape), tuple(routing.weights_TK.shape), tuple(loads.tolist())))
    assert shapes == {((32, 3), (32, 3), (12,) * 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.0}, r"experts\.capacity\.factor: expected a number above 0, got 0\.0"),
        ({"factor": -1.0}, r"experts\.capacity\.factor: .* got -1\.0"),
        ({"factor": float("nan")}, r"experts\.capacity\.factor: .* got nan"),
        ({"pad_to_max": True, "per": "device"}, r"experts\.capacity\.pad_to_max: .* per = 'device'"),
        ({"pad_to_max": True, "scope": "sequence"}, r"experts\.capacity\.pad_to_max: .* got 'sequence'"),
    ],
)
def test_an_impossible_capacity_is_refused_by_name(
    changes: dict[str, float | bool | str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CapacityConfig(**changes)  # type: ignore[arg-type]


def test_every_expert_picks_its_best_tokens() -> None:
    scores_TE = torch.rand(12, 4)
    ids_TK = select_by_experts(scores_TE, 2, ExpertChoiceConfig())
    assert ids_TK.shape == (12, 4)
    for expert in range(4):
        picked = (ids_TK == expert).any(1).nonzero().flatten().tolist()
        best = scores_TE[:, expert].topk(12 * 2 // 4).indices  # tokens * top_k / experts
        assert picked == sorted(best.tolist())


def test_a_token_keeps_its_best_experts_when_columns_are_few() -> None:
    scores_TE = torch.rand(20, 8)
    every = select_by_experts(scores_TE, 3, ExpertChoiceConfig())
    few = select_by_experts(scores_TE, 3, ExpertChoiceConfig(max_experts_per_token=2))
    assert few.shape == (20, 2)
    assert torch.equal(few, every[:, :2])
    assert (every[:, 2] >= 0).any()


def test_experts_never_pick_padding_and_pick_for_the_counted_tokens_only() -> None:
    scores_TE, mask_T = torch.rand(20, 4), torch.arange(20) < 8
    ids_TK = select_by_experts(scores_TE, 2, ExpertChoiceConfig(), mask_T)
    assert torch.equal(ids_TK[:8], select_by_experts(scores_TE[:8], 2, ExpertChoiceConfig()))
    assert (ids_TK[8:] == -1).all()


@pytest.mark.parametrize("score", ["softmax_topk", "topk_softmax", "sigmoid"])
def test_expert_choice_is_balanced_from_any_router_and_weighs_by_scores(score: str) -> None:
    spec = RouterSpec(num_experts=4, top_k=2, score=score, norm_topk=True)  # type: ignore[arg-type]
    router = Router(spec, 16, ExpertsConfig(selection="expert_choice"))
    with torch.no_grad():
        router.weight[0] += 3.0
    x_TD = torch.randn(24, 16) + 1.0
    routing = router(x_TD)
    assert routing.load_E.tolist() == [12.0] * 4
    logits_TE = x_TD @ router.weight.t()
    scores_TE = logits_TE.sigmoid() if score == "sigmoid" else logits_TE.softmax(-1)
    picked_TK = routing.ids_TK >= 0
    expected = scores_TE.gather(1, routing.ids_TK.clamp_min(0)) * picked_TK
    torch.testing.assert_close(routing.weights_TK, expected)
    mine, theirs = (
        torch.autograd.grad(w.square().sum(), router.weight)[0] for w in (routing.weights_TK, expected)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.0}, r"experts\.expert_choice\.factor: expected a number above 0"),
        ({"max_experts_per_token": -1}, r"experts\.expert_choice\.max_experts_per_token: expected 0 or more"),
    ],
)
def test_an_impossible_expert_choice_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertChoiceConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        ExpertsConfig(capacity=CapacityConfig(factor=0.7)),
        ExpertsConfig(capacity=CapacityConfig(factor=1.5, pad_to_max=True)),
        ExpertsConfig(selection="expert_choice"),
        ExpertsConfig(selection="forced_balance"),
    ],
    ids=["dropped", "padded", "expert choice", "forced balance"],
)
def test_the_layer_computes_what_the_router_decided(config: ExpertsConfig) -> None:
    router = Router(RouterSpec(num_experts=4, top_k=2, norm_topk=True), 16, config)
    layer = MoE(router, GroupedExperts(4, 16, 24))
    layer.experts.reset_parameters(std=0.3)
    x_TD = torch.randn(20, 16)
    routing = router(x_TD)
    expected_TD = torch.zeros(20, 16)
    for token, column in (routing.ids_TK >= 0).nonzero().tolist():
        expert = int(routing.ids_TK[token, column])
        gate_N, up_N = (layer.experts.gate_up_proj[expert] @ x_TD[token]).chunk(2)
        hidden_N = torch.nn.functional.silu(gate_N) * up_N
        expected_TD[token] += routing.weights_TK[token, column] * (layer.experts.down_proj[expert] @ hidden_N)
    y_TD, aux = layer(x_TD)
    torch.testing.assert_close(y_TD, expected_TD, rtol=1e-4, atol=1e-5)
    assert torch.equal(aux.load_E, routing.load_E)
    parameters = list(layer.parameters())
    grads = [torch.autograd.grad(y.square().sum(), parameters) for y in (y_TD, expected_TD)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
