"""A wrapped vision-language model trains as one process does, whichever ranks have images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdmoe
from fsdmoe.fsdp import ShardedTensor
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.vision_case import rows_with, tiny_vision_model

pytestmark = requires_transformers

Step = list[tuple[list[list[int]], int]]
"""For each rank: its rows, each with the heights of its images; the number of videos."""
UNEVEN: list[Step] = [
    [([[1, 2], [1]], 0), ([[], []], 0), ([[3]], 0), ([[1], [], [2]], 0)],
    [([[]], 0), ([[]], 0), ([[]], 0), ([[]], 0)],
    [([[], []], 0), ([[1], [2]], 1), ([[]], 1), ([[]], 0)],
    [([[1]], 0), ([], 0), ([[]], 0), ([[2]], 0)],  # the second has no rows at all
]


def batch_of(step: int, rank: int) -> dict[str, Any]:
    images, videos = UNEVEN[step][rank]
    return rows_with(images, videos, seed=10 * step + rank)


def run_wrapped(frozen: bool, checkpointing: bool) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    model: Any = tiny_vision_model(frozen_tower=frozen)
    meshes = fsdmoe.build_meshes(ep=2)
    fsdmoe.parallelize(model, meshes)
    if checkpointing:
        model.gradient_checkpointing_enable()
    losses, gradients = [], []
    for step in range(len(UNEVEN)):
        loss = model(**batch_of(step, dist.get_rank())).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert isinstance(model.model.visual.blocks[0].mlp.linear_fc1.weight, ShardedTensor)
    return losses, gradients


def run_alone(frozen: bool, num_ranks: int) -> tuple[list[list[float]], list[dict[str, torch.Tensor]]]:
    """The rows of every rank one after the other, their losses averaged."""
    model: Any = tiny_vision_model(frozen_tower=frozen)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    gradients = []
    for step in range(len(UNEVEN)):
        for rank in range(num_ranks):
            losses[rank].append(0.0)
            if UNEVEN[step][rank][0]:
                loss = model(**batch_of(step, rank)).loss
                (loss / num_ranks).backward()
                losses[rank][-1] = loss.item()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    return losses, gradients


def check(num_ranks: int, frozen: bool, checkpointing: bool = False) -> None:
    found = run_ranks(run_wrapped, num_ranks, frozen, checkpointing)
    losses, wanted = run_alone(frozen, num_ranks)
    for rank, (got, gradients) in enumerate(found):
        assert got == pytest.approx(losses[rank], rel=1e-5)
        for step, expected in enumerate(wanted):
            assert set(expected) <= set(gradients[step])
            for name, value in gradients[step].items():  # what the root holds has one in every step
                wanted_value = expected.get(name, torch.zeros_like(value))
                torch.testing.assert_close(value, wanted_value, rtol=1e-4, atol=1e-5, msg=f"{step} {name}")
            assert any(".visual.blocks." in name for name in gradients[step]) is (step != 1 and not frozen)
    assert any(".visual." in name for name in wanted[0]) is not frozen
    assert not any(".visual." in name for name in wanted[1])


def test_ranks_without_images_take_part() -> None:
    check(2, frozen=False)


@pytest.mark.full
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_uneven_images_and_videos_on_four_ranks_are_one_process(frozen: bool, checkpointing: bool) -> None:
    check(4, frozen, checkpointing)
