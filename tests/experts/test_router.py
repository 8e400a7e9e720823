"""The router by itself: exact backward, saved bytes, selection rules, precision, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import BalanceConfig, CapacityConfig, ExpertsConfig
from fsdmoe.experts.round_robin import select_round_robin
from fsdmoe.experts.router import Router, RouterSpec, RoutingContext, select_top_k
from fsdmoe.experts.scores import ScoreRule, choice_scores, logits_and_input, router_logits, score_choices

SCORES = ["softmax_topk", "topk_softmax", "sigmoid"]
ALL_TERMS = BalanceConfig(sequence=0.1, micro_batch=0.1, global_batch=0.1, device=0.1, z_loss=0.01)


def _reference(
    logits_TE: Tensor, ids_TK: Tensor, rule: ScoreRule, sequence_ids_T: Tensor, mask_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain autograd."""
    made_TK = ids_TK >= 0
    scores_TE = choice_scores(logits_TE, rule.score)
    chosen_TK = scores_TE.gather(1, ids_TK.clamp_min(0))
    if rule.score == "topk_softmax":
        exp_TK = chosen_TK.exp() * made_TK
        weights_TK = exp_TK / exp_TK.sum(-1, keepdim=True).clamp_min(1e-20)
    else:
        weights_TK = chosen_TK * made_TK
        if rule.normalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(1e-20)
    probs_TE = (
        scores_TE / scores_TE.sum(-1, keepdim=True) if rule.score == "sigmoid" else logits_TE.softmax(-1)
    )
    member_ST = (sequence_ids_T == torch.arange(rule.num_sequences).unsqueeze(1)) & mask_T
    z_sum = (logits_TE.logsumexp(-1).square() * mask_T).sum()
    return weights_TK * rule.scaling, member_ST.to(probs_TE.dtype) @ probs_TE, z_sum


def _case(score: str, normalise: bool) -> dict[str, Any]:
    ids_TK = torch.stack([torch.randperm(7)[:3] for _ in range(9)])
    ids_TK[2, 1] = -1
    ids_TK[5] = -1
    return {
        "logits_TE": torch.randn(9, 7, dtype=torch.float64, requires_grad=True),
        "ids_TK": ids_TK,
        "rule": ScoreRule(score, normalise, 2.5, num_sequences=3, want_sums=True, want_z=True),  # type: ignore[arg-type]
        "sequence_ids_T": torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 2]),
        "mask_T": torch.rand(9) < 0.8,
    }


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_scores_and_their_gradients_equal_plain_autograd(score: str, normalise: bool) -> None:
    case = _case(score, normalise)
    expected = _reference(*case.values())
    found = score_choices(
        case["logits_TE"], case["ids_TK"], case["rule"], sequence_ids_T=case["sequence_ids_T"],
        token_mask_T=case["mask_T"],
    )  # fmt: skip
    cotangents = [torch.randn_like(out) for out in expected]
    for used in ((0,), (1,), (2,), (0, 1, 2)):  # each output alone: its neighbours' gradients are then absent
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        grads = [
            torch.autograd.grad(
                [outs[i] for i in used], case["logits_TE"], [cotangents[i] for i in used], retain_graph=True
            )[0]
            for outs in (found, expected)
        ]
        assert grads[1].abs().max() > 0
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_knowing_that_every_choice_was_made_changes_nothing(score: str, normalise: bool) -> None:
    case = _case(score, normalise)
    ids_TK = case["ids_TK"].clamp_min(0)
    rules = (case["rule"], replace(case["rule"], complete=True))
    plain, spared = (score_choices(case["logits_TE"], ids_TK, rule).weights_TK for rule in rules)
    assert torch.equal(plain, spared)
    cotangent_TK = torch.randn_like(plain)
    grads = [torch.autograd.grad(out, case["logits_TE"], cotangent_TK)[0] for out in (plain, spared)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("score", SCORES)
def test_the_score_function_passes_gradcheck(score: str) -> None:
    case = _case(score, True)

    def outputs(logits_TE: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            score_choices(
                logits_TE, case["ids_TK"], case["rule"], sequence_ids_T=case["sequence_ids_T"],
                token_mask_T=case["mask_T"],
            )
        )  # fmt: skip

    assert torch.autograd.gradcheck(outputs, (case["logits_TE"],))


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_logits_of_bf16_inputs_are_those_of_fp32(x_dtype: str, weight_dtype: str) -> None:
    x_TD = torch.randn(33, 64).to(getattr(torch, x_dtype)).requires_grad_()
    weight_ED = torch.randn(8, 64).to(getattr(torch, weight_dtype)).requires_grad_()
    bias_E = torch.randn(8, requires_grad=True)
    grad_TE = torch.randn(33, 8)
    with torch.autocast("cpu", torch.bfloat16):  # must not reach the router
        logits_TE = router_logits(x_TD, weight_ED, bias_E)
    assert logits_TE.dtype == torch.float32
    logits_TE.backward(grad_TE)
    wide = [t.detach().double().requires_grad_() for t in (x_TD, weight_ED, bias_E)]
    expected_TE = torch.nn.functional.linear(*wide)
    expected_TE.backward(grad_TE.double())
    torch.testing.assert_close(logits_TE, expected_TE.float(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((x_TD, weight_ED, bias_E), wide, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == mine.dtype
        assert theirs.grad is not None
        # One rounding to the input's own precision, and no more: the gradient itself was summed in fp32.
        torch.testing.assert_close(mine.grad, theirs.grad.float().to(mine.dtype), rtol=1e-2, atol=1e-5)
        rounded = theirs.grad.float().to(mine.dtype).float()
        assert (mine.grad.float() == rounded).float().mean() > 0.95 or mine.dtype == torch.float32


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("uses", [("logits",), ("x",), ("logits", "x")])
def test_what_goes_on_with_x_adds_its_gradient(x_dtype: torch.dtype, uses: tuple[str, ...]) -> None:
    """Whichever output has a gradient, x gets that of both; the gradient that came is left as it was."""
    x_TD = torch.randn(33, 64).to(x_dtype).requires_grad_()
    weight_ED = torch.randn(8, 64, requires_grad=True)
    grads = {"logits": torch.randn(33, 8), "x": torch.randn(33, 64).to(x_dtype)}
    given = {name: gradient.clone() for name, gradient in grads.items()}
    outputs = dict(zip(("logits", "x"), logits_and_input(x_TD, weight_ED), strict=True))
    assert torch.equal(outputs["x"], x_TD)
    assert outputs["x"].grad_fn is outputs["logits"].grad_fn, "both gradients come to one place"
    torch.autograd.backward([outputs[use] for use in uses], [grads[use] for use in uses])
    expected = torch.zeros(33, 64)
    if "logits" in uses:
        expected += grads["logits"] @ weight_ED.detach()
    if "x" in uses:
        expected += grads["x"].float()
    assert x_TD.grad is not None
    torch.testing.assert_close(
        x_TD.grad, expected.to(x_dtype), rtol=1e-2 if x_dtype.itemsize == 2 else 1e-5, atol=1e-4
    )
    assert (weight_ED.grad is None) == ("logits" not in uses)
    assert all(torch.equal(grads[name], given[name]) for name in grads)


def test_an_input_without_gradient_asks_the_experts_for_none() -> None:
    """As below frozen layers: what experts compute from it must not seem to need a gradient of it."""
    routing = Router(RouterSpec(num_experts=8, top_k=2), 16)(torch.randn(6, 16))
    assert routing.weights_TK.requires_grad
    assert not routing.x_TD.requires_grad


def test_a_sink_receives_the_weight_gradient_in_its_own_precision() -> None:
    class Sink:
        def __init__(self) -> None:
            self.buffer = torch.full((4, 16), float("nan"))
            self.claims = 0

        def claim(self) -> tuple[Tensor, bool]:
            self.claims += 1
            return self.buffer, self.claims > 1

    x_TD = torch.randn(10, 16).bfloat16()
    weight = torch.nn.Parameter(torch.randn(4, 16).bfloat16())
    weight.grad_sink = sink = Sink()  # type: ignore[attr-defined]
    for _ in range(2):
        router_logits(x_TD, weight).sum().backward()
    assert weight.grad is None
    assert sink.claims == 2
    torch.testing.assert_close(sink.buffer, 2 * x_TD.float().sum(0).expand(4, 16))


def _saved_bytes(router: Router, x_TD: Tensor, context: RoutingContext) -> tuple[int, int]:
    """Bytes kept for backward beside parameters, the input and the context: of floats and of indices."""
    known = {t.untyped_storage().data_ptr() for t in (x_TD, *router.parameters(), *router.buffers())}
    given = (context.sequence_ids_T, context.token_mask_T, context.sequence_positions_T)
    known |= {t.untyped_storage().data_ptr() for t in given if t is not None}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        routing = router(x_TD, context=context)
        total = routing.weights_TK.sum() + routing.loss + routing.prob_sum_E.sum()
    kept = [t for pointer, t in seen.items() if pointer not in known]
    floats = sum(t.untyped_storage().nbytes() for t in kept if t.is_floating_point())
    indices = sum(t.untyped_storage().nbytes() for t in kept if not t.is_floating_point())
    total.backward()
    return floats, indices


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("policy", ["plain", "every term", "capacity"])
def test_the_router_keeps_one_fp32_value_a_token_and_expert(
    score: str, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    num_tokens, hidden, num_experts, top_k = 512, 256, 64, 8
    config = {
        "plain": ExpertsConfig(),
        "every term": ExpertsConfig(balance=ALL_TERMS),
        "capacity": ExpertsConfig(balance=ALL_TERMS, capacity=CapacityConfig(factor=1.0)),
    }[policy]
    spec = RouterSpec(num_experts=num_experts, top_k=top_k, score=score, norm_topk=True, scaling=2.5)  # type: ignore[arg-type]
    router = Router(spec, hidden, config).bfloat16()
    x_TD = torch.randn(num_tokens, hidden).bfloat16().requires_grad_()
    context = replace(RoutingContext.for_rows(4, num_tokens // 4), token_mask_T=torch.rand(num_tokens) < 0.9)
    floats, indices = _saved_bytes(router, x_TD, context)
    # Beside [T, E] only the terms' [S, E] counts; indices are ids (8 bytes a choice) and drop masks (1 byte).
    small = 3 * 4 * context.num_sequences * num_experts
    bound = 4 * num_tokens * num_experts
    with capsys.disabled():
        print(
            f"\n  router, {score}, {policy}: saved {floats} bytes of floats, 4·T·E = {bound} "
            f"(+ {small} of counts); {indices} of indices, 8·T·K = {8 * num_tokens * top_k} (+ T·K of masks);"
            f" an fp32 copy of the input would be {4 * num_tokens * hidden}"
        )
    assert bound <= floats <= bound + small
    assert 8 * num_tokens * top_k <= indices <= (8 + 1) * num_tokens * top_k


@pytest.mark.parametrize("score", SCORES)
def test_recomputing_changes_neither_gradients_nor_loads(score: str) -> None:
    spec = RouterSpec(num_experts=8, top_k=2, score=score, norm_topk=True)  # type: ignore[arg-type]
    router = Router(spec, 16, ExpertsConfig(balance=ALL_TERMS))
    x_TD = torch.randn(24, 16)
    context = RoutingContext.for_rows(2, 12)
    outcomes = []
    for recompute in (False, True):
        router.zero_grad()
        if recompute:
            routing = checkpoint(router, x_TD, context=context, use_reentrant=False)
        else:
            routing = router(x_TD, context=context)
        (routing.weights_TK.square().sum() + routing.loss).backward()
        assert router.weight.grad is not None
        outcomes.append((routing.load_E, router.weight.grad.clone()))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][0].sum() == 24 * 2
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_the_correction_bias_moves_the_choice_but_not_the_weights() -> None:
    spec = RouterSpec(num_experts=6, top_k=2, score="sigmoid", correction_bias=True)
    router, x_TD = Router(spec, 16), torch.randn(40, 16)
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias[3] = 10.0
    routing = router(x_TD)
    assert (routing.ids_TK == 3).any(1).all()
    scores_TE = (x_TD @ router.weight.t()).sigmoid()
    torch.testing.assert_close(routing.weights_TK, scores_TE.gather(1, routing.ids_TK))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 5), st.data())
@settings(max_examples=40, deadline=None)
def test_group_limited_choices_stay_within_the_best_groups(
    num_groups: int, topk_groups: int, group_size: int, data: st.DataObject
) -> None:
    topk_groups = min(topk_groups, num_groups)
    top_k = data.draw(st.integers(1, topk_groups * group_size))
    method = data.draw(st.sampled_from(["max", "top2_sum"]))
    spec = RouterSpec(
        num_experts=num_groups * group_size, top_k=top_k, num_groups=num_groups, topk_groups=topk_groups,
        group_score=method,
    )  # fmt: skip
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    scores_TE = torch.randn(5, spec.num_experts)
    ids_TK = select_top_k(scores_TE, spec)
    for scores_E, ids_K in zip(scores_TE.tolist(), ids_TK.tolist(), strict=True):
        groups = [sorted(scores_E[g * group_size :][:group_size], reverse=True) for g in range(num_groups)]
        worth = [group[0] if method == "max" or num_groups == 1 else sum(group[:2]) for group in groups]
        best = sorted(range(num_groups), key=lambda g: -worth[g])[:topk_groups]
        allowed = [e for g in best for e in range(g * group_size, (g + 1) * group_size)]
        assert ids_K == sorted(allowed, key=lambda e: -scores_E[e])[:top_k]


@given(st.integers(1, 65), st.integers(1, 12), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_forced_balance_is_even_and_gives_a_token_distinct_experts(
    num_experts: int, top_k: int, num_tokens: int
) -> None:
    spec = RouterSpec(num_experts=num_experts, top_k=min(top_k, num_experts))
    ids_TK = select_round_robin(num_tokens, spec, torch.device("cpu"))
    loads = ids_TK.flatten().bincount(minlength=num_experts)
    assert loads.max() - loads.min() <= (ids_TK.numel() % num_experts > 0)
    assert all(len(set(row)) == spec.top_k for row in ids_TK.tolist())
    assert torch.equal(ids_TK, select_round_robin(num_tokens, spec, torch.device("cpu")))


def test_forced_balance_keeps_the_router_learning() -> None:
    config = ExpertsConfig(selection="forced_balance")
    router = Router(RouterSpec(num_experts=8, top_k=2, norm_topk=True), 16, config)
    routing = router(torch.randn(32, 16))
    assert routing.load_E.tolist() == [8.0] * 8
    routing.weights_TK.square().sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().max() > 0


def test_forced_balance_spreads_a_tokens_experts_over_devices() -> None:
    ids_TK = select_round_robin(64, RouterSpec(num_experts=128, top_k=8), torch.device("cpu"))
    devices = [len({e // 16 for e in row}) for row in ids_TK.tolist()]  # 8 devices of 16 experts
    assert min(devices) >= 5  # 5.25 is what random choices would reach


@pytest.mark.parametrize("selection", ["top_k", "expert_choice", "forced_balance"])
def test_a_rank_without_tokens_routes_nothing(selection: str) -> None:
    balance = BalanceConfig(z_loss=0.1) if selection == "expert_choice" else ALL_TERMS
    capacity = None if selection == "expert_choice" else CapacityConfig()
    config = ExpertsConfig(selection=selection, balance=balance, capacity=capacity)  # type: ignore[arg-type]
    router = Router(RouterSpec(num_experts=8, top_k=2, norm_topk=True), 16, config)
    routing = router(torch.randn(0, 16), context=RoutingContext(num_global_tokens=10))
    assert routing.ids_TK.shape[0] == 0
    assert routing.load_E.tolist() == [0.0] * 8
    (routing.weights_TK.sum() + routing.loss).backward()
    assert router.weight.grad is not None
    assert torch.equal(router.weight.grad, torch.zeros(8, 16))


def test_padding_tokens_are_routed_but_count_nowhere() -> None:
    router = Router(RouterSpec(num_experts=8, top_k=2, norm_topk=True), 16, ExpertsConfig(balance=ALL_TERMS))
    x_TD = torch.randn(20, 16)
    mask_T = torch.arange(20) < 14
    whole = router(x_TD, context=RoutingContext(token_mask_T=mask_T))
    short = router(x_TD[:14])
    assert (whole.ids_TK >= 0).all()
    assert torch.equal(whole.load_E, short.load_E)
    torch.testing.assert_close(whole.loss, short.loss)
    torch.testing.assert_close(whole.prob_sum_E, short.prob_sum_E)


def test_the_correction_bias_stays_fp32_when_the_model_is_cast() -> None:
    router = Router(RouterSpec(num_experts=4, top_k=2, score="sigmoid", correction_bias=True), 8)
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias.fill_(1 + 2**-12)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.tolist() == [1 + 2**-12] * 4
    assert router.e_score_correction_bias.dtype == torch.float32
    assert "e_score_correction_bias" in router.state_dict()


def test_a_router_built_on_meta_is_complete_after_reset() -> None:
    spec = RouterSpec(num_experts=4, top_k=2, correction_bias=True, router_bias=True)
    with torch.device("meta"):
        router = Router(spec, 8)
    router = router.to_empty(device="cpu")
    router.reset_parameters()
    assert router.e_score_correction_bias is not None
    assert router.e_score_correction_bias.tolist() == [0.0] * 4
    assert set(router.state_dict()) == {"weight", "bias", "e_score_correction_bias"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, r"model\.num_experts_per_tok: expected 1 to num_experts = 8, got 9"),
        ({"top_k": 0}, r"model\.num_experts_per_tok: .* got 0"),
        ({"num_experts": 0}, r"model\.num_experts: expected a positive number"),
        ({"num_groups": 3}, r"model\.n_group: expected a divisor of num_experts = 8, got 3"),
        ({"num_groups": 4, "topk_groups": 5}, r"model\.topk_group: expected 1 to n_group = 4, got 5"),
        ({"num_groups": 4, "topk_groups": 1, "top_k": 3}, r"model\.topk_group: 1 of 4 groups hold 2 experts"),
        ({"num_groups": 8, "topk_groups": 4}, r"model\.n_group: groups of one expert"),
    ],
)
def test_impossible_routing_is_refused_by_name(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSpec(**({"num_experts": 8, "top_k": 2} | changes))  # type: ignore[arg-type]


def test_expert_choice_refuses_what_it_makes_needless() -> None:
    with pytest.raises(ConfigError, match=r"experts\.balance\.sequence(.|\n)*experts\.capacity:") as caught:
        ExpertsConfig(
            selection="expert_choice", balance=BalanceConfig(sequence=0.1, bias_rate=0.1, z_loss=0.1),
            capacity=CapacityConfig(),
        )  # fmt: skip
    assert len(caught.value.problems) == 3
    config = ExpertsConfig(selection="expert_choice", balance=BalanceConfig(z_loss=0.1))
    assert config.balance.has_terms  # which is kept once it was asked for
    assert replace(config, clones=2).selection == "expert_choice"


@pytest.mark.parametrize(
    "policy",
    [{"balance": BalanceConfig(device=0.1)}, {"capacity": CapacityConfig(per="device")}],
    ids=", ".join,
)
def test_experts_that_do_not_divide_over_devices_are_refused(policy: dict[str, Any]) -> None:
    router = Router(RouterSpec(num_experts=8, top_k=2), 16, ExpertsConfig(**policy))
    with pytest.raises(ConfigError, match=r"mesh\.ep: expected a divisor of the 8 experts, got 3"):
        router(torch.randn(4, 16), context=RoutingContext(num_devices=3))
