"""The inside of a chunked linear cross-entropy: logits in, their gradient in the same memory, losses out.

    loss_c = logsumexp(logits_c) - logits_c[label_c]
    grad_c = (softmax(logits_c) - onehot(label_c)) / divisor

both zero for tokens that are masked out, whatever their label. A token whose label is outside of the
vocabulary has a loss that is not a number, no gradient, and leaves a note (see :mod:`fsdmoe.core.labels`).
One program a token walks the vocabulary twice: once for the log-sum-exp, keeping a running maximum, once to
overwrite each logit with its gradient. No fp32 copy of the logits is ever made. Legend: C tokens of a chunk,
V vocabulary.
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
    note_ptr,
    vocabulary,
    first,
    COLUMNS: tl.constexpr,
    WITH_GRAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * vocabulary
    label = tl.load(labels_ptr + token).to(tl.int64)
    inside = (label >= 0) & (label < vocabulary)
    picked = tl.load(row_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    counted = tl.load(mask_ptr + token).to(tl.int32) != 0
    # One store of 8 bytes: the host, whose memory this may be, never sees half a note.
    clipped = tl.minimum(tl.maximum(label, -2147483648), 2147483647)
    note = ((first + token + 1) << 32) | (clipped & 0xFFFFFFFF)
    tl.store(note_ptr, note, mask=counted & (inside == 0))
    columns = tl.arange(0, COLUMNS)
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        logits = tl.load(
            row_ptr + start + columns, mask=start + columns < vocabulary, other=float("-inf")
        ).to(tl.float32)
        larger = tl.maximum(largest, logits)
        # A lane that has seen nothing yet is at -inf, and -inf - -inf would be NaN.
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - safe) + tl.exp(logits - safe)
        largest = larger
    highest = tl.max(largest, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(largest - highest), 0))
    tl.store(losses_ptr + token, tl.where(counted, lse - picked, 0.0))
    if WITH_GRAD:
        scale = 1.0 / tl.load(divisor_ptr)
        tl.debug_barrier()  # the label's logit must be read by all before it is overwritten
        for start in range(0, vocabulary, COLUMNS):
            at = start + columns
            logits = tl.load(row_ptr + at, mask=at < vocabulary, other=0.0).to(tl.float32)
            grad = (tl.exp(logits - lse) - tl.where(at == label, 1.0, 0.0)) * scale
            grad = tl.where(counted & inside, grad, 0.0).to(logits_ptr.dtype.element_ty)
            tl.store(row_ptr + at, grad, mask=at < vocabulary)


def cross_entropy_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    mask_C: torch.Tensor,
    divisor: torch.Tensor,
    *,
    with_grad: bool = True,
    note: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Losses ``[C]`` in fp32; with ``with_grad`` the contiguous logits are overwritten by their gradient
    over ``divisor``, an fp32 scalar. ``note``: where a label outside of the vocabulary is noted, its token
    counted from ``first``; int64, on the device or pinned."""
    num_tokens, vocabulary = logits_CV.shape
    if note is None:
        note = torch.zeros(1, device=logits_CV.device, dtype=torch.int64)
    losses_C = torch.empty(num_tokens, device=logits_CV.device, dtype=torch.float32)
    if num_tokens > 0:
        _cross_entropy_kernel[(num_tokens,)](
            logits_CV,
            labels_C,
            mask_C,
            divisor,
            losses_C,
            note,
            vocabulary,
            first,
            COLUMNS=min(_COLUMNS, next_power_of_2(vocabulary)),
            WITH_GRAD=with_grad,
            num_warps=8,
        )
    return losses_C
