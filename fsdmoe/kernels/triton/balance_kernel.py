"""Balance terms of one router, with their gradient, from its sums over sequences.

    loss = 1/N · (Σ_s Σ_e E (a f_se + b f_e) P_se + z Σ_s Z_s)

f are fractions of choices, of a sequence and of all, P sums of probabilities, Z of squared log-sum-exps. The
loss is linear in P and Z, so forward makes the gradient too, and backward multiplies it by one number: two
launches in place of some twenty. ``fsdmoe.experts.balance`` says what the terms mean, in plain torch.

Sizes: S sequences, E experts; sums ``[S, 2E + 1]`` are loads, probabilities and z of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.triton.launch import QuickLaunch, next_power_of_2

# Numbers of one kind that the program holds at a time.
_ELEMENTS = 4096


class BalanceFactors(NamedTuple):
    """Of the terms of sequences and of all of them together, and of the z-loss."""

    sequence: float
    whole: float
    z_loss: float


@QuickLaunch
@triton.jit(do_not_specialize=["num_sequences"])
def _balance_kernel(
    sums_ptr,
    tokens_ptr,
    loss_ptr,
    load_ptr,
    grad_ptr,
    num_sequences,
    num_tokens,
    of_sequences,
    of_all,
    of_z,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * NUM_EXPERTS + 1
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < NUM_EXPERTS
    load = tl.zeros([EXPERTS], tl.float32)
    for first in tl.range(0, num_sequences, ROWS):
        rows = first + tl.arange(0, ROWS)
        wanted = (rows < num_sequences)[:, None] & is_expert[None, :]
        at = rows[:, None] * WIDTH + experts[None, :]
        load += tl.sum(tl.load(sums_ptr + at, mask=wanted, other=0.0), 0)
    tl.store(load_ptr + experts, load, mask=is_expert)
    total = num_tokens
    if HAS_TOKENS:
        total = tl.load(tokens_ptr)
    total = tl.maximum(total, 1.0)
    whole = of_all * load / tl.maximum(tl.sum(load, 0), 1.0)
    loss = tl.zeros([EXPERTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, num_sequences, ROWS):
        rows = first + tl.arange(0, ROWS)
        wanted = (rows < num_sequences)[:, None] & is_expert[None, :]
        at = rows[:, None] * WIDTH + experts[None, :]
        counts = tl.load(sums_ptr + at, mask=wanted, other=0.0)
        probs = tl.load(sums_ptr + at + NUM_EXPERTS, mask=wanted, other=0.0)
        fraction = counts / tl.maximum(tl.sum(counts, 1), 1.0)[:, None]
        grad = (of_sequences * fraction + whole[None, :]) * (NUM_EXPERTS / total)
        loss += tl.sum(grad * probs, 0)
        tl.store(grad_ptr + at, tl.zeros([ROWS, EXPERTS], tl.float32), mask=wanted)
        tl.store(grad_ptr + at + NUM_EXPERTS, grad, mask=wanted)
        at_z = rows * WIDTH + 2 * NUM_EXPERTS
        squares += tl.load(sums_ptr + at_z, mask=rows < num_sequences, other=0.0)
        tl.store(grad_ptr + at_z, tl.zeros([ROWS], tl.float32) + of_z / total, mask=rows < num_sequences)
    tl.store(loss_ptr, tl.sum(loss, 0) + of_z / total * tl.sum(squares, 0))


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sums: torch.Tensor, num_tokens: torch.Tensor | float, factors: BalanceFactors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_sequences, width = sums.shape
        num_experts = width // 2
        experts = next_power_of_2(num_experts)
        is_known = isinstance(num_tokens, float)
        loss = torch.empty((), device=sums.device, dtype=torch.float32)
        load_E = torch.empty(num_experts, device=sums.device, dtype=torch.float32)
        grad = torch.empty_like(sums)
        _balance_kernel[(1,)](
            sums,
            sums if is_known else num_tokens,
            loss,
            load_E,
            grad,
            num_sequences,
            num_tokens if is_known else 0.0,
            *factors,
            NUM_EXPERTS=num_experts,
            EXPERTS=experts,
            ROWS=max(1, min(next_power_of_2(num_sequences), _ELEMENTS // experts)),
            HAS_TOKENS=not is_known,
            num_warps=4,
        )
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(load_E)
        return loss, load_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * dloss, None, None


def balance_triton(
    sums: torch.Tensor, num_tokens: torch.Tensor | float, factors: BalanceFactors
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, differentiable in the sums, and ``load_E``. ``num_tokens`` is a number, or fp32 on the
    device; below one it counts as one."""
    return _Balance.apply(sums, num_tokens, factors)
