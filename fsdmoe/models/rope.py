"""Queries and keys rotated by their positions' angles (:mod:`fsdmoe.models.rope_scaling` makes the tables).

The rotation is one fused pass where a kernel can run (it uses the angles in fp32), else plain torch in the
dtype of x. Where the tables have fewer pairs than the head, the rest of the head is left as it is.
"""

import torch

from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.rms_norm import rms_norm


def apply_rope(x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor) -> torch.Tensor:
    """Rotate pairs ``(i, i + P)`` of the first ``2P``: the half-split convention of Hugging Face
    checkpoints."""
    width = 2 * cos_BSP.shape[-1]
    if width < x_BSHD.shape[-1]:
        rotated = apply_rope(x_BSHD[..., :width], cos_BSP, sin_BSP)
        return torch.cat((rotated, x_BSHD[..., width:]), dim=-1)
    fused = triton_for(x_BSHD)
    if fused is not None:
        return fused.rope_triton(x_BSHD, cos_BSP, sin_BSP)
    first, second = x_BSHD.chunk(2, dim=-1)
    return _rotate(first, second, cos_BSP, sin_BSP)


def norm_and_rotate(
    x_BSHD: torch.Tensor, weight_D: torch.Tensor, eps: float, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor
) -> torch.Tensor:
    """``apply_rope`` of heads that are normed first: one pass where a kernel takes both."""
    fused = triton_for(x_BSHD)
    if fused is not None and fused.supports_norm_rope(x_BSHD, weight_D, cos_BSP):
        return fused.norm_rope_triton(x_BSHD, weight_D, eps, cos_BSP, sin_BSP)
    return apply_rope(rms_norm(x_BSHD, weight_D, eps), cos_BSP, sin_BSP)


def apply_rope_interleaved(
    x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor
) -> torch.Tensor:
    """Rotate neighbours ``(2i, 2i + 1)``, DeepSeek's convention, and leave the result half-split.

    Queries and keys get the same order, so their product is that of the interleaved result.
    """
    fused = triton_for(x_BSHD)
    if fused is not None:
        return fused.rope_triton(x_BSHD, cos_BSP, sin_BSP, interleaved=True)
    return _rotate(x_BSHD[..., 0::2], x_BSHD[..., 1::2], cos_BSP, sin_BSP)


def _rotate(
    first: torch.Tensor, second: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor
) -> torch.Tensor:
    cos, sin = cos_BSP[:, :, None].to(first.dtype), sin_BSP[:, :, None].to(first.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
