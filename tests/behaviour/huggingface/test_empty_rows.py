"""A rank without rows takes part in a step, and contributes nothing to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdmoe
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.testing import RankFailure, requires_transformers, run_ranks
from tests.support.hf_tiny import FAMILIES, batch, tiny_hf

pytestmark = requires_transformers

ROWS = [[2, 0, 1, 0], [0, 3, 0, 0], [1, 1, 2, 1]]
"""For each step, how many rows each rank has."""


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return batch(step, rank, rows=3)[: ROWS[step][rank]]


def run_wrapped(family: str, dispatcher: str, checkpointing: bool) -> list[dict[str, torch.Tensor]]:
    model: Any = tiny_hf(family)
    policy = fsdmoe.ParallelPolicy(
        experts=ExpertsConfig(dispatcher=dispatcher),  # type: ignore[arg-type]
        precision=fsdmoe.PrecisionConfig(param_dtype="float32"),
    )
    fsdmoe.parallelize(model, fsdmoe.build_meshes(ep=2), policy)
    if checkpointing:
        model.gradient_checkpointing_enable()
    gradients = []
    for step in range(len(ROWS)):
        tokens = tokens_of(step, dist.get_rank())
        loss = model(tokens, labels=tokens).loss
        assert (loss.item() == 0) == (not len(tokens))
        loss.backward()
        found = ((name, p.grad) for name, p in model.named_parameters())
        gradients.append({name: grad.full_tensor() for name, grad in found if grad is not None})
        model.zero_grad()
    return gradients


def check(num_ranks: int, family: str, dispatcher: str, checkpointing: bool = False) -> None:
    found = run_ranks(run_wrapped, num_ranks, family, dispatcher, checkpointing)[-1]
    model = tiny_hf(family)
    for step, gradients in enumerate(found):
        for rank in range(num_ranks):
            tokens = tokens_of(step, rank)
            if len(tokens):
                (model(tokens, labels=tokens).loss / num_ranks).backward()
        for name, parameter in model.named_parameters():
            wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            torch.testing.assert_close(gradients[name], wanted, rtol=1e-4, atol=1e-5, msg=f"{step} {name}")
        model.zero_grad()


def test_a_rank_without_rows_contributes_zero() -> None:
    check(2, "qwen3_moe", "all_to_all")


@pytest.mark.full
@pytest.mark.parametrize("dispatcher", ["all_to_all", "allgather", "flex"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_without_rows_contribute_zero_in_every_family(family: str, dispatcher: str) -> None:
    check(4, family, dispatcher)


@pytest.mark.full
def test_ranks_without_rows_contribute_zero_when_layers_run_again() -> None:
    check(4, "qwen3_moe", "all_to_all", checkpointing=True)


def run_joined(num_batches: list[int]) -> tuple[int, dict[str, torch.Tensor]]:
    model: Any = tiny_hf("qwen3_moe")
    meshes = fsdmoe.build_meshes(ep=2)
    fsdmoe.parallelize(model, meshes)
    rank, num_steps = dist.get_rank(), 0
    mine = [{"tokens": batch(step, rank), "step": step} for step in range(num_batches[rank])]
    for given in fsdmoe.join_batches(mine, meshes):
        with fsdmoe.engine_of(model).micro_batch(last=num_steps == max(num_batches) - 1):
            model(given["tokens"], labels=given["tokens"]).loss.backward()
        num_steps += 1
    return num_steps, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_ranks_that_run_out_of_batches_take_part_until_all_are_done() -> None:
    num_batches = [1, 3]
    (steps, got), (same, _) = run_ranks(run_joined, 2, num_batches)
    assert (steps, same) == (3, 3)
    model = tiny_hf("qwen3_moe")
    for rank, count in enumerate(num_batches):
        for step in range(count):
            tokens = batch(step, rank)
            (model(tokens, labels=tokens).loss / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_rank_without_a_single_batch_ends_all_ranks_with_the_reason() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(run_joined, 2, [2, 0])
    assert str(caught.value).count("got none on rank 1") == 2
