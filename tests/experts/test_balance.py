"""Balance terms in one process: their values by hand, their normalisation, what they count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.balance import count_choices, joint_balance_loss
from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.experts.router import Router, RouterSpec, RoutingContext

E, K, D = 8, 2, 16


def _router(**terms: float | str) -> Router:
    spec = RouterSpec(num_experts=E, top_k=K, norm_topk=True)
    return Router(spec, D, ExpertsConfig(balance=BalanceConfig(**terms)))  # type: ignore[arg-type]


def _by_hand(probs_TE: Tensor, ids_TK: Tensor, num_groups: int = E) -> Tensor:
    """E * sum f P, by plain loops over one scope."""
    size = E // num_groups
    total = probs_TE.new_zeros(())
    for group in range(num_groups):
        members = range(group * size, (group + 1) * size)
        fraction = sum((ids_TK == e).sum().item() for e in members) / ids_TK.numel()
        total = total + num_groups * fraction * probs_TE[:, list(members)].sum(1).mean()
    return total


@pytest.mark.parametrize("term", ["sequence", "micro_batch", "global_batch", "device"])
def test_a_term_is_the_textbook_product_over_its_scope(term: str) -> None:
    router = _router(**{term: 0.3})
    x_TD = torch.randn(30, D)
    context = replace(RoutingContext.for_rows(3, 10), num_devices=4)
    routing = router(x_TD, context=context)
    probs_TE = (x_TD @ router.weight.t()).softmax(-1)
    if term == "sequence":
        scopes = list(zip(probs_TE.split(10), routing.ids_TK.split(10), strict=True))
        expected = torch.stack([_by_hand(*scope) for scope in scopes]).mean()
    else:
        expected = _by_hand(probs_TE, routing.ids_TK, num_groups=4 if term == "device" else E)
    torch.testing.assert_close(routing.loss, 0.3 * expected)
    mine, theirs = (torch.autograd.grad(loss, router.weight)[0] for loss in (routing.loss, 0.3 * expected))
    assert theirs.abs().max() > 0
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-8)


def test_sequences_of_unequal_length_weigh_their_tokens() -> None:
    router = _router(sequence=1.0)
    x_TD = torch.randn(30, D)
    ids_T = torch.tensor([0] * 4 + [1] * 26)
    routing = router(x_TD, context=RoutingContext(sequence_ids_T=ids_T, num_sequences=2))
    probs_TE = (x_TD @ router.weight.t()).softmax(-1)
    parts = [_by_hand(probs_TE[ids_T == s], routing.ids_TK[ids_T == s]) for s in (0, 1)]
    torch.testing.assert_close(routing.loss, (4 * parts[0] + 26 * parts[1]) / 30)


def test_the_z_loss_is_the_mean_squared_log_sum_exp() -> None:
    router = _router(z_loss=0.5)
    x_TD = torch.randn(30, D)
    expected = 0.5 * (x_TD @ router.weight.t()).logsumexp(-1).square().mean()
    loss = router(x_TD).loss
    torch.testing.assert_close(loss, expected)
    mine, theirs = (torch.autograd.grad(value, router.weight)[0] for value in (loss, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("term", ["sequence", "micro_batch", "global_batch", "device"])
def test_even_routing_scores_one_and_everything_on_two_experts_four(term: str) -> None:
    router = _router(**{term: 1.0})
    even = Router(router.spec, D, replace(router.config, selection="forced_balance"))
    context = replace(RoutingContext.for_rows(2, 16), num_devices=E // K)
    with torch.no_grad():
        even.weight.zero_()
        router.weight.zero_()
        router.weight[:K] = 3.0
    torch.testing.assert_close(even(torch.randn(32, D), context=context).loss, torch.tensor(1.0))
    torch.testing.assert_close(router(torch.ones(32, D), context=context).loss, torch.tensor(E / K))


def test_prior_loads_of_the_step_move_the_global_term_only() -> None:
    x_TD = torch.randn(20, D)
    prior_LE = torch.zeros(3, E)
    prior_LE[2, 5] = 1000.0
    context = RoutingContext(layer=2, prior_load_LE=prior_LE)
    for term, moves in (("global_batch", True), ("micro_batch", False), ("sequence", False)):
        router = _router(**{term: 1.0})
        assert (router(x_TD, context=context).loss != router(x_TD).loss) == moves
    router = _router(global_batch=1.0)
    probs_TE = (x_TD @ router.weight.t()).softmax(-1)
    load_E = router(x_TD).load_E + prior_LE[2]
    expected = E * (load_E / load_E.sum() * probs_TE.mean(0)).sum()
    torch.testing.assert_close(router(x_TD, context=context).loss, expected)


def test_terms_add_up_and_scale_with_the_global_count() -> None:
    x_TD = torch.randn(20, D)
    both = _router(sequence=0.2, z_loss=0.1)
    single = [_router(sequence=0.2), _router(z_loss=0.1)]
    for router in single:
        router.load_state_dict(both.state_dict())
    whole = both(x_TD).loss
    torch.testing.assert_close(whole, sum((r(x_TD).loss for r in single), torch.zeros(())))
    for count in (40, 40.0, torch.tensor(40)):
        torch.testing.assert_close(
            both(x_TD, context=RoutingContext(num_global_tokens=count)).loss, whole / 2
        )


def test_without_terms_the_loss_is_zero_and_needs_no_gradient() -> None:
    routing = _router()(torch.randn(20, D))
    assert routing.loss.item() == 0.0
    assert not routing.loss.requires_grad
    assert routing.load_E.dtype == torch.float32
    assert not routing.load_E.requires_grad


def test_loads_count_every_choice_once() -> None:
    ids_TK = torch.tensor([[0, 1], [1, -1], [7, 1]])
    assert count_choices(ids_TK, E).tolist() == [[1, 3, 0, 0, 0, 0, 0, 1]]
    context = RoutingContext(
        sequence_ids_T=torch.tensor([0, 1, 1]),
        num_sequences=2,
        token_mask_T=torch.tensor([True, False, True]),
    )
    by_sequence = count_choices(ids_TK, E, num_sequences=2, context=context)
    assert by_sequence.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 1]]


def test_the_joint_term_is_not_the_mean_of_the_layers_terms() -> None:
    load_LE = torch.tensor([[4.0, 0.0], [0.0, 4.0]])  # each layer uneven, together even
    prob_sum_LE = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    assert joint_balance_loss(load_LE, prob_sum_LE, top_k=1).item() == 1.0
    alone = [joint_balance_loss(load_LE[i : i + 1], prob_sum_LE[i : i + 1], top_k=1).item() for i in (0, 1)]
    assert alone == [2.0, 2.0]
    assert joint_balance_loss(load_LE, prob_sum_LE, top_k=1, num_global_tokens=8).item() == 0.5


@pytest.mark.parametrize("name", ["sequence", "z_loss", "bias_rate"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_coefficient_below_zero_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"experts\.balance\.{name}: expected 0 or more"):
        BalanceConfig(**{name: value})  # type: ignore[arg-type]
