"""Rotary positions, computed from position ids in each forward: no buffer for the meta device to lose."""

import torch


def rope_tables(positions_BS: torch.Tensor, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[B, S, dim/2]`` in fp32; the angle of pair ``i`` is ``position * theta**(-2i/dim)``."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=positions_BS.device)
    angles_BSP = positions_BS[..., None].float() * theta ** (-pairs / dim)
    return angles_BSP.cos(), angles_BSP.sin()


def apply_rope(x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor) -> torch.Tensor:
    """Rotate pairs ``(i, i + D/2)``: the half-split convention of Hugging Face checkpoints."""
    first, second = x_BSHD.chunk(2, dim=-1)
    cos, sin = cos_BSP[:, :, None].to(x_BSHD.dtype), sin_BSP[:, :, None].to(x_BSHD.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def apply_rope_interleaved(
    x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor
) -> torch.Tensor:
    """Rotate neighbours ``(2i, 2i + 1)``, DeepSeek's convention, and leave the result half-split.

    Queries and keys get the same order, so their product is that of the interleaved result.
    """
    return apply_rope(torch.cat((x_BSHD[..., 0::2], x_BSHD[..., 1::2]), dim=-1), cos_BSP, sin_BSP)
