"""Quantised weights of folders as ordinary numbers: FP8 with block scales (DeepSeek-V3's), which are written
too, and int4 of compressed-tensors.

::

    X.weight         F8_E4M3 [M, N]        X.weight_scale_inv  F32  [M / 128, N / 128]
    X.weight_packed  I32     [M, N / 8]    X.weight_scale      BF16 [M, N / group]     X.weight_shape
"""

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
PACKED, PACKED_SCALE = ".weight_packed", ".weight_scale"
PACKED_SUFFIXES = (PACKED, PACKED_SCALE, ".weight_shape")
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


def group_size(where: str, config: Tree) -> int:
    """Of a folder of compressed-tensors in int4, by its ``quantization_config``; CheckpointError for every
    other form of it."""
    stated = config.get("quantization_config") or {}
    groups = [each.get("weights") or {} for each in (stated.get("config_groups") or {}).values()]
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    is_known = stated.get("format") == "pack-quantized" and bool(groups)
    size = groups[0].get("group_size") if groups else None
    for group in groups:
        is_known &= wanted.items() <= group.items() and group.get("group_size") == size
        is_known &= not group.get("actorder")
    if not is_known or type(size) is not int or size <= 0:
        raise CheckpointError(
            f"{where}: expected compressed-tensors in the format pack-quantized, symmetric int4 weights in "
            f"groups of one size, got format {stated.get('format')!r} with {groups}; dequantise it with "
            "transformers first"
        )
    return size


def int4_bytes(packed_MN: torch.Tensor) -> torch.Tensor:
    """Packed int32 as bytes ``[M, N / 2]``: two's complement, the first of two elements in the low half."""
    return packed_MN.contiguous().view(torch.uint8) ^ 0x88


def dequantise_int4(packed_MN: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``(code - 8) * scale`` in float32, with one scale for each group of a row."""
    codes = packed_MN.contiguous().view(torch.uint8)
    values = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() - 8
    groups = values.unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)
    return groups.flatten(-2)


def quantise(
    weight_MN: torch.Tensor, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as float8_e4m3fn and the fp32 scale of each block: ``weight = fp8 * scale``, so the scale is
    what checkpoints call ``weight_scale_inv``. The largest number of a block becomes the largest FP8 number;
    the last blocks may be cut short. A block of zeros has a scale of 1."""
    codes_MN, scales = quantize(weight_MN, Scaling(E4M3, block))
    return codes_MN.to(torch.float8_e4m3fn), scales.masked_fill(scales == 0, 1.0)
