"""The router's two kernels and their launchers; ``router_policy`` says what they mean.

A program holds the scores of a few tokens in registers from logits to weights; backward recomputes them from
the logits. Sums are taken per program and then over programs, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.router_policy import EPSILON, TopKPolicy
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2

# Scores that one program holds: 4096 over 128 threads stay in registers with what follows from them.
_TILE_ELEMENTS = 4096
_EPSILON = tl.constexpr(EPSILON)
# Backward has nothing to choose: more and smaller programs keep the memory busier.
_BACKWARD_ELEMENTS = 1024


@triton.jit
def _load_logits(logits_ptr, rows, num_rows, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr):
    experts = tl.arange(0, EXPERTS)
    wanted = (rows < num_rows)[:, None] & (experts < NUM_EXPERTS)[None, :]
    logits = tl.load(logits_ptr + rows[:, None] * NUM_EXPERTS + experts[None, :], mask=wanted, other=0.0)
    return tl.where((experts < NUM_EXPERTS)[None, :], logits.to(tl.float32), float("-inf"))


@triton.jit
def _softmax(logits):
    """Softmax and log-sum-exp of each row."""
    largest = tl.max(logits, 1)
    exponentials = tl.exp(logits - largest[:, None])
    total = tl.sum(exponentials, 1)
    return exponentials / total[:, None], largest + tl.log(total)


@triton.jit
def _counted(mask_ptr, rows, num_rows, HAS_MASK: tl.constexpr):
    """1.0 for every token that statistics count, else 0.0."""
    counted = (rows < num_rows).to(tl.float32)
    if HAS_MASK:
        counted *= tl.load(mask_ptr + rows, mask=rows < num_rows, other=0).to(tl.float32)
    return counted


@triton.jit
def _strike_groups(
    choice,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TOP2: tl.constexpr,
):
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    grouped = choice.reshape(ROWS, GROUPS, MEMBERS)
    standing, best = tl.max(grouped, 2, return_indices=True)
    if TOP2:
        is_best = tl.arange(0, MEMBERS)[None, None, :] == best[:, :, None]
        standing += tl.max(tl.where(is_best, float("-inf"), grouped), 2)
    kept = tl.zeros([ROWS, GROUPS], tl.int32)
    for _ in tl.static_range(KEPT):
        group = tl.argmax(standing, 1)
        taken = tl.arange(0, GROUPS)[None, :] == group[:, None]
        kept = tl.where(taken, 1, kept)
        standing = tl.where(taken, float("-inf"), standing)
    return tl.where(kept[:, :, None] > 0, grouped, float("-inf")).reshape(ROWS, EXPERTS)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    logits_ptr,
    bias_ptr,
    mask_ptr,
    weights_ptr,
    ids_ptr,
    sums_ptr,
    num_rows,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    CHOOSE_LOGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    choices = tl.arange(0, CHOICES)
    logits = _load_logits(logits_ptr, rows, num_rows, NUM_EXPERTS, EXPERTS)
    probs, lse = _softmax(logits)
    scores = probs
    if SIGMOID:
        scores = tl.sigmoid(logits)
        probs = scores / (tl.sum(scores, 1)[:, None] + _EPSILON)
    if CHOOSE_LOGITS:
        choice = logits
    else:
        choice = tl.where((experts < NUM_EXPERTS)[None, :], scores, float("-inf"))
    if HAS_BIAS:
        bias = tl.load(bias_ptr + experts, mask=experts < NUM_EXPERTS, other=0.0)
        choice += bias.to(tl.float32)[None, :]
    if GROUPS > 1:
        choice = _strike_groups(choice, ROWS, EXPERTS, GROUPS, KEPT_GROUPS, TOP2)
    weights = tl.zeros([ROWS, CHOICES], tl.float32)
    ids = tl.zeros([ROWS, CHOICES], tl.int32)
    chosen = tl.zeros([ROWS, EXPERTS], tl.float32)
    for k in tl.static_range(TOP_K):
        weight, expert = tl.max(choice, 1, return_indices=True)
        taken = experts[None, :] == expert[:, None]
        if HAS_BIAS or CHOOSE_LOGITS:
            weight = tl.sum(tl.where(taken, scores, 0.0), 1)
        weights = tl.where(choices[None, :] == k, weight[:, None], weights)
        ids = tl.where(choices[None, :] == k, expert[:, None], ids)
        chosen = tl.where(taken, 1.0, chosen)
        choice = tl.where(taken, float("-inf"), choice)
    if RENORMALISE:
        weights /= tl.sum(weights, 1)[:, None] + _EPSILON
    at = rows[:, None] * TOP_K + choices[None, :]
    wanted = (rows < num_rows)[:, None] & (choices < TOP_K)[None, :]
    tl.store(weights_ptr + at, weights * scaling, mask=wanted)
    tl.store(ids_ptr + at, ids.to(ids_ptr.dtype.element_ty), mask=wanted)

    counted = _counted(mask_ptr, rows, num_rows, HAS_MASK)
    at_sums = sums_ptr + program * (2 * NUM_EXPERTS + 1)
    is_expert = experts < NUM_EXPERTS
    tl.store(at_sums + experts, tl.sum(chosen * counted[:, None], 0), mask=is_expert)
    tl.store(at_sums + NUM_EXPERTS + experts, tl.sum(probs * counted[:, None], 0), mask=is_expert)
    tl.store(at_sums + 2 * NUM_EXPERTS, tl.sum(lse * lse * counted, 0))


@triton.jit
def _chosen_score_grad(
    scores,
    ids_ptr,
    dweights_ptr,
    rows,
    num_rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """The gradient that the weights send to the scores, before scaling: nonzero at chosen experts only."""
    experts = tl.arange(0, EXPERTS)
    is_row = rows < num_rows
    dscores = tl.zeros_like(scores)
    chosen = tl.zeros_like(scores)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + rows * TOP_K + k, mask=is_row, other=-1).to(tl.int32)
        dweight = tl.load(dweights_ptr + rows * TOP_K + k, mask=is_row, other=0.0).to(tl.float32)
        taken = experts[None, :] == expert[:, None]
        dscores = tl.where(taken, dweight[:, None], dscores)
        chosen = tl.where(taken, 1.0, chosen)
    if RENORMALISE:
        total = tl.sum(scores * chosen, 1) + _EPSILON
        mean = tl.sum(scores * dscores, 1) / total
        dscores = chosen * (dscores - mean[:, None]) / total[:, None]
    return dscores


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "rows_per_segment"])
def _backward_kernel(
    logits_ptr,
    mask_ptr,
    ids_ptr,
    dweights_ptr,
    dsums_ptr,
    dlogits_ptr,
    num_rows,
    rows_per_segment,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_MASK: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_DWEIGHTS: tl.constexpr,
    HAS_DSUMS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    wanted = (rows < num_rows)[:, None] & (experts < NUM_EXPERTS)[None, :]
    logits = _load_logits(logits_ptr, rows, num_rows, NUM_EXPERTS, EXPERTS)
    softmax, lse = _softmax(logits)
    scores = softmax
    if SIGMOID:
        scores = tl.sigmoid(logits)
    dscores = tl.zeros_like(scores)
    if HAS_DWEIGHTS:
        dscores = scaling * _chosen_score_grad(
            scores, ids_ptr, dweights_ptr, rows, num_rows, EXPERTS, TOP_K, RENORMALISE
        )
    counted = _counted(mask_ptr, rows, num_rows, HAS_MASK)
    at_segment = rows // rows_per_segment * (2 * NUM_EXPERTS + 1)
    if HAS_DSUMS:
        at_probs = dsums_ptr + NUM_EXPERTS + at_segment[:, None] + experts[None, :]
        dprobs = tl.load(at_probs, mask=wanted, other=0.0).to(tl.float32) * counted[:, None]
        if SIGMOID:
            total = tl.sum(scores, 1) + _EPSILON
            mean = tl.sum(dprobs * scores, 1) / total
            dprobs = (dprobs - mean[:, None]) / total[:, None]
        dscores += dprobs
    if SIGMOID:
        dlogits = dscores * scores * (1 - scores)
    else:
        dlogits = scores * (dscores - tl.sum(dscores * scores, 1)[:, None])
    if HAS_DSUMS:
        dz = tl.load(dsums_ptr + 2 * NUM_EXPERTS + at_segment, mask=rows < num_rows, other=0.0).to(tl.float32)
        dlogits += softmax * (2 * dz * lse * counted)[:, None]
    at = rows[:, None] * NUM_EXPERTS + experts[None, :]
    tl.store(dlogits_ptr + at, dlogits.to(dlogits_ptr.dtype.element_ty), mask=wanted)


def _rows_per_program(num_rows: int, num_experts: int, num_segments: int, elements: int) -> int:
    """Tokens of so many scores, and never from two segments; one segment may be cut anywhere."""
    rows = max(1, min(64, elements // next_power_of_2(num_experts)))
    while num_segments > 1 and num_rows // num_segments % rows:
        rows //= 2
    return rows


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    token_mask_T: torch.Tensor | None,
    policy: TopKPolicy,
    num_segments: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(weights [T, K], ids [T, K], sums [S, 2E + 1])``; the sums are loads, probabilities and z."""
    num_rows, num_experts = logits_TE.shape
    rows = _rows_per_program(num_rows, num_experts, num_segments, _TILE_ELEMENTS)
    programs = cdiv(num_rows, rows)
    weights_TK = torch.empty(num_rows, policy.top_k, device=logits_TE.device, dtype=torch.float32)
    ids_TK = torch.empty_like(weights_TK, dtype=torch.int64)
    sums = torch.empty(programs, 2 * num_experts + 1, device=logits_TE.device, dtype=torch.float32)
    if programs > 0:
        _forward_kernel[(programs,)](
            logits_TE,
            logits_TE if bias_E is None else bias_E,
            logits_TE if token_mask_T is None else token_mask_T,
            weights_TK,
            ids_TK,
            sums,
            num_rows,
            policy.scaling,
            NUM_EXPERTS=num_experts,
            EXPERTS=next_power_of_2(num_experts),
            TOP_K=policy.top_k,
            CHOICES=next_power_of_2(policy.top_k),
            ROWS=rows,
            SIGMOID=policy.score == "sigmoid",
            CHOOSE_LOGITS=policy.score == "topk_softmax",
            HAS_BIAS=bias_E is not None,
            HAS_MASK=token_mask_T is not None,
            GROUPS=policy.num_groups,
            KEPT_GROUPS=policy.topk_groups,
            TOP2=policy.group_score == "top2_sum",
            RENORMALISE=policy.renormalises,
            num_warps=4,
        )
    return weights_TK, ids_TK, sums.view(num_segments, programs // num_segments, sums.shape[1]).sum(1)


def route_backward(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    token_mask_T: torch.Tensor | None,
    dweights_TK: torch.Tensor | None,
    dsums: torch.Tensor | None,
    policy: TopKPolicy,
) -> torch.Tensor:
    """Gradient of the logits from those of the weights and of the sums ``[S, 2E + 1]``."""
    num_rows, num_experts = logits_TE.shape
    dlogits_TE = torch.empty_like(logits_TE)
    num_segments = 1 if dsums is None else dsums.shape[0]
    rows = _rows_per_program(num_rows, num_experts, num_segments, _BACKWARD_ELEMENTS)
    if num_rows > 0:
        _backward_kernel[(cdiv(num_rows, rows),)](
            logits_TE,
            logits_TE if token_mask_T is None else token_mask_T,
            ids_TK,
            logits_TE if dweights_TK is None else dweights_TK.contiguous(),
            logits_TE if dsums is None else dsums.contiguous(),
            dlogits_TE,
            num_rows,
            num_rows // num_segments,
            policy.scaling,
            NUM_EXPERTS=num_experts,
            EXPERTS=next_power_of_2(num_experts),
            TOP_K=policy.top_k,
            ROWS=rows,
            SIGMOID=policy.score == "sigmoid",
            HAS_MASK=token_mask_T is not None,
            RENORMALISE=policy.renormalises,
            HAS_DWEIGHTS=dweights_TK is not None,
            HAS_DSUMS=dsums is not None,
            num_warps=4,
        )
    return dlogits_TE
