"""Attention of one block, on whatever kernel takes it, and the exact merging of blocks.

Blocks cover different keys for the same queries. Each comes with its log-sum-exp ``l``; outputs add up with
weights ``exp(l_i - l)``, where ``exp(l)`` is the sum of all ``exp(l_i)``. The merge runs in fp32 whatever the
inputs are. An attention sink (gpt-oss: a learned score a head, without a value) is one more such block, so it
costs no kernel anything: its log-sum-exp is the score itself and its output zero.

Shape suffixes: T rows of queries on this rank, S rows of keys at hand, H query heads, G key-value heads, D
width of queries and keys, E width of values; N, M rows that the block selects of T and S.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block
from fsdmoe.context_parallel.fused_attention import choose_kernel, fused_backward, fused_forward
from fsdmoe.context_parallel.math_attention import math_backward, math_forward


class KeyValueGradient(NamedTuple):
    """What a block adds to the gradients of keys and values, in ``rows`` (none: all, in order)."""

    rows: Tensor | None
    dk_MGD: Tensor
    dv_MGE: Tensor

    def add_to(self, dk_SGD: Tensor, dv_SGE: Tensor) -> None:
        for total, part in ((dk_SGD, self.dk_MGD), (dv_SGE, self.dv_MGE)):
            add_rows(total, self.rows, part)


def add_rows(total: Tensor, index: Tensor | None, part: Tensor) -> None:
    """``total[index] += part``; rows that occur twice in the index are added twice."""
    if index is None:
        total += part
    else:
        total.index_add_(0, index, part.to(total.dtype))


def attend_block(
    q_THD: Tensor, k_SGD: Tensor, v_SGE: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[N, H, E]`` and log-sum-exps ``[N, H]`` of the block's queries over the block's keys."""
    q = _select(q_THD, block.query_index)
    k, v = (_select(x, block.key_index) for x in (k_SGD, v_SGE))
    kernel = choose_kernel(q, v, block)
    if kernel is None:
        # Autocast would turn fp32 products into bf16 ones.
        with torch.autocast(q.device.type, enabled=False):
            return math_forward(q, k, v, block, scale)
    return fused_forward(q, k, v, block, scale, kernel)


def attend_block_backward(
    grad_THE: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_THE: Tensor,
    lse_TH: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, KeyValueGradient]:
    """Gradients of the block's queries ``[N, H, D]``, keys and values; out and lse are over *all* keys."""
    grad, out, lse = (_select(x, block.query_index) for x in (grad_THE, out_THE, lse_TH))
    q = _select(qkv[0], block.query_index)
    k, v = (_select(x, block.key_index) for x in qkv[1:])
    kernel = choose_kernel(q, v, block)
    if kernel is None:
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = math_backward(grad, (q, k, v), out, lse, block, scale)
    else:
        dq, dk, dv = fused_backward(grad, (q, k, v), out, lse, block, scale, kernel)
    return dq, KeyValueGradient(block.key_index, dk, dv)


class Merger:
    """Adds up the blocks of one attention, a query row at a time."""

    def __init__(self, q_THD: Tensor, value_width: int) -> None:
        self.shape = (*q_THD.shape[:2], value_width)
        self.like = q_THD
        self.dtype = torch.promote_types(q_THD.dtype, torch.float32)
        self.out_THE: Tensor | None = None
        self.lse_TH: Tensor | None = None

    def add(self, block: Block, out_NHE: Tensor, lse_NH: Tensor) -> None:
        index = block.query_index
        if self.out_THE is None or self.lse_TH is None:
            self.out_THE, self.lse_TH = out_NHE, lse_NH
            if index is not None:
                # Rows that see nothing (padding) keep zeros, and minus infinity: the sum of no exponentials.
                self.out_THE = self.like.new_zeros(self.shape, dtype=out_NHE.dtype).index_copy_(
                    0, index, out_NHE
                )
                self.lse_TH = lse_NH.new_full(self.shape[:2], float("-inf")).index_copy_(0, index, lse_NH)
            return
        self.out_THE = self.out_THE.to(self.dtype)
        out, lse = _select(self.out_THE, index), _select(self.lse_TH, index)
        weight = torch.sigmoid(lse_NH - lse)[..., None]
        merged, merged_lse = torch.lerp(out, out_NHE.to(self.dtype), weight), torch.logaddexp(lse, lse_NH)
        if index is None:
            self.out_THE, self.lse_TH = merged, merged_lse
        else:
            self.out_THE.index_copy_(0, index, merged)
            self.lse_TH.index_copy_(0, index, merged_lse)

    def add_sinks(self, sinks_H: Tensor) -> None:
        """One key more for every query: these scores, and values of zero."""
        sinks = sinks_H.to(self.dtype)
        if self.out_THE is None or self.lse_TH is None:
            self.out_THE = self.like.new_zeros(self.shape)
            self.lse_TH = sinks.expand(self.shape[:2])
            return
        self.out_THE = self.out_THE.to(self.dtype) * torch.sigmoid(self.lse_TH - sinks)[..., None]
        self.lse_TH = torch.logaddexp(self.lse_TH, sinks)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in the dtype of the queries, and log-sum-exps."""
        if self.out_THE is None or self.lse_TH is None:
            out = self.like.new_zeros(self.shape)
            return out, out.new_full(self.shape[:2], float("-inf"), dtype=self.dtype)
        return self.out_THE.to(self.like.dtype).contiguous(), self.lse_TH.contiguous()


def sinks_gradient(grad_THE: Tensor, out_THE: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> Tensor:
    """Of the scores that :meth:`Merger.add_sinks` took; out and lse are over all keys, the sinks included."""
    delta_TH = (grad_THE.to(lse_TH.dtype) * out_THE.to(lse_TH.dtype)).sum(-1)
    return -((sinks_H.to(lse_TH.dtype) - lse_TH).exp() * delta_TH).sum(0)


def _select(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)
