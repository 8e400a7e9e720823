"""A planned step, with another group size in every micro-batch, gives the gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.cost import CostModel
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.planner import group_sizes, plan_step
from fsdmoe.context_parallel.split import PADDING, split_documents
from fsdmoe.testing import run_ranks
from tests.support.attention_reference import dense_attention, relative_error

LENGTHS = [90, 40, 33, 17, 9, 8, 5, 3, 3, 2, 1, 1, 25, 30, 12, 60]
WIDTH, HEADS = 16, 4
# Attention dear, all else cheap: sizes vary even among tiny documents.
COST = CostModel(per_call=0.0, per_pair=1e-6, per_token=0.0, rest_per_token=1e-7, fixed=1e-6)


def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 4) for _ in range(3)]


def document(number: int) -> Tensor:
    return torch.randn(LENGTHS[number], WIDTH, generator=torch.Generator().manual_seed(100 + number))


def heads(x_BLD: Tensor, weight: Tensor) -> Tensor:
    return (x_BLD @ weight).unflatten(-1, (HEADS, -1))


def loss_sum(out_BLHE: Tensor) -> Tensor:
    return (out_BLHE.square() + out_BLHE).sum()


def one_process() -> list[Tensor]:
    """Mean over all tokens, documents one at a time."""
    parameters = weights()
    for number in range(len(LENGTHS)):
        x = document(number)[None].double()
        q, k, v = (heads(x, w.double()) for w in parameters)
        ids = torch.zeros(1, LENGTHS[number], dtype=torch.int64)
        (loss_sum(dense_attention(q, k, v, ids, 0.5)) / sum(LENGTHS)).backward()
    return [w.grad for w in parameters if w.grad is not None]


def groups_of_every_size() -> dict[int, dist.ProcessGroup | None]:
    groups: dict[int, dist.ProcessGroup | None] = {1: None}
    for size in group_sizes(dist.get_world_size())[1:]:
        first = dist.get_rank() // size * size
        groups[size] = dist.new_group(list(range(first, first + size)), use_local_synchronization=True)
    return groups


def planned_step(mode: str) -> tuple[list[float], list[int]]:
    """Relative errors of the gradients, and the sizes that this rank ran with."""
    groups = groups_of_every_size()
    plan = plan_step(LENGTHS, num_ranks=dist.get_world_size(), sizes=tuple(groups), max_tokens=32, cost=COST)
    parameters = weights()
    for mb in plan.of_rank(dist.get_rank()):
        group = groups[mb.size]
        split = split_documents([plan.lengths_of(mb)], mb.size)
        rank = 0 if group is None else dist.get_rank(group)
        row = torch.cat([document(d) for d in mb.documents] or [torch.zeros(0, WIDTH)])
        x = split.shard(torch.cat((row, torch.zeros(1, WIDTH)))[None], rank)
        q, k, v = (heads(x, w) for w in parameters)
        out = ContextAttention(mode).attend(q, k, v, AttentionPlan(split, group), 0.5)
        real = (split.index_RBL[rank] != PADDING)[..., None, None]
        # A sum over this rank's tokens over the count of the whole step: then gradients only add up.
        (loss_sum(out * real) / sum(LENGTHS)).backward()
    for w in parameters:
        dist.all_reduce(w.grad)
    errors = [relative_error(w.grad, g) for w, g in zip(parameters, one_process(), strict=True)]
    return errors, [mb.size for mb in plan.of_rank(dist.get_rank())]


@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
def test_sizes_that_change_with_every_micro_batch_give_the_gradients_of_one_process(mode: str) -> None:
    results = run_ranks(planned_step, 4, mode)
    assert len({len(sizes) for _, sizes in results}) == 1
    assert {size for _, sizes in results for size in sizes} == {1, 2, 4}
    for errors, _ in results:
        assert max(errors) < 1e-5
