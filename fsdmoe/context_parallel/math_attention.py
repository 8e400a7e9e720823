"""Attention of a block in plain torch, exact in fp32 (fp64 for fp64 inputs): the reference, the CPU path, and
the fallback on a GPU for shapes that no fused kernel takes.

Scores are computed for a bounded number of query rows at a time, so memory does not grow with the square of
a document. Both directions work from log-sum-exps that may come from elsewhere: given the log-sum-exp (and
the output) over *all* keys, the backward of one block is its exact share of the gradient.

Shape suffixes: N query rows, M key rows, H query heads, G key-value heads, J = H / G, D width of queries and
keys, E width of values, n and m rows of one tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdmoe.context_parallel.blocks import AttentionSegment, Block

_MAX_SCORES = 1 << 24
"""Scores held at a time (64 MiB in fp32)."""


def math_forward(
    q_NHD: Tensor, k_MGD: Tensor, v_MGE: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[N, H, E]`` and log-sum-exps ``[N, H]`` of the selected rows, in fp32 (or fp64)."""
    dtype = torch.promote_types(q_NHD.dtype, torch.float32)
    num_heads, num_groups = q_NHD.shape[1], k_MGD.shape[1]
    out_NHE = q_NHD.new_empty(q_NHD.shape[0], num_heads, v_MGE.shape[2], dtype=dtype)
    lse_NH = q_NHD.new_empty(q_NHD.shape[:2], dtype=dtype)
    for segment in block.segments():
        k_GmD, v_GmE = (_keys(x, segment, dtype) for x in (k_MGD, v_MGE))
        for start, end in _tiles(segment, num_heads):
            q_GJnD = _queries(q_NHD[start:end], num_groups, dtype)
            scores_GJnm = _scores(q_GJnD, k_GmD, segment, start, block, scale)
            lse_GJn = scores_GJnm.logsumexp(-1)
            out_GJnE = (scores_GJnm - lse_GJn[..., None]).exp() @ v_GmE[:, None]
            out_NHE[start:end] = out_GJnE.permute(2, 0, 1, 3).flatten(1, 2)
            lse_NH[start:end] = lse_GJn.permute(2, 0, 1).flatten(1)
    return out_NHE, lse_NH


def math_backward(
    grad_NHE: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_NHE: Tensor,
    lse_NH: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in fp32 (or fp64)."""
    q_NHD, k_MGD, v_MGE = qkv
    dtype = torch.promote_types(q_NHD.dtype, torch.float32)
    num_heads, num_groups = q_NHD.shape[1], k_MGD.shape[1]
    dq_NHD = torch.empty_like(q_NHD, dtype=dtype, memory_format=torch.contiguous_format)
    dk_MGD = torch.zeros_like(k_MGD, dtype=dtype, memory_format=torch.contiguous_format)
    dv_MGE = torch.zeros_like(v_MGE, dtype=dtype, memory_format=torch.contiguous_format)
    delta_NH = (grad_NHE.to(dtype) * out_NHE.to(dtype)).sum(-1)
    for segment in block.segments():
        keys = slice(segment.key_start, segment.key_end)
        k_GmD, v_GmE = (_keys(x, segment, dtype) for x in (k_MGD, v_MGE))
        for start, end in _tiles(segment, num_heads):
            q_GJnD, grad_GJnE = (_queries(x[start:end], num_groups, dtype) for x in (q_NHD, grad_NHE))
            lse_GJn1, delta_GJn1 = (
                _queries(x[start:end, :, None], num_groups, dtype) for x in (lse_NH, delta_NH)
            )
            p_GJnm = (_scores(q_GJnD, k_GmD, segment, start, block, scale) - lse_GJn1).exp()
            dv_MGE[keys] += torch.einsum("gjnm,gjne->mge", p_GJnm, grad_GJnE)
            ds_GJnm = p_GJnm * (grad_GJnE @ v_GmE[:, None].mT - delta_GJn1) * scale
            dk_MGD[keys] += torch.einsum("gjnm,gjnd->mgd", ds_GJnm, q_GJnD)
            dq_NHD[start:end] = (ds_GJnm @ k_GmD[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    return dq_NHD, dk_MGD, dv_MGE


def _tiles(segment: AttentionSegment, num_heads: int) -> list[tuple[int, int]]:
    rows = max(1, _MAX_SCORES // (num_heads * (segment.key_end - segment.key_start)))
    starts = range(segment.query_start, segment.query_end, rows)
    return [(start, min(start + rows, segment.query_end)) for start in starts]


def _keys(x_MGD: Tensor, segment: AttentionSegment, dtype: torch.dtype) -> Tensor:
    return x_MGD[segment.key_start : segment.key_end].transpose(0, 1).to(dtype)


def _queries(x_nHD: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    return x_nHD.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3).to(dtype)


def _scores(
    q_GJnD: Tensor, k_GmD: Tensor, segment: AttentionSegment, start: int, block: Block, scale: float
) -> Tensor:
    scores_GJnm = (q_GJnD @ k_GmD[:, None].mT) * scale
    if not block.causal:
        return scores_GJnm
    num_keys = segment.key_end - segment.key_start
    # The last query of the segment sees all of its keys.
    last_seen = (
        torch.arange(start, start + q_GJnD.shape[2], device=q_GJnD.device) + num_keys - segment.query_end
    )
    keys_m = torch.arange(num_keys, device=q_GJnD.device)
    hidden_nm = keys_m > last_seen[:, None]
    if block.window is not None:
        hidden_nm |= keys_m <= last_seen[:, None] - block.window
    return scores_GJnm.masked_fill(hidden_nm, float("-inf"))
