"""Exact causal attention over sequences that are split across ranks, in one of three modes behind one call::

    attention = ContextAttention("ring")
    plan = AttentionPlan(split_rows(document_ids_BS, cp), group, device)     # once a micro-batch
    out_BLHE = attention.attend(q_BLHD, k_BLGD, v_BLGE, plan, scale)         # every layer

    mode         on the wire                          overlaps      takes
    ring         keys and values, R - 1 hops          yes           any number of heads
    all_to_all   queries, keys, values and output     no            query heads divisible by the ranks
    all_gather   keys and values, one collective      no            any number of heads; short sequences

With one rank all three are packed attention without communication. What each sends and keeps is in
:mod:`fsdmoe.context_parallel.volume`. Layers with a window take ``all_gather`` where the mode is ``ring``: a
window is one of consecutive positions, which the keys of a single other rank are not.

Shape suffixes: B rows, L tokens of a row on this rank, T = B * L, H and G query and key-value heads, D width
of queries and keys, E width of values.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from fsdmoe.context_parallel.block_attention import (
    KeyValueGradient,
    Merger,
    add_rows,
    attend_block,
    attend_block_backward,
    sinks_gradient,
)
from fsdmoe.context_parallel.blocks import Block
from fsdmoe.context_parallel.config import Mode
from fsdmoe.context_parallel.exchange import gather_heads, scatter_heads
from fsdmoe.context_parallel.kv_exchange import GatherKVExchange, KVExchange, LocalKVExchange, RingKVExchange
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.core.autograd import once_differentiable
from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import one_of


class ContextAttention:
    """Causal attention inside each document, for the tokens of this rank."""

    def __init__(self, mode: Mode = "ring") -> None:
        refuse(one_of("context_parallel", {"mode": mode}, {"mode": get_args(Mode)}))
        self.mode = mode

    @torch.compiler.disable(reason="messages between ranks, and lengths that change with every batch")
    def attend(
        self,
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGE: Tensor,
        plan: AttentionPlan,
        scale: float,
        sinks_H: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """``[B, L, H, E]``: a query sees the keys of its document up to its position, or the last ``window``
        of them, and the sink of its head. Padding gets 0."""
        shape = (plan.split.num_rows, plan.split.local_len)
        if q_BLHD.shape[:2] != shape:
            raise AssertionError(
                f"expected queries of {shape} rows and tokens, as planned, got {q_BLHD.shape[:2]}"
            )
        q, k, v = (x.flatten(0, 1) for x in (q_BLHD, k_BLGD, v_BLGE))
        if plan.group is None:
            out = _Attention.apply(q, k, v, sinks_H, _local(plan.whole, window), scale)
        elif self.mode == "all_to_all":
            q, k, v = scatter_heads(q, k, v, plan.group)
            if sinks_H is not None:
                sinks_H = sinks_H.unflatten(0, (plan.size, -1))[plan.rank]
            out = _Attention.apply(q, k, v, sinks_H, _local(plan.whole, window), scale)
            out = gather_heads(out, plan.group)
        else:
            is_ring = self.mode == "ring" and window is None
            exchange = RingKVExchange(plan) if is_ring else GatherKVExchange(plan, window)
            out = _Attention.apply(q, k, v, sinks_H, exchange, scale)
        return out.unflatten(0, shape)


@torch.compiler.disable(reason="lengths that change with every batch")
def attend_here(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGE: Tensor,
    block: Block,
    scale: float,
    sinks_H: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """:meth:`ContextAttention.attend` where the block's rows are all on this rank."""
    q, k, v = (x.flatten(0, 1) for x in (q_BSHD, k_BSGD, v_BSGE))
    return _Attention.apply(q, k, v, sinks_H, _local(block, window), scale).unflatten(0, q_BSHD.shape[:2])


def _local(block: Block | None, window: int | None) -> LocalKVExchange:
    return LocalKVExchange(None if block is None else block.windowed(window))


class _Attention(torch.autograd.Function):
    """Attention merged over all keys that ``exchange`` delivers, and sinks. Keeps inputs, output and
    log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGE: Tensor,
        sinks_H: Tensor | None,
        exchange: KVExchange,
        scale: float,
    ) -> Tensor:
        merger = Merger(q_THD, v_TGE.shape[2])

        def attend(block: Block, k_SGD: Tensor, v_SGE: Tensor) -> None:
            merger.add(block, *attend_block(q_THD, k_SGD, v_SGE, block, scale))

        exchange.forward(k_TGD, v_TGE, attend)
        if sinks_H is not None:
            merger.add_sinks(sinks_H)
        out_THE, lse_TH = merger.result()
        ctx.save_for_backward(q_THD, k_TGD, v_TGE, sinks_H, out_THE, lse_TH)
        ctx.exchange, ctx.scale = exchange, scale
        return out_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGE, sinks_H, out_THE, lse_TH = ctx.saved_tensors
        dq_THD: Tensor | None = None

        def attend_backward(block: Block, k_SGD: Tensor, v_SGE: Tensor) -> KeyValueGradient:
            nonlocal dq_THD
            qkv = (q_THD, k_SGD, v_SGE)
            dq_NHD, gradient = attend_block_backward(grad_THE, qkv, out_THE, lse_TH, block, ctx.scale)
            if dq_THD is None and block.query_index is None:
                dq_THD = dq_NHD
            else:
                dq_THD = q_THD.new_zeros(q_THD.shape) if dq_THD is None else dq_THD
                dq_THD = dq_THD.to(lse_TH.dtype)
                add_rows(dq_THD, block.query_index, dq_NHD)
            return gradient

        dk_TGD, dv_TGE = ctx.exchange.backward(k_TGD, v_TGE, attend_backward)
        if dq_THD is None:
            dq_THD = torch.zeros_like(q_THD)
        dsinks_H = None
        if sinks_H is not None and ctx.needs_input_grad[3]:
            dsinks_H = sinks_gradient(grad_THE, out_THE, lse_TH, sinks_H).to(sinks_H.dtype)
        return dq_THD.to(q_THD.dtype), dk_TGD.to(k_TGD.dtype), dv_TGE.to(v_TGE.dtype), dsinks_H, None, None
