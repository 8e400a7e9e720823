"""Plans of steps: every document once, memory kept, the same micro-batches everywhere, balanced, fast."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.context_parallel.cost import CostModel
from fsdmoe.context_parallel.planner import group_sizes, plan_step, small_large_small
from fsdmoe.context_parallel.split import split_documents
from fsdmoe.context_parallel.step_plan import StepPlan, imbalance
from fsdmoe.core.errors import ConfigError
from tests.support.attention_work import padding, plan_in_order, work_R

COST = CostModel()


def long_tailed(seed: int, num_tokens: int, longest: int) -> list[int]:
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(np.clip(np.exp(rng.normal(np.log(1000), 1.3)), 32, longest)))
    return lengths


def check_plan(plan: StepPlan, lengths: list[int], max_tokens: int, sizes: tuple[int, ...]) -> None:
    documents = [d for slot in plan.slots for mb in slot for d in mb.documents]
    assert sorted(documents) == list(range(len(lengths)))
    for slot in plan.slots:
        covered = [rank for mb in slot for rank in range(mb.first_rank, mb.first_rank + mb.size)]
        assert sorted(covered) == list(range(plan.num_ranks))
        for mb in slot:
            assert mb.size in sizes
            assert mb.first_rank % mb.size == 0
            assert split_documents([plan.lengths_of(mb)], mb.size).local_len <= max_tokens
    assert {len(plan.of_rank(rank)) for rank in range(plan.num_ranks)} == {len(plan.slots)}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 800), min_size=1, max_size=60),
    st.sampled_from([1, 2, 4, 8, 12]),
    st.integers(200, 900),
    st.booleans(),
)
def test_every_document_is_planned_once_within_memory_on_all_ranks(
    lengths, num_ranks, max_tokens, is_static
) -> None:
    sizes = group_sizes(num_ranks)[-1:] if is_static else group_sizes(num_ranks)
    if max(lengths) > sizes[-1] * max_tokens:
        with pytest.raises(ConfigError, match=r"context_parallel\.max_tokens: a document of"):
            plan_step(lengths, num_ranks=num_ranks, sizes=sizes, max_tokens=max_tokens, cost=COST)
        return
    plan = plan_step(lengths, num_ranks=num_ranks, sizes=sizes, max_tokens=max_tokens, cost=COST)
    check_plan(plan, lengths, max_tokens, sizes)
    in_order = plan_in_order(lengths, num_ranks=num_ranks, size=sizes[-1], max_tokens=max_tokens)
    check_plan(in_order, lengths, max_tokens, sizes)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_tailed_batch_is_balanced_and_faster_than_one_size_for_all(seed: int) -> None:
    num_ranks, max_tokens, longest = 32, 8192, 131072
    lengths = long_tailed(seed, 4 * num_ranks * max_tokens, longest)
    static_size = longest // max_tokens
    dynamic = plan_step(
        lengths, num_ranks=num_ranks, sizes=group_sizes(num_ranks), max_tokens=max_tokens, cost=COST
    )
    static = plan_step(lengths, num_ranks=num_ranks, sizes=(static_size,), max_tokens=max_tokens, cost=COST)
    in_order = plan_in_order(lengths, num_ranks=num_ranks, size=static_size, max_tokens=max_tokens)
    assert imbalance(dynamic.work_of_ranks()) < 0.05
    assert padding(dynamic) < 0.01
    assert static.seconds(COST) / dynamic.seconds(COST) > 1.3
    assert in_order.seconds(COST) >= static.seconds(COST)


def test_work_of_ranks_is_that_of_the_real_split() -> None:
    lengths = long_tailed(0, 60_000, 16_384)
    plan = plan_step(lengths, num_ranks=4, sizes=(1, 2, 4), max_tokens=4096, cost=COST)
    real = np.zeros(4)
    for mb in (mb for slot in plan.slots for mb in slot if mb.documents):
        real[mb.ranks] += work_R(split_documents([plan.lengths_of(mb)], mb.size)).numpy()
    assert np.allclose(real, plan.work_of_ranks(), rtol=0.01)
    assert imbalance(real) < 0.05


def test_a_document_is_split_no_more_than_it_must_unless_that_saves_time() -> None:
    short = plan_step([500] * 64, num_ranks=8, sizes=(1, 2, 4, 8), max_tokens=8192, cost=COST)
    assert {mb.size for slot in short.slots for mb in slot} == {1}
    # One giant among few: memory would do with 2 ranks, but 6 others would wait for them.
    giant = plan_step([16_384, *[256] * 6], num_ranks=8, sizes=(1, 2, 4, 8), max_tokens=8192, cost=COST)
    assert next(mb.size for slot in giant.slots for mb in slot if 0 in mb.documents) > 2


def test_plans_do_not_depend_on_anything_but_the_lengths() -> None:
    lengths = long_tailed(1, 200_000, 16_384)
    plans = [
        plan_step(lengths, num_ranks=8, sizes=(1, 2, 4, 8), max_tokens=8192, cost=COST) for _ in range(2)
    ]
    assert plans[0] == plans[1]


def test_micro_batches_run_small_large_small() -> None:
    costs = [5.0, 1.0, 4.0, 2.0, 3.0]
    ordered = [costs[i] for i in small_large_small(costs)]
    assert ordered == [1.0, 3.0, 5.0, 4.0, 2.0]
    lengths = long_tailed(2, 300_000, 32_768)
    plan = plan_step(lengths, num_ranks=8, sizes=(1, 2, 4, 8), max_tokens=8192, cost=COST)
    seconds = [StepPlan((slot,), plan.lengths, 8).seconds(COST) for slot in plan.slots]
    top = seconds.index(max(seconds))
    assert seconds[: top + 1] == sorted(seconds[: top + 1])
    assert seconds[top:] == sorted(seconds[top:], reverse=True)


def test_sizes_are_the_powers_of_two_that_divide_the_ranks() -> None:
    assert group_sizes(64) == (1, 2, 4, 8, 16, 32, 64)
    assert group_sizes(12) == (1, 2, 4)
    assert group_sizes(3) == (1,)


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (), (0,)])
def test_sizes_that_do_not_tile_the_ranks_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.cp: .* choose from 1, 2, 4, 8"):
        plan_step([5], num_ranks=8, sizes=sizes, max_tokens=10, cost=COST)


def test_empty_documents_are_refused() -> None:
    with pytest.raises(ConfigError, match="drop empty documents"):
        plan_step([5, 0], num_ranks=1, sizes=(1,), max_tokens=10, cost=COST)
