"""Attention inside documents of any lengths by FlashAttention-4, in one call.

``flash-attn-4`` (extra ``fa4``) is the fastest of the kernels here for packed rows on Hopper. It has
windows, and a backward whose sums have a fixed order (``torch.use_deterministic_algorithms``). Kernels are
compiled when first called, in some seconds for each shape of a head and kind of mask. Lengths and borders do
not matter, so a call can be captured in a CUDA graph. The two functions that hand out log-sum-exps
are private: this file alone calls them.

Shape suffixes as in :mod:`fsdmoe.context_parallel.math_attention`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block

_WIDTHS = {(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)}
"""Of a head's keys and values: those that were measured and checked."""
_LEAST_WORK = 1 << 29
"""Pairs of queries and keys of whole rows, over heads. With fewer the host is the limit, and torch's cuDNN
costs it less."""


@cache
def has_flash4() -> bool:
    """Whether the extra is installed. Asked of its name: a package of that path may be FlashAttention-2."""
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return False
    return True


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether heads ``[..., D]`` and ``[..., E]`` on a GPU go through it: on Hopper, where it was tried."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and (q.shape[-1], v.shape[-1]) in _WIDTHS
        and has_flash4()
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def takes_rows(q_BSHD: Tensor, v_BSGE: Tensor) -> bool:
    """The same of whole rows, as many queries as keys, where there is enough to do."""
    if torch.compiler.is_compiling():  # it cannot trace the kernels, nor whether the extra is installed
        return False
    num_rows, length, num_heads, _ = q_BSHD.shape
    is_square = length == v_BSGE.shape[1]
    return is_square and num_rows * length * length * num_heads >= _LEAST_WORK and takes(q_BSHD, v_BSGE)


def flash4_rows(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGE: Tensor, scale: float) -> Tensor:
    """Causal attention of rows that are one document each, ``[B, S, H, E]``."""
    from flash_attn.cute import flash_attn_func  # an extra: only where it is chosen

    in_order = torch.are_deterministic_algorithms_enabled()
    out, _ = flash_attn_func(q_BSHD, k_BSGD, v_BSGE, softmax_scale=scale, causal=True, deterministic=in_order)
    return out


def flash4_forward(
    q_NHD: Tensor, k_MGD: Tensor, v_MGE: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[N, H, E]`` and fp32 log-sum-exps ``[N, H]``."""
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse_HN, *_ = _flash_attn_fwd(
        q_NHD, k_MGD, v_MGE, softmax_scale=scale, return_lse=True, **_mask(block)
    )
    return out, lse_HN.transpose(0, 1)


def flash4_backward(
    grad_NHE: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_NHE: Tensor,
    lse_NH: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    from flash_attn.cute.interface import _flash_attn_bwd

    lse_HN = lse_NH.transpose(0, 1).contiguous()
    in_order = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = _flash_attn_bwd(
        *qkv, out_NHE, grad_NHE, lse_HN, softmax_scale=scale, deterministic=in_order, **_mask(block)
    )
    return dq, dk, dv


def _mask(block: Block) -> dict[str, object]:
    """Borders of documents, and which keys of its own a query sees."""
    return {
        "cu_seqlens_q": block.query_ends,
        "cu_seqlens_k": block.key_ends,
        "max_seqlen_q": block.max_queries,
        "max_seqlen_k": block.max_keys,
        "causal": block.causal,
        "window_size_left": None if block.window is None else block.window - 1,
        "window_size_right": None if block.window is None else 0,
    }
