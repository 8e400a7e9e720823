"""The plan of clones: even ranks, few clones, every row placed once, whatever the loads."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.clone_plan import ClonePlan, place_choices, plan_clones
from fsdmoe.kernels.permute import group_assignments
from tests.support.clone_case import SHAPES, draw_counts, moved_rows, rows_by_rank


@pytest.mark.parametrize(("num_ranks", "num_experts", "num_slots"), SHAPES, ids=str)
def test_clones_take_what_is_above_the_mean_and_no_rank_gets_more(
    num_ranks: int, num_experts: int, num_slots: int
) -> None:
    for seed in range(40):
        counts_PE = draw_counts(num_ranks, num_experts, seed)
        plan = plan_clones(counts_PE, num_slots, least_rows=seed % 3 * 20)
        before_P = counts_PE.sum(0).view(num_ranks, -1).sum(1)
        after_P = rows_by_rank(plan, num_experts)
        mean = -(-int(before_P.sum()) // num_ranks)
        assert after_P.sum() == before_P.sum()
        assert after_P.max() <= max(int(before_P.max()), mean)
        assert (after_P[before_P > mean] >= mean).all()
        assert (after_P[before_P <= mean] <= mean).all()
        moved_EP = moved_rows(plan, num_experts)
        assert not ((moved_EP > 0) & (moved_EP <= seed % 3 * 20)).any(), "a clone that saves too little"
        _check_slots(plan, moved_EP)


def _check_slots(plan: ClonePlan, moved_EP: torch.Tensor) -> None:
    num_slots = plan.experts_PS.shape[1]
    for rank, slots in enumerate(plan.experts_PS.tolist()):
        experts = moved_EP[:, rank].nonzero().flatten().tolist()
        assert slots == experts + [len(moved_EP)] * (num_slots - len(experts))


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_an_expert_that_has_all_rows_is_cloned_to_every_rank(num_slots: int) -> None:
    counts_PE = torch.zeros(4, 8, dtype=torch.int32)
    counts_PE[:, 5] = torch.tensor([400, 0, 300, 300])
    plan = plan_clones(counts_PE, num_slots, least_rows=100)
    assert rows_by_rank(plan, 8).tolist() == [250, 250, 250, 250]
    assert plan.experts_PS[:, 0].tolist() == [5, 5, 8, 5]


def test_even_loads_need_no_clones() -> None:
    plan = plan_clones(torch.full((8, 64), 100, dtype=torch.int32), 2, least_rows=0)
    assert (plan.experts_PS == 64).all()


def test_two_slots_bring_the_busiest_rank_close_to_the_mean() -> None:
    """As ``docs/experts.md`` has it: loads as skewed as those of real routers, 8 ranks, 128 experts."""
    busiest = []
    for seed in range(50):
        random = torch.Generator().manual_seed(seed)
        shares_E = torch.randn(128, generator=random).exp()
        counts_PE = (shares_E / shares_E.sum() * 131072 / 8).int().expand(8, 128)
        after_P = rows_by_rank(plan_clones(counts_PE, 2, least_rows=128), 128).float()
        busiest.append(float(after_P.max() / after_P.mean()))
    busiest.sort()
    assert busiest[25] < 1.02
    assert busiest[-1] < 1.12


@pytest.mark.parametrize("seed", range(6))
def test_every_choice_is_placed_where_the_plan_has_it(seed: int) -> None:
    num_ranks, num_experts, num_slots = (4, 8, 2) if seed % 2 else (3, 12, 1)
    random = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(-1, num_experts if seed % 3 else 2, (0 if rank == 1 else 11, 3), generator=random)
        for rank in range(num_ranks)
    ]
    permutations = [group_assignments(each, num_experts) for each in ids]
    ends_PE = torch.stack([each.ends_G for each in permutations])
    counts_PE = torch.diff(ends_PE, dim=1, prepend=ends_PE.new_zeros(num_ranks, 1))
    plan = plan_clones(counts_PE, num_slots, least_rows=0)
    placed = [
        place_choices(ids[rank], permutations[rank], counts_PE, plan, rank) for rank in range(num_ranks)
    ]
    per_rank = num_experts // num_ranks
    found_EP = torch.zeros(num_experts, num_ranks, dtype=torch.int64)
    for mine, theirs in zip(ids, placed, strict=True):
        for expert, place in zip(mine.flatten().tolist(), theirs.flatten().tolist(), strict=True):
            assert (expert < 0) == (place < 0)
            if expert >= 0:
                rank, slot = divmod(place, per_rank + num_slots)
                is_home = slot < per_rank
                owned = rank * per_rank + slot
                assert expert == (owned if is_home else plan.experts_PS[rank, slot - per_rank])
                found_EP[expert, rank] += not is_home
    assert torch.equal(found_EP, moved_rows(plan, num_experts))
