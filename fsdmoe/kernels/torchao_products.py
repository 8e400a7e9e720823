"""Products of torchao (``precision.backend = "torchao"``): of linear layers, and of experts in groups.

==================  ==========================================================================================
``fp8_tensorwise``  linear: ``torchao.float8``
``fp8_rowwise``     linear: ``torchao.float8``; experts: ``torchao.prototype.moe_training``. Scales are powers
                    of two in both
``fp8_blockwise``   linear: ``torchao.prototype.blockwise_fp8_training``. Its experts need DeepGEMM: not used
``mxfp8``           both: ``torchao.prototype.moe_training``, by kernels on Blackwell
==================  ==========================================================================================

torchao quantises operands itself, for each product, and gives the weight's gradient in the weight's format.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.architecture import Architecture
from fsdmoe.kernels.products import Grouped, Linear, Products, with_filled_rows
from fsdmoe.precision.config import Part

_LINEAR: frozenset[Part] = frozenset({"attention", "dense", "shared"})
_ALL: frozenset[Part] = frozenset({"experts", "attention", "dense", "shared"})
_FP8: dict[str, frozenset[Part]] = {
    "fp8_tensorwise": _LINEAR, "fp8_rowwise": _ALL, "fp8_blockwise": _LINEAR,
}  # fmt: skip
_COVERED: dict[Architecture, dict[str, frozenset[Part]]] = {
    "hopper": _FP8,
    "blackwell": {**_FP8, "mxfp8": _ALL},
}
_EMULATED: dict[str, frozenset[Part]] = {"fp8_tensorwise": _LINEAR, "fp8_rowwise": _LINEAR, "mxfp8": _ALL}
INSTALL_TORCHAO = "pip install 'fsdmoe[torchao]'"


def torchao_parts(recipe: str, on: Architecture | None, *, emulate: bool = False) -> frozenset[Part]:
    """What torchao computes of a recipe: by kernels on a GPU of this architecture (None: there is none), or
    by its own emulation."""
    found = frozenset() if on is None else _COVERED.get(on, {}).get(recipe, frozenset())
    return found | (_EMULATED.get(recipe, frozenset()) if emulate else frozenset())


def require_torchao() -> None:
    """Refuse what needs torchao where it is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "precision.backend: expected torchao to be installed, found no such package; "
            f'{INSTALL_TORCHAO}, or set precision.backend = "own"'
        )


def torchao_products(recipe: str, on: Architecture | None) -> Products:
    """For a GPU of this architecture; what it has no kernels for is emulated by torchao."""
    require_torchao()
    is_emulated = not torchao_parts(recipe, on)
    align = {"mxfp8": 32, "fp8_blockwise": 128}.get(recipe, 16)
    grouped: Grouped | None = None
    if recipe == "mxfp8":
        linear, grouped = _mxfp8(is_emulated)
    elif recipe == "fp8_blockwise":
        linear = _blockwise(use_triton=on != "hopper")
    else:
        linear = _float8(recipe.removeprefix("fp8_"), is_emulated)
        grouped = _rowwise_grouped() if recipe == "fp8_rowwise" and not is_emulated else None

    return Products("torchao", with_filled_rows(linear, align), grouped, align, width=align)


def _float8(name: str, is_emulated: bool) -> Linear:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=is_emulated)
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    products = LinearMMConfig(
        *(ScaledMMConfig(is_emulated, gemm.use_fast_accum, False, config.pad_inner_dim) for gemm in gemms)
    )

    def linear(x: Tensor, weight_NK: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight_NK.t(), products, config)

    return linear


def _blockwise(*, use_triton: bool) -> Linear:
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    def linear(x: Tensor, weight_NK: Tensor) -> Tensor:
        return fp8_blockwise_mm.apply(x, weight_NK, 128, x.dtype, use_triton)

    return linear


def _rowwise_grouped() -> Grouped:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    def grouped(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
        return _to_fp8_rowwise_then_scaled_grouped_mm(
            x_MK, weight_ENK.transpose(1, 2), ends_E, pad_token_groups_for_grouped_mm=False
        )

    return grouped


def _mxfp8(is_emulated: bool) -> tuple[Linear, Grouped]:
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config as mx
    from torchao.quantization.quantize_.common import KernelPreference

    preference = KernelPreference.EMULATED if is_emulated else KernelPreference.AUTO
    rows = mx.MXFP8Dim0CastKernelChoice.TORCH if is_emulated else mx.MXFP8Dim0CastKernelChoice.TRITON
    columns = mx.MXFP8Dim1CastKernelChoice.TORCH if is_emulated else mx.MXFP8Dim1CastKernelChoice.CUDA
    element = torch.float8_e4m3fn
    scales = mx.ScaleCalculationMode.RCEIL

    def linear(x: Tensor, weight_NK: Tensor) -> Tensor:
        formats = (element, element, element, 32)
        return mx_mm.apply(x, weight_NK, *formats, preference, rows, columns, scales, False)

    def grouped(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
        return _to_mxfp8_then_scaled_grouped_mm(
            x_MK, weight_ENK.transpose(1, 2), ends_E, out_dtype=x_MK.dtype, kernel_preference=preference,
            scale_calculation_mode=scales,
        )  # fmt: skip

    return linear, grouped
