"""The inside of a chunked linear cross-entropy: logits in, their gradient in the same memory, losses out.

    loss_c = logsumexp(logits_c) - logits_c[label_c]
    grad_c = (softmax(logits_c) - onehot(label_c)) / divisor

both zero for tokens that are masked out. One program a token walks the vocabulary twice: once for the
log-sum-exp, keeping a running maximum, once to overwrite each logit with its gradient. No fp32 copy of the
logits is ever made. Legend: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, next_power_of_2

_COLUMNS = 4096


@QuickLaunch
@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    labels_ptr,
    mask_ptr,
    divisor_ptr,
    losses_ptr,
    vocabulary,
    COLUMNS: tl.constexpr,
    WITH_GRAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * vocabulary
    label = tl.load(labels_ptr + token)
    picked = tl.load(row_ptr + label).to(tl.float32)
    counted = tl.load(mask_ptr + token).to(tl.float32)
    columns = tl.arange(0, COLUMNS)
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        inside = start + columns < vocabulary
        logits = tl.load(row_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, logits)
        # A lane that has seen nothing yet is at -inf, and -inf - -inf would be NaN.
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - safe) + tl.exp(logits - safe)
        largest = larger
    highest = tl.max(largest, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(largest - highest), 0))
    tl.store(losses_ptr + token, tl.where(counted > 0, lse - picked, 0.0))
    if WITH_GRAD:
        scale = 1.0 / tl.load(divisor_ptr)
        tl.debug_barrier()  # the label's logit must be read by all before it is overwritten
        for start in range(0, vocabulary, COLUMNS):
            at = start + columns
            logits = tl.load(row_ptr + at, mask=at < vocabulary, other=0.0).to(tl.float32)
            grad = (tl.exp(logits - lse) - tl.where(at == label, 1.0, 0.0)) * scale
            grad = tl.where(counted > 0, grad, 0.0).to(logits_ptr.dtype.element_ty)
            tl.store(row_ptr + at, grad, mask=at < vocabulary)


def cross_entropy_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    mask_C: torch.Tensor,
    divisor: torch.Tensor,
    *,
    with_grad: bool = True,
) -> torch.Tensor:
    """Losses ``[C]`` in fp32; with ``with_grad`` the contiguous logits are overwritten by their gradient
    over ``divisor``, an fp32 scalar."""
    num_tokens, vocabulary = logits_CV.shape
    losses_C = torch.empty(num_tokens, device=logits_CV.device, dtype=torch.float32)
    if num_tokens > 0:
        _cross_entropy_kernel[(num_tokens,)](
            logits_CV,
            labels_C,
            mask_C,
            divisor,
            losses_C,
            vocabulary,
            COLUMNS=min(_COLUMNS, next_power_of_2(vocabulary)),
            WITH_GRAD=with_grad,
            num_warps=8,
        )
    return losses_C


def cross_entropy_reference_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    mask_C: torch.Tensor,
    divisor: torch.Tensor,
    *,
    with_grad: bool = True,
) -> torch.Tensor:
    """The same in plain torch."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    lse_C = wide_CV.logsumexp(-1)
    losses_C = torch.where(mask_C, lse_C - wide_CV.gather(1, labels_C[:, None]).squeeze(1), 0.0)
    if with_grad:
        onehot_CV = torch.zeros_like(wide_CV).scatter_(1, labels_C[:, None], 1.0)
        grad_CV = ((wide_CV - lse_C[:, None]).exp() - onehot_CV) / divisor
        logits_CV.copy_(grad_CV * mask_C[:, None])
    return losses_C
