"""FP8 weights with block scales (DeepSeek-V3's format) as ordinary numbers, and the other way round."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from fsdmoe.checkpoint.dtypes import dtype_name
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import StoredTensor
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantize import quantize, spread_blocks

FP8_BLOCK = 128
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Of attention, MLPs and experts, as folders name them; routers, norms, embedding and head have other names.
_PROJECTION = re.compile(
    r"(^|\.)layers\.\d+\.((self_attn|mlp\.shared_experts?|mlp|mlp\.experts\.\d+)\.\w+_proj(_with_mqa)?"
    r"|block_sparse_moe\.experts\.\d+\.w[123])\.weight$"
)


def is_projection(name: str, shape: Sequence[int]) -> bool:
    """Whether a folder in FP8 has this weight as codes and scales."""
    return len(shape) == 2 and _PROJECTION.search(name) is not None


def block_size(config: Tree) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    size = (config.get("quantization_config") or {}).get("weight_block_size") or [128, 128]
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(f"config.json: expected weight_block_size of two numbers, got {size!r}")
    return size[0], size[1]


def check_scales(folder: str, tensors: Mapping[str, StoredTensor], scales: Mapping[str, str]) -> None:
    """Every FP8 weight has a scale and every scale an FP8 weight: a weight without its scale would be taken
    for the numbers themselves. ``scales`` are names, by weight."""
    for name, tensor in tensors.items():
        if tensor.dtype in _FP8 and name not in scales:
            kind = dtype_name(tensor.dtype, name)
            raise CheckpointError(
                f"{folder}: {name} is FP8 ({kind}) and has no scales; expected them next to it"
            )
    for name, scale in scales.items():
        if name not in tensors:
            raise CheckpointError(f"{folder}: {scale} is there and its weight {name} is not")
        weight, shape = tensors[name], tensors[scale].shape
        if weight.dtype not in _FP8:
            kind = dtype_name(weight.dtype, name)
            raise CheckpointError(f"{folder}: {scale} scales {name}, which is not FP8 but {kind}")
        if not len(weight.shape) == len(shape) == 2:
            raise CheckpointError(
                f"{folder}: expected a matrix and its scales, got {name} {weight.shape} and {scale} {shape}"
            )


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
    return (weight_MN.float() * spread_blocks(scale.float(), block, weight_MN.shape)).to(dtype)


def quantise(
    weight_MN: torch.Tensor, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as float8_e4m3fn and the fp32 scale of each block: ``weight = fp8 * scale``, so the scale is
    what checkpoints call ``weight_scale_inv``. The largest number of a block becomes the largest FP8 number;
    the last blocks may be cut short. A block of zeros has a scale of 1."""
    codes_MN, scales = quantize(weight_MN, Scaling(E4M3, block))
    return codes_MN.to(torch.float8_e4m3fn), scales.masked_fill(scales == 0, 1.0)
