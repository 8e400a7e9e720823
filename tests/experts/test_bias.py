"""Balancing by bias: one move a step, from the loads of all ranks and micro-batches, kept in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdmoe.experts.bias import update_biases
from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.experts.router import Router, RouterSpec
from fsdmoe.testing import run_ranks

CONFIG = ExpertsConfig(balance=BalanceConfig(bias_rate=0.01))
ROUNDS, TOKENS = 3, 16  # micro-batches and tokens in each


def _routers() -> list[Router]:
    torch.manual_seed(1)
    experts = [8, 4]  # layers may differ
    return [Router(RouterSpec(num_experts=e, top_k=2, score="sigmoid"), 16, CONFIG) for e in experts]


def _bias(router: Router) -> torch.Tensor:
    assert router.e_score_correction_bias is not None
    return router.e_score_correction_bias


def test_experts_below_the_mean_rise_and_those_above_fall() -> None:
    router = _routers()[1]
    update_biases([(router, torch.tensor([5.0, 1.0, 3.0, 3.0]))], rate=0.01)
    torch.testing.assert_close(_bias(router), torch.tensor([-0.01, 0.01, 0.0, 0.0]))
    update_biases([(router, torch.tensor([0.0, 0.0, 0.0, 8.0]))], rate=0.01)
    torch.testing.assert_close(_bias(router), torch.tensor([0.0, 0.02, 0.01, -0.01]))


def test_a_step_without_tokens_moves_nothing() -> None:
    router = _routers()[1]
    update_biases([(router, torch.zeros(4))], rate=0.01)
    assert _bias(router).tolist() == [0.0] * 4
    update_biases([], rate=0.01)


def _train(
    world_size: int, rank: int, steps: int, skipped: int = -1, recompute: bool = False
) -> list[list[float]]:
    """Route steps of 4 shares, of which a rank takes its own; move biases after each that is not skipped."""
    routers = _routers()
    generator = torch.Generator().manual_seed(7)
    batches = torch.randn(steps, ROUNDS, 4, TOKENS, 16, generator=generator) + 0.3
    for step in range(steps):
        loads = [torch.zeros(router.spec.num_experts) for router in routers]
        for micro_batch in range(ROUNDS):
            for share in range(rank, 4, world_size):
                x_TD = batches[step, micro_batch, share]
                for router, load_E in zip(routers, loads, strict=True):
                    if recompute:
                        routing = checkpoint(router, x_TD, use_reentrant=False)
                        routing.weights_TK.sum().backward()
                    else:
                        routing = router(x_TD)
                    load_E += routing.load_E
        with torch.no_grad():  # an evaluation in between leaves no trace
            routers[0](torch.randn(5, 16))
        if step != skipped:
            group = dist.group.WORLD if world_size > 1 else None
            update_biases(zip(routers, loads, strict=True), rate=0.01, group=group)
    return [_bias(router).tolist() for router in routers]


def _train_on_rank(steps: int) -> list[list[float]]:
    return _train(dist.get_world_size(), dist.get_rank(), steps)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_hold_the_biases_of_one_process_bit_for_bit(world_size: int) -> None:
    expected = _train(1, 0, steps=4)
    assert max(map(abs, expected[0])) > 0.01
    assert run_ranks(_train_on_rank, world_size, 4) == [expected] * world_size


def test_recompute_counts_no_token_twice() -> None:
    assert _train(1, 0, steps=3, recompute=True) == _train(1, 0, steps=3)


def test_a_skipped_step_leaves_the_biases_alone() -> None:
    before, after = _train(1, 0, steps=2), _train(1, 0, steps=3, skipped=2)
    assert before == after
    assert _train(1, 0, steps=3) != after


def test_small_moves_are_not_lost_in_a_model_cast_to_bf16() -> None:
    router = _routers()[1].to(torch.bfloat16)
    for _ in range(1000):
        update_biases([(router, torch.tensor([1.0, 0.0, 0.0, 0.0]))], rate=1e-3)
    torch.testing.assert_close(_bias(router), torch.tensor([-1.0, 1.0, 1.0, 1.0]), rtol=1e-4, atol=0)


def test_biases_travel_in_the_state_dict() -> None:
    source, target = _routers()[0], _routers()[0]
    _bias(source).copy_(torch.randn(8))
    target.load_state_dict(source.state_dict())
    assert torch.equal(_bias(target), _bias(source))
