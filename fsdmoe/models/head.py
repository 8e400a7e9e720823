"""Final projection and loss as one module, so that the head's weight is read only inside its own forward.

The loss never holds the logits of all tokens: they are made chunk by chunk, replaced by their gradient in
place, and used up. With T tokens, D hidden and V vocabulary, memory is ``C*V`` for a chunk of C tokens
instead of ``T*V``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.core.labels import check_labels, expect_labels, note_for_kernels
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.grad_sink import GradSink, Staged, sink_of
from fsdmoe.kernels.linear import add_product_
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.split import TensorPlan
from fsdmoe.tensor_parallel.vocabulary import split_cross_entropy_

CHUNK_TOKENS = 2048
LEAN_CHUNK_TOKENS = 1024  # where memory is short: half the logits, about a percent of the step


class LossRows(NamedTuple):
    """What one loss is taken of: tokens' hidden states, their labels, which of them count, and what the sum
    of their losses is divided by."""

    hidden: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    divisor: torch.Tensor | float = 1.0


class TokenObjective(ABC):
    """A loss that is no mean of tokens' losses, but computed from all of them. It takes a divisor's place."""

    @abstractmethod
    def loss_of(self, losses_T: torch.Tensor) -> torch.Tensor:
        """A scalar, of the losses of a micro-batch's tokens, 0 where they are masked."""


class HeadProducts(Protocol):
    """Products of a chunk with the head's weight."""

    def logits(self, hidden_CD: torch.Tensor) -> torch.Tensor: ...

    def hidden_grad(self, grad_logits_CV: torch.Tensor, out_CD: torch.Tensor) -> None: ...


ProductsOf = Callable[[torch.Tensor], HeadProducts]
"""Of a weight, for one forward. In fp8: :mod:`fsdmoe.kernels.head_products`."""


class PlainProducts(NamedTuple):
    """In the precision of the weight."""

    weight_VD: torch.Tensor

    def logits(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        return hidden_CD @ self.weight_VD.t()

    def hidden_grad(self, grad_logits_CV: torch.Tensor, out_CD: torch.Tensor) -> None:
        torch.mm(grad_logits_CV, self.weight_VD, out=out_CD)


class LMHead(nn.Module):
    """``lm_head``: logits of hidden states, or the sum of their cross-entropies against labels."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.tensor = TensorGroup()
        self.is_lean = False
        """Smaller chunks."""
        self.products_of: ProductsOf = PlainProducts
        """How the loss multiplies with the weight."""

    def tensor_plan(self) -> TensorPlan:
        return {"weight": 0}

    def forward(
        self,
        hidden_BsD: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        loss_mask_BS: torch.Tensor | None = None,
        divisor: torch.Tensor | float = 1.0,
        further: Sequence[LossRows] = (),
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Logits ``[B, S, V]`` without labels; with them the fp32 sum of the losses of unmasked tokens, over
        ``divisor``: dividing here spares backward a pass over the weight's gradient. With ``further`` rows:
        what :func:`linear_cross_entropies` says of all of them.

        Under tensor parallelism ``hidden`` is this rank's range of the rows, all else is of whole rows and
        alike on its ranks."""
        if labels_BS is None:
            return self.tensor.join_columns(nn.functional.linear(self._whole(hidden_BsD), self.weight))
        if loss_mask_BS is None:
            loss_mask_BS = torch.ones_like(labels_BS, dtype=torch.bool)
        rows = [LossRows(hidden_BsD, labels_BS, loss_mask_BS, divisor), *further]
        total, losses = linear_cross_entropies(
            [self._flat(each) for each in rows], self.weight, self.tensor,
            chunk_tokens=LEAN_CHUNK_TOKENS if self.is_lean else None, row_length=labels_BS.shape[-1],
            products_of=self.products_of,
        )  # fmt: skip
        return (total, losses) if further else total

    def _flat(self, rows: LossRows) -> LossRows:
        hidden_TD = self._whole(rows.hidden).flatten(0, 1)
        return LossRows(hidden_TD, rows.labels.flatten(), rows.mask.flatten(), rows.divisor)

    def _whole(self, hidden_BsD: torch.Tensor) -> torch.Tensor:
        return hidden_BsD if self.tensor.size == 1 else self.tensor.gather(hidden_BsD)


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    mask_T: torch.Tensor,
    tensor: TensorGroup | None = None,
    *,
    divisor: torch.Tensor | float = 1.0,
    chunk_tokens: int | None = None,
    row_length: int = 0,
) -> torch.Tensor:
    """``sum(mask * cross_entropy(hidden @ weight.T, labels)) / divisor`` in fp32, chunked over tokens."""
    rows = [LossRows(hidden_TD, labels_T, mask_T, divisor)]
    total, _ = linear_cross_entropies(
        rows, weight_VD, tensor, chunk_tokens=chunk_tokens, row_length=row_length
    )
    return total


def linear_cross_entropies(
    rows: Sequence[LossRows],
    weight_VD: torch.Tensor,
    tensor: TensorGroup | None = None,
    *,
    chunk_tokens: int | None = None,
    row_length: int = 0,
    products_of: ProductsOf = PlainProducts,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of the losses of all ``rows``, and each of them without a gradient (None where there is one).
    All share one gradient of the weight, which is as large as the weight in fp32.

    With a group, ``weight`` is this rank's slice of the vocabulary, and the gradient of ``hidden`` is this
    rank's part of the sum. Labels outside of the vocabulary: see :mod:`fsdmoe.core.labels`; ``row_length``
    tells where in its rows such a token stands."""
    expect_labels(weight_VD.shape[0] * (1 if tensor is None else tensor.size), row_length)
    divisors = [_as_scalar(each.divisor, each.hidden) for each in rows]
    outside = divisors[0]
    if weight_VD.dtype == torch.float16:
        # Gradients of a mean vanish before the scale that a loss is given against that can reach them.
        divisors = [divisor / outside for divisor in divisors]
    hiddens = [each.hidden for each in rows]
    if not torch.is_grad_enabled():  # which the function itself is not told
        hiddens = [hidden.detach() for hidden in hiddens]
        weight_VD = weight_VD.detach()
    if any(each.mask.dtype != torch.bool for each in rows):  # kernels would count what is not below 1
        raise TypeError(
            f"loss_mask: expected bool, got {rows[0].mask.dtype}; compare it with 0 (weights of tokens are "
            "not supported)"
        )
    targets = [
        _Targets(each.labels, each.mask, divisor) for each, divisor in zip(rows, divisors, strict=True)
    ]
    total, losses = _LinearCrossEntropy.apply(
        weight_VD, targets, tensor or TensorGroup(), chunk_tokens or CHUNK_TOKENS, products_of, *hiddens
    )
    if weight_VD.dtype != torch.float16:
        return total, losses
    return total / outside, None if losses is None else losses / outside


def linear_token_losses(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    row_length: int = 0,
) -> torch.Tensor:
    """``mask * cross_entropy(hidden @ weight.T, labels)`` of each token in fp32, chunked over tokens, for a
    frozen weight. What each token counts is not known before backward, which makes logits again."""
    if weight_VD.requires_grad:
        raise AssertionError(
            "linear_token_losses: expected a frozen head, whose gradient it does not compute"
        )
    expect_labels(weight_VD.shape[0], row_length)
    return _TokenLosses.apply(hidden_TD, weight_VD, labels_T, mask_T, chunk_tokens or CHUNK_TOKENS)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_T: torch.Tensor,
        mask_T: torch.Tensor,
        chunk_tokens: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, mask_T)
        ctx.chunk_tokens = chunk_tokens
        head = _Head(weight_VD, PlainProducts(weight_VD), None, TensorGroup(), chunk_tokens)
        targets = _Targets(labels_T, mask_T, _as_scalar(1.0, hidden_TD))
        return torch.cat([losses_C for _, losses_C, _ in head.chunks_of(hidden_TD, targets, with_grad=False)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, labels_T, mask_T = ctx.saved_tensors
        head = _Head(weight_VD, PlainProducts(weight_VD), None, TensorGroup(), ctx.chunk_tokens)
        targets = _Targets(labels_T, mask_T, _as_scalar(1.0, hidden_TD))
        grad_TD = torch.empty_like(hidden_TD)
        for rows, _, grad_logits_CV in head.chunks_of(hidden_TD, targets, with_grad=True):
            torch.mm(grad_logits_CV, weight_VD, out=grad_TD[rows])
        return grad_TD.mul_(grad_T[:, None]), None, None, None, None


def _as_scalar(divisor: torch.Tensor | float, hidden_TD: torch.Tensor) -> torch.Tensor:
    if isinstance(divisor, torch.Tensor):
        return divisor.to(hidden_TD.device, torch.float32)
    return hidden_TD.new_full((), divisor, dtype=torch.float32)


class _Targets(NamedTuple):
    labels_T: torch.Tensor
    mask_T: torch.Tensor
    divisor: torch.Tensor


class _LinearCrossEntropy(torch.autograd.Function):
    """Both gradients are made in forward, while a chunk's logits are at hand: three GEMMs instead of four.

    Backward scales them by the incoming scalar, which is one where the loss is what backward starts from.
    The weight's is made in its sink where that can be: it is as large as the weight in fp32, and would be
    held in addition to the sink's buffer while activations are at their peak.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight_VD: torch.Tensor,
        targets: Sequence[_Targets],
        tensor: TensorGroup,
        chunk_tokens: int,
        products_of: ProductsOf,
        *hiddens_TD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        needs_weight, _, _, _, _, *needs_hidden = ctx.needs_input_grad
        sink = sink_of(weight_VD) if needs_weight else None
        ctx.staged = None if sink is None else sink.stage()
        grad_weight_VD = None
        if ctx.staged is not None:
            grad_weight_VD = ctx.staged.tensor
        elif needs_weight:
            grad_weight_VD = torch.empty_like(weight_VD, dtype=torch.float32)
        head = _Head(weight_VD, products_of(weight_VD), grad_weight_VD, tensor, chunk_tokens)
        losses = []
        grads_TD = []
        for hidden_TD, each, is_needed in zip(hiddens_TD, targets, needs_hidden, strict=True):
            grad_TD = torch.empty_like(hidden_TD) if is_needed else None
            losses.append(head.loss_of(hidden_TD, each, grad_TD))
            grads_TD.append(grad_TD)
        if grad_weight_VD is not None and not head.is_begun:
            grad_weight_VD.zero_()
        ctx.grads = (grads_TD, None if ctx.staged is not None else grad_weight_VD)
        ctx.weight = weight_VD
        ctx.sink = sink
        if len(losses) == 1:
            return losses[0], None
        losses_P = torch.stack(losses)
        ctx.mark_non_differentiable(losses_P)
        return losses_P.sum(), losses_P

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_total: torch.Tensor, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "linear_cross_entropy: backward ran twice; its gradients are released after the first, "
                "unless it is called with retain_graph=True"
            )
        (grads_TD, grad_weight_VD), weight_VD, staged = ctx.grads, ctx.weight, ctx.staged
        if torch._C._autograd._get_current_graph_task_keep_graph():  # both serve another backward
            grads_TD = [None if grad_TD is None else grad_TD.clone() for grad_TD in grads_TD]
            if staged is not None:
                staged.move_out()
            elif grad_weight_VD is not None:
                grad_weight_VD = grad_weight_VD.clone()
        else:
            ctx.grads = ctx.weight = ctx.staged = None
        for grad_TD in grads_TD:
            if grad_TD is not None:
                scale_(grad_TD, grad_total)
        if ctx.sink is not None:
            _give(ctx.sink, staged, grad_weight_VD, grad_total)
            grad_weight_VD = None
        elif grad_weight_VD is not None:
            grad_weight_VD = scale_(grad_weight_VD, grad_total).to(weight_VD.dtype)
        return grad_weight_VD, None, None, None, None, *grads_TD


@dataclass
class _Head:
    """A weight whose gradient is summed up chunk by chunk."""

    weight_VD: torch.Tensor
    products: HeadProducts
    grad_VD: torch.Tensor | None
    tensor: TensorGroup
    chunk_tokens: int
    is_begun: bool = False
    """Whether something was written to the gradient: the first chunk overwrites what is there."""

    def loss_of(
        self, hidden_TD: torch.Tensor, targets: _Targets, grad_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """The loss of these tokens. Their gradient is written to ``grad_TD``, the weight's is added."""
        with_grad = grad_TD is not None or self.grad_VD is not None
        total = hidden_TD.new_zeros((), dtype=torch.float32)
        for rows, losses_C, grad_logits_CV in self.chunks_of(hidden_TD, targets, with_grad=with_grad):
            total += losses_C.sum()
            if grad_TD is not None:
                self.products.hidden_grad(grad_logits_CV, grad_TD[rows])
            if self.grad_VD is not None:
                add_product_(self.grad_VD, grad_logits_CV.t(), hidden_TD[rows], accumulate=self.is_begun)
                self.is_begun = True
            del grad_logits_CV  # before the next chunk's logits are made
        return total / targets.divisor

    def chunks_of(
        self, hidden_TD: torch.Tensor, targets: _Targets, *, with_grad: bool
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Each chunk's rows, and what :meth:`_chunk` says of them."""
        labels_T, mask_T, divisor = targets
        fused = triton_for(hidden_TD) if self.tensor.size == 1 else None
        outside: torch.Tensor | float = 0.0
        if fused is None:  # the kernel looks at its labels itself
            vocabulary = self.weight_VD.shape[0] * self.tensor.size
            labels_T, mask_T, outside = check_labels(labels_T, mask_T, vocabulary)
        for start in range(0, hidden_TD.shape[0], self.chunk_tokens):
            rows = slice(start, start + self.chunk_tokens)
            chunk = _Targets(labels_T[rows], mask_T[rows], divisor)
            losses_C, logits_CV = self._chunk(hidden_TD[rows], chunk, fused, start, with_grad=with_grad)
            yield rows, losses_C if isinstance(outside, float) else losses_C + outside, logits_CV
            del logits_CV

    def _chunk(
        self, hidden_CD: torch.Tensor, targets: _Targets, fused: Any, first: int, *, with_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of a chunk's tokens (their sum, where ranks share the vocabulary), and the gradient of their
        sum over the divisor with respect to its logits, in the weight's dtype. ``fused``: the kernels, which
        need no fp32 copy of the logits; ``first``: the chunk's first token, for what they note."""
        labels_C, mask_C, divisor = targets
        logits_CV = self.products.logits(hidden_CD)
        if fused is not None:
            note = note_for_kernels(logits_CV.device)
            losses_C = fused.cross_entropy_(logits_CV, *targets, with_grad=with_grad, note=note, first=first)
            return losses_C, logits_CV
        logits_CV = logits_CV.float()
        if self.tensor.size > 1:  # this rank holds a slice of the vocabulary
            loss, grad_CV = split_cross_entropy_(logits_CV, labels_C, mask_C, self.tensor, divisor)
            return loss, grad_CV.to(self.weight_VD.dtype)
        lse_C = torch.logsumexp(logits_CV, dim=-1)
        picked_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
        losses_C = torch.where(mask_C, lse_C - picked_C, 0.0)
        if not with_grad:
            return losses_C, logits_CV
        grad_CV = logits_CV.sub_(lse_C[:, None]).exp_()
        grad_CV.scatter_add_(1, labels_C[:, None], grad_CV.new_full((grad_CV.shape[0], 1), -1.0))
        return losses_C, grad_CV.mul_(mask_C[:, None] / divisor).to(self.weight_VD.dtype)


def _give(sink: GradSink, staged: Staged | None, made_VD: torch.Tensor | None, scale: torch.Tensor) -> None:
    """Put ``scale`` times the gradient into the sink, where it may be already."""
    claimed = sink.claim(staged)
    if claimed is None:
        return
    buffer_VD, accumulate = claimed
    if staged is not None and staged.in_place:
        scale_(buffer_VD, scale)
        return
    gradient_VD = made_VD if staged is None else staged.tensor
    assert gradient_VD is not None
    if accumulate:
        buffer_VD.addcmul_(gradient_VD, scale)
    else:
        torch.mul(gradient_VD, scale, out=buffer_VD)


def scale_(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply by a scalar; on a GPU without touching the tensor where the scalar is one."""
    fused = triton_for(tensor)
    return tensor.mul_(scale) if fused is None else fused.scale_(tensor, scale)
