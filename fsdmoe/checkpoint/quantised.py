"""FP8 weights with block scales (DeepSeek-V3's format) as ordinary numbers."""

from __future__ import annotations

import torch

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.tree import Tree


def block_size(config: Tree) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    size = (config.get("quantization_config") or {}).get("weight_block_size") or [128, 128]
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise CheckpointError(f"config.json: expected weight_block_size of two numbers, got {size!r}")
    return size[0], size[1]


def dequantise(
    weight_MN: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """``weight * scale`` with one scale for each block; the last blocks may be cut short."""
    rows, columns = weight_MN.shape
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"expected scales {wanted} for a weight {(rows, columns)}, got {tuple(scale.shape)}"
        )
    spread = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight_MN.float() * spread).to(dtype)
