"""Attention of a block through fused GPU kernels that hand out their log-sum-exps.

Four of them, none of which spends work across documents:

    flash4   segments of any lengths in one call, windows included, by FlashAttention-4, where its extra is
             installed (:mod:`fsdmoe.context_parallel.flash4_attention`): the fastest on Hopper
    flash    the same by torch, on any GPU
    cudnn    a plain batch; about twice as fast as flash on Hopper, but builds a plan for every new shape
    ragged   cuDNN for documents of any lengths, where its extra is installed
             (:mod:`fsdmoe.context_parallel.ragged_attention`)

Without flash4 cuDNN gets blocks whose segments are all alike and long (one document a row, the usual
pre-training case, and the long documents that dynamic context parallelism gives a micro-batch of their own),
ragged gets packed rows, and flash the rest.

All backwards are given the output and log-sum-exp over all keys, of which the block may hold only some, and
return the block's exact share. Gradients come in the input's dtype.

Shape suffixes as in :mod:`fsdmoe.context_parallel.math_attention`; W the width of a head that flash sees.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.context_parallel import flash4_attention as flash4
from fsdmoe.context_parallel.blocks import Block
from fsdmoe.context_parallel.ragged_attention import has_frontend, ragged_backward, ragged_forward, takes

Kernel = Literal["flash", "flash4", "cudnn", "ragged"]

_LONG_SEGMENT = 1 << 22
"""Pairs in a segment from which building a cuDNN plan pays, even if all layers of only one step use it."""


def choose_kernel(q_NHD: Tensor, v_MGE: Tensor, block: Block) -> Kernel | None:
    """The kernel for these shapes, or none when only plain torch will do."""
    if not q_NHD.is_cuda or q_NHD.dtype not in (torch.bfloat16, torch.float16):
        return None
    widest = max(q_NHD.shape[2], v_MGE.shape[2])
    if widest > 256 or torch.cuda.get_device_capability(q_NHD.device) < (8, 0):
        return None
    if flash4.takes(q_NHD, v_MGE):
        return "flash4"
    is_long = block.window is None and block.max_queries * block.max_keys >= _LONG_SEGMENT
    # cuDNN's backward adds gradients up in any order; its deterministic one wants tens of GiB of scratch for
    # padded plans.
    if torch.are_deterministic_algorithms_enabled():
        return "flash"
    if not _cudnn_takes(q_NHD.shape[2], v_MGE.shape[2], q_NHD.device):
        return "flash"
    if is_long and block.is_uniform:
        return "cudnn"
    # Measured on Hopper alone.
    is_hopper = torch.cuda.get_device_capability(q_NHD.device)[0] == 9
    return "ragged" if is_hopper and has_frontend() and takes(q_NHD, v_MGE, block) else "flash"


def _cudnn_takes(width: int, value_width: int, device: torch.device) -> bool:
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None or version < 90000 or width % 8 or value_width % 8:
        return False
    # Widths past 128 (latent attention: 192 and 128) came to Hopper and Blackwell with 9.10.
    is_recent = version >= 91000 and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return max(width, value_width) <= (256 if is_recent else 128)


def fused_forward(
    q_NHD: Tensor, k_MGD: Tensor, v_MGE: Tensor, block: Block, scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Output ``[N, H, E]`` and fp32 log-sum-exps ``[N, H]``, rows as selected by the block."""
    if kernel == "flash4":
        return flash4.flash4_forward(q_NHD, k_MGD, v_MGE, block, scale)
    if kernel == "ragged":
        return ragged_forward(q_NHD, k_MGD, v_MGE, block, scale)
    if kernel == "cudnn":
        q, k, v = _batched(q_NHD, k_MGD, v_MGE, block)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, block.causal, False, scale=scale
        )
        return _rows(out), lse.reshape(q.shape[:3]).transpose(1, 2).flatten(0, 1)
    q, k, v = _widened(q_NHD, k_MGD, v_MGE)
    out, lse_HN, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_flash_borders(block), 0.0, block.causal, False, scale=scale, **_flash_window(block)
    )
    return out[..., : v_MGE.shape[2]], lse_HN.transpose(0, 1)


def fused_backward(
    grad_NHE: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_NHE: Tensor,
    lse_NH: Tensor,
    block: Block,
    scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    if kernel == "flash4":
        return flash4.flash4_backward(grad_NHE, qkv, out_NHE, lse_NH, block, scale)
    if kernel == "ragged":
        return ragged_backward(grad_NHE, qkv, out_NHE, lse_NH, block, scale)
    if kernel == "cudnn":
        q, k, v = _batched(*qkv, block)
        num_segments = len(block.query_lengths)
        grad, out, lse = (
            x.unflatten(0, (num_segments, -1)).transpose(1, 2) for x in (grad_NHE, out_NHE, lse_NH[..., None])
        )
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.contiguous(), unused, unused, None, None, None,
            block.max_queries, block.max_keys, 0.0, block.causal, scale=scale,
        )  # fmt: skip
        return _rows(dq), _rows(dk), _rows(dv)
    q, k, v = _widened(*qkv)
    grad, out = (_widen(x, q.shape[2]) for x in (grad_NHE, out_NHE))
    # Without dropout the kernel does not read its random state, but wants to be given one.
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse_NH.transpose(0, 1).contiguous(), *_flash_borders(block), 0.0, block.causal,
        random_state, torch.empty(0, device=q.device), scale=scale, **_flash_window(block),
    )  # fmt: skip
    width, value_width = qkv[0].shape[2], qkv[2].shape[2]
    return dq[..., :width], dk[..., :width], dv[..., :value_width]


def _flash_borders(block: Block) -> tuple[Tensor, Tensor, int, int]:
    # With one query a segment flash folds query heads into rows and changes the layout of the log-sum-exps; a
    # larger maximum is always allowed.
    return block.query_ends, block.key_ends, max(block.max_queries, 2), block.max_keys


def _flash_window(block: Block) -> dict[str, int]:
    """Keys before and behind the one of a query's own position."""
    return {} if block.window is None else {"window_size_left": block.window - 1, "window_size_right": 0}


def _widened(q_NHD: Tensor, k_MGD: Tensor, v_MGE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flash wants one width, a multiple of 8, for all: zeros change neither scores nor the columns kept."""
    width = -(-max(q_NHD.shape[2], v_MGE.shape[2]) // 8) * 8
    return _widen(q_NHD, width), _widen(k_MGD, width), _widen(v_MGE, width)


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[2] == width else F.pad(x, (0, width - x.shape[2]))


def _batched(q_NHD: Tensor, k_MGD: Tensor, v_MGE: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """``[segments, heads, rows, width]`` views of uniform segments."""
    q, k, v = (x.unflatten(0, (len(block.query_lengths), -1)).transpose(1, 2) for x in (q_NHD, k_MGD, v_MGE))
    return q, k, v


def _rows(x_BHSD: Tensor) -> Tensor:
    return x_BHSD.transpose(1, 2).flatten(0, 1)
