"""Rotary positions, computed from position ids in each forward: no buffer for the meta device to lose.

The rotation is one fused pass where a kernel can run (it uses the angles in fp32), else plain torch in the
dtype of x.
"""

import torch

from fsdmoe.kernels.backend import triton_for


def rope_tables(positions_BS: torch.Tensor, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[B, S, dim/2]`` in fp32; the angle of pair ``i`` is ``position * theta**(-2i/dim)``."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=positions_BS.device)
    angles_BSP = positions_BS[..., None].float() * theta ** (-pairs / dim)
    return angles_BSP.cos(), angles_BSP.sin()


def apply_rope(x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor) -> torch.Tensor:
    """Rotate pairs ``(i, i + D/2)``: the half-split convention of Hugging Face checkpoints."""
    fused = triton_for(x_BSHD)
    if fused is not None:
        return fused.rope_triton(x_BSHD, cos_BSP, sin_BSP)
    first, second = x_BSHD.chunk(2, dim=-1)
    return _turn(first, second, cos_BSP, sin_BSP)


def apply_rope_(x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor) -> None:
    """``apply_rope`` in the place of a contiguous ``x``; no gradient flows through."""
    fused = triton_for(x_BSHD)
    if fused is not None:
        fused.rope_triton_(x_BSHD, cos_BSP, sin_BSP)
    else:
        x_BSHD.copy_(apply_rope(x_BSHD, cos_BSP, sin_BSP))


def apply_rope_interleaved(
    x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor
) -> torch.Tensor:
    """Rotate neighbours ``(2i, 2i + 1)``, DeepSeek's convention, and leave the result half-split.

    Queries and keys get the same order, so their product is that of the interleaved result.
    """
    fused = triton_for(x_BSHD)
    if fused is not None:
        return fused.rope_triton(x_BSHD, cos_BSP, sin_BSP, interleaved=True)
    return _turn(x_BSHD[..., 0::2], x_BSHD[..., 1::2], cos_BSP, sin_BSP)


def _turn(
    first: torch.Tensor, second: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor
) -> torch.Tensor:
    cos, sin = cos_BSP[:, :, None].to(first.dtype), sin_BSP[:, :, None].to(first.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
