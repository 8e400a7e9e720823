"""Embedding and cross-entropy over a vocabulary whose rows are split over ranks. Logits are never gathered:
a token's maximum, its sum of exponentials and its label's logit are all that the ranks exchange."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.core.labels import check_labels, expect_labels
from fsdmoe.tensor_parallel.group import TensorGroup


def embed(embedding: nn.Embedding, tokens_BS: Tensor, tensor: TensorGroup) -> Tensor:
    """Embeddings of this rank's range of the rows, ``[B, S/tp, D]``; each rank looks its own tokens up."""
    if tensor.size == 1:
        return embedding(tokens_BS)
    rows, inside = own_rows(tokens_BS, embedding.num_embeddings // tensor.size, tensor)
    return tensor.scatter(embedding(rows).masked_fill(~inside[..., None], 0.0))


def split_cross_entropy_(
    logits_CV: Tensor,
    labels_C: Tensor,
    mask_C: Tensor,
    tensor: TensorGroup,
    divisor: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk's unmasked tokens, alike on every rank, and the gradient of that sum over
    ``divisor`` with respect to this rank's fp32 logits, in their place. Labels have been checked: one that no
    rank holds would count as a logit of 0."""
    columns_C, inside_C = own_rows(labels_C, logits_CV.shape[1], tensor)
    picked_C = logits_CV.gather(1, columns_C[:, None]).squeeze(1).masked_fill(~inside_C, 0.0)
    top_C = tensor.all_reduce(logits_CV.amax(1), dist.ReduceOp.MAX)
    grad_CV = logits_CV.sub_(top_C[:, None]).exp_()
    sums_C, picked_C = tensor.all_reduce(torch.stack((grad_CV.sum(1), picked_C)))
    loss = torch.where(mask_C, top_C + sums_C.log() - picked_C, 0.0).sum()
    grad_CV.div_(sums_C[:, None])
    grad_CV.scatter_add_(1, columns_C[:, None], -inside_C[:, None].to(grad_CV.dtype))
    return loss, grad_CV.mul_(mask_C[:, None] / divisor)


def split_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, tensor: TensorGroup, *, row_length: int = 0
) -> Tensor:
    """Summed loss of the unmasked tokens from this rank's logits of all of them; alike on every rank."""
    vocabulary = logits_TV.shape[1] * tensor.size
    expect_labels(vocabulary, row_length)
    labels_T, mask_T, outside = check_labels(labels_T, mask_T, vocabulary)
    return _SplitCrossEntropy.apply(logits_TV, labels_T, mask_T, tensor) + outside


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, tensor: TensorGroup) -> Tensor:
        copied_TV = logits_TV.to(torch.float32, copy=True)  # its gradient takes its place
        loss, grad_TV = split_cross_entropy_(copied_TV, labels_T, mask_T, tensor)
        ctx.save_for_backward(grad_TV)
        ctx.dtype = logits_TV.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TV,) = ctx.saved_tensors
        return (grad_TV * grad).to(ctx.dtype), None, None, None


def own_rows(ids: Tensor, num_rows: int, tensor: TensorGroup) -> tuple[Tensor, Tensor]:
    """Ids as rows of this rank's slice (0 where they are not in it), and whether they are."""
    rows = ids - tensor.rank * num_rows
    inside = (rows >= 0) & (rows < num_rows)
    return rows.where(inside, 0), inside
