"""A split vocabulary gives the embeddings, loss and gradients of the whole one, and logits stay where they
are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdmoe.mesh import build_meshes
from fsdmoe.models.head import CHUNK_TOKENS, linear_cross_entropy
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.vocabulary import embed
from fsdmoe.testing import run_ranks

VOCABULARY, WIDTH, TOKENS = 24, 8, CHUNK_TOKENS + 40


def problem() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, labels, torch.rand(TOKENS, generator=generator) < 0.8


def split_loss() -> tuple[torch.Tensor, ...]:
    """Loss, gradient of hidden states summed over ranks, gradient of this rank's rows, largest message."""
    tensor = TensorGroup.of(build_meshes(tp=dist.get_world_size()))
    hidden, weight, labels, mask = problem()
    hidden.requires_grad_()
    own = weight.chunk(tensor.size)[tensor.rank].clone().requires_grad_()
    largest = 0
    real = dist.all_reduce

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        largest = max(largest, x.numel())
        return real(x, *args, **kwargs)

    with (
        mock.patch.object(dist, "all_reduce", counted),
        mock.patch.object(dist, "all_gather", side_effect=AssertionError("gathered")),
    ):
        loss = linear_cross_entropy(hidden, own, labels, mask, tensor)
    loss.backward()
    assert hidden.grad is not None
    assert own.grad is not None
    dist.all_reduce(hidden.grad)
    return loss.detach(), hidden.grad, own.grad, torch.tensor(largest)


@pytest.mark.parametrize("size", [2, 3])
def test_the_loss_and_its_gradients_are_those_of_the_whole_vocabulary(size: int) -> None:
    hidden, weight, labels, mask = problem()
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = (F.cross_entropy(hidden @ weight.t(), labels, reduction="none") * mask).sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    for rank, found in enumerate(run_ranks(split_loss, size)):
        torch.testing.assert_close(found[0], loss.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1], hidden.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[2], weight.grad.chunk(size)[rank], rtol=1e-5, atol=1e-5)
        assert found[3] == 2 * CHUNK_TOKENS, "two numbers a token are all that ranks exchange"


def split_loss_with_a_label(label: int) -> str:
    tensor = TensorGroup.of(build_meshes(tp=dist.get_world_size()))
    hidden, weight, labels, mask = problem()
    labels[CHUNK_TOKENS + 3], mask[CHUNK_TOKENS + 3] = label, True
    try:
        loss = linear_cross_entropy(hidden, weight.chunk(tensor.size)[tensor.rank], labels, mask, tensor)
    except RuntimeError as error:
        return str(error)
    return f"a loss of {loss.item()}"


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_a_label_that_no_rank_holds_is_refused(label: int) -> None:
    for rank, message in enumerate(run_ranks(split_loss_with_a_label, 2, label)):
        assert f"labels: expected numbers below {VOCABULARY}, got {label} on rank {rank}" in message


def split_embedding() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensor = TensorGroup.of(build_meshes(tp=dist.get_world_size()))
    weight = problem()[1]
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    embedding.weight = torch.nn.Parameter(weight.chunk(tensor.size)[tensor.rank].clone())
    tokens = torch.arange(VOCABULARY).view(2, -1)
    out = embed(embedding, tokens, tensor)
    (out * tensor.own(torch.arange(24.0).view(2, 12, 1))).sum().backward()
    assert embedding.weight.grad is not None
    return (
        out.detach(),
        embedding.weight.grad,
        tensor.join_columns(torch.full((1, 1, 2), float(tensor.rank))),
    )


def test_embeddings_come_in_ranges_and_gradients_go_home() -> None:
    results = run_ranks(split_embedding, 2)
    whole = problem()[1].view(2, 12, WIDTH)
    assert torch.equal(torch.cat([out for out, _, _ in results], 1), whole)
    gradient = torch.cat([grad for _, grad, _ in results])
    assert torch.equal(gradient, torch.arange(24.0)[:, None].expand(24, WIDTH))
    assert results[0][2].flatten().tolist() == [0.0, 0.0, 1.0, 1.0]
