"""Folders of quantisation-aware training (``precision.qat``): weights in the format that forward saw.

======================  ======================================================================================
experts of gpt-oss      MXFP4 as its released weights have it (:mod:`fsdmoe.checkpoint.gpt_oss`)
everything else         compressed-tensors, matrix by matrix: codes in ``weight_packed`` (fp8: ``weight``),
                        with ``weight_scale``, and ``weight_shape`` or ``weight_global_scale``
======================  ======================================================================================

A checkpoint holds weights that are not rounded, and says in ``qat`` which ones were rounded, to what, and in
which dtype they were computed. Codes are made by the function that training rounds with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.checkpoint.dtypes import dtype_name, dtype_named
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.gpt_oss import BLOCKS as MXFP4_BLOCKS
from fsdmoe.checkpoint.gpt_oss import FP4, SCALES
from fsdmoe.checkpoint.hf_names import Piece
from fsdmoe.checkpoint.saved_box import Boxes, SavedBox
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.precision.deployed_formats import BLOCKS, Coded, WeightRounding, encode
from fsdmoe.precision.formats import DeployedFormat

_EXPONENT_BIAS = 127
_SCHEMES: dict[DeployedFormat, tuple[str, Tree]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8",
         "zp_dtype": "torch.uint8"},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
         "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
    ),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
}  # fmt: skip
"""compressed-tensors' names: of the layout, and of what is in it."""


class RoundedWeights(NamedTuple):
    """The weights of a checkpoint that were rounded in training."""

    format: DeployedFormat
    dtype: torch.dtype
    """What they were computed in."""
    names: frozenset[str]
    """In memory."""


def describe_roundings(roundings: Mapping[str, WeightRounding]) -> Tree:
    """For a checkpoint; a model has one format."""
    first = next(iter(roundings.values()))
    dtype = dtype_name(first.dtype, "precision.param_dtype")
    return {"format": first.format, "dtype": dtype, "weights": sorted(roundings)}


def read_roundings(about: Tree) -> RoundedWeights | None:
    """What a checkpoint says of itself; None where nothing was rounded."""
    found = about.get("qat")
    if found is None:
        return None
    if found["format"] not in _SCHEMES:
        raise CheckpointError(f"qat: expected one of {', '.join(_SCHEMES)}, got {found['format']!r}")
    return RoundedWeights(found["format"], dtype_named(found["dtype"], "qat"), frozenset(found["weights"]))


def coded_boxes(
    piece: Piece, whole: tuple[int, ...], rounded: RoundedWeights, read: Callable[[], Tensor]
) -> Boxes:
    """What is written in place of one tensor. ``whole``: the shape in memory of what it is a piece of;
    ``read`` gives all rows of its matrices, contracted elements last."""
    if len(piece.disk_shape) == 3:  # of gpt-oss: others are refused before they are trained
        return _gpt_oss_boxes(piece, rounded, read)
    if piece.sizes[-1] != whole[-1] or not piece.disk.endswith(".weight"):
        raise CheckpointError(
            f"{piece.disk}: expected whole rows of a matrix by the name of weight, got a piece "
            f"{piece.sizes} of {piece.memory} {whole}, which compressed-tensors cannot say"
        )
    rows = slice(piece.low[-2], piece.low[-2] + piece.sizes[-2])

    def make() -> dict[str, Tensor]:
        return _packed(encode(read().to(rounded.dtype), rounded.format), rounded.format, rows)

    base = piece.disk.removesuffix("weight")
    made = MadeOnce(make)
    kinds = _stored(rounded, piece.sizes[-2], piece.sizes[-1])
    return {
        SavedBox.whole(base + ending, shape, dtype): partial(made.take, ending)
        for ending, (shape, dtype) in kinds.items()
    }


class MadeOnce:
    """Tensors that come from one computation, each taken once."""

    def __init__(self, make: Callable[[], dict[str, Tensor]]) -> None:
        self._make = make
        self._made: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        if name not in self._made:
            self._made = self._make()
        return self._made.pop(name)


def _stored(
    rounded: RoundedWeights, rows: int, columns: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what a matrix becomes."""
    scales = (rows, columns // (BLOCKS[rounded.format] or columns))
    if rounded.format == "fp8":
        return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": (scales, rounded.dtype)}
    if rounded.format == "int4":
        return {
            "weight_packed": ((rows, columns // 8), torch.int32),
            "weight_scale": (scales, rounded.dtype),
            "weight_shape": ((2,), torch.int64),
        }
    packed = ((rows, columns // 2), torch.uint8)
    if rounded.format == "mxfp4":
        return {"weight_packed": packed, "weight_scale": (scales, torch.uint8)}
    return {
        "weight_packed": packed,
        "weight_scale": (scales, torch.float8_e4m3fn),
        "weight_global_scale": ((1,), torch.float32),
    }


def _packed(coded: Coded, kind: DeployedFormat, rows: slice) -> dict[str, Tensor]:
    """The same as tensors, of some rows of a matrix."""
    codes = coded.codes_RC.reshape(-1, coded.codes_RC.shape[-1])[rows]
    scales = coded.scales_RB.reshape(-1, coded.scales_RB.shape[-1])[rows]
    if kind == "fp8":
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scales}
    if kind == "int4":
        # Eight a word, the first in the lowest bits: on a little-endian host two a byte, the first low.
        packed = _nibbles((codes + 8).to(torch.uint8)).view(torch.int32)
        return {
            "weight_packed": packed,
            "weight_scale": scales.contiguous(),
            "weight_shape": torch.tensor(codes.shape),
        }
    packed = _nibbles(_fp4_codes(codes))
    if coded.divisor is None:
        return {"weight_packed": packed, "weight_scale": _exponents(scales)}
    divisor = coded.divisor.reshape(1)
    return {
        "weight_packed": packed,
        "weight_scale": scales.to(torch.float8_e4m3fn),
        "weight_global_scale": divisor,
    }


def _gpt_oss_boxes(piece: Piece, rounded: RoundedWeights, read: Callable[[], Tensor]) -> Boxes:
    def make() -> dict[str, Tensor]:
        coded = [encode(matrix.to(rounded.dtype), "mxfp4") for matrix in read()]
        packed = torch.stack([_nibbles(_fp4_codes(each.codes_RC)) for each in coded])
        scales = torch.stack([_exponents(each.scales_RB) for each in coded])
        return {MXFP4_BLOCKS: packed.unflatten(-1, (-1, 16)), SCALES: scales}

    made = MadeOnce(make)
    experts, columns, rows = piece.disk_shape
    scales = (experts, rows, columns // 32)
    return {
        SavedBox.whole(piece.disk + ending, shape, torch.uint8): partial(made.take, ending)
        for ending, shape in ((MXFP4_BLOCKS, (*scales, 16)), (SCALES, scales))
    }


def _nibbles(values: Tensor) -> Tensor:
    """Two numbers of four bits a byte, the first in the low half."""
    return values[..., 0::2] | values[..., 1::2] << 4


def _fp4_codes(values: Tensor) -> Tensor:
    index = torch.bucketize(values.abs().contiguous(), torch.tensor(FP4)).to(torch.uint8)
    return index | values.signbit().to(torch.uint8) << 3


def _exponents(powers: Tensor) -> Tensor:
    return (torch.frexp(powers).exponent - 1 + _EXPONENT_BIAS).to(torch.uint8)


def quantization_config(rounded: RoundedWeights, kept: Iterable[str], *, is_gpt_oss: bool) -> Tree:
    """For config.json. ``kept``: names on disk of matrices that are not rounded."""
    names = sorted(name.removesuffix(".weight") for name in kept if name.endswith(".weight"))
    if is_gpt_oss:
        return {"quant_method": "mxfp4", "modules_to_not_convert": names}
    layout, weights = _SCHEMES[rounded.format]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights | {"symmetric": True, "dynamic": False},
                "input_activations": None,
                "output_activations": None,
                "format": layout,
            }
        },
        "ignore": names,
    }
