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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.autograd import once_differentiable
from fsdmoe.errors import ConfigError
from fsdmoe.kernels.activations import activate
from fsdmoe.kernels.architecture import Architecture
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.permute import group_assignments
from fsdmoe.kernels.products import Grouped, Linear, Products
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
            "pip install 'fsdmoe[torchao]', or set precision.backend = \"own\""
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

    def filled_up(x: Tensor, weight_NK: Tensor) -> Tensor:
        """Rows are contracted in weight gradients: they are filled up with zeros."""
        x_TK = x.reshape(-1, x.shape[-1])
        missing = -len(x_TK) % align
        y_TN = linear(F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK, weight_NK)
        return y_TN[: len(x_TK)].view(*x.shape[:-1], len(weight_NK))

    return Products("torchao", filled_up, grouped, align, width=align)


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


# Experts


def experts_mlp_torchao(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy, max_rows: int | None, updates: LowRankUpdates
) -> Tensor:
    """``experts_mlp`` with torchao's grouped products, differentiated by autograd; nothing waits for the
    device."""
    products = policy.products
    assert products is not None
    assert products.grouped is not None
    refused = {"low-rank updates": updates, "biases": (weights.gate_up_bias, weights.down_bias)}
    for what, tensors in refused.items():
        if any(tensor is not None for tensor in tensors):
            raise ConfigError(
                f'precision.backend: expected experts without {what} for "torchao", got some; leave experts '
                "out of precision.covers"
            )
    slots = _aligned_slots(rows.ids_RK, len(weights.down_EDN), products.align, max_rows)
    flat = rows.weights_RK.reshape(-1)
    weights_M1 = torch.cat((flat, flat.new_zeros(1)))[slots.source_M].unsqueeze(-1)
    x_MD = _Gather.apply(rows.x_RD, slots.row_M, slots.slot_RK)
    z_M2N = products.grouped(x_MD, weights.gate_up_E2ND, slots.ends_E)
    h_MN = activate(z_M2N.float(), policy.activation, policy.limit)
    if not policy.weight_after:
        h_MN = h_MN * weights_M1
    y_MD = products.grouped(h_MN.to(rows.x_RD.dtype), weights.down_EDN, slots.ends_E)
    if policy.weight_after:
        y_MD = (y_MD * weights_M1).to(y_MD.dtype)
    return _Sum.apply(y_MD, slots.row_M, slots.slot_RK)


class _Slots(NamedTuple):
    """Rows laid out by expert, each expert's filled up with rows of zeros; M slots, R rows, K choices."""

    row_M: Tensor
    """The row in each slot; R: zeros."""
    source_M: Tensor
    """The choice in each slot; R * K: none."""
    slot_RK: Tensor
    """The slot of each choice; M: none."""
    ends_E: Tensor


def _aligned_slots(ids_RK: Tensor, num_experts: int, align: int, max_rows: int | None) -> _Slots:
    num_rows, num_choices = ids_RK.shape
    found = group_assignments(ids_RK, num_experts, max_assignments=max_rows)
    num_slots = (-(-found.num_slots // align) + num_experts) * align
    starts_E = torch.cat((found.ends_G.new_zeros(1), found.ends_G[:-1]))
    padded_E = (found.ends_G - starts_E + align - 1) // align * align
    ends_E = padded_E.cumsum(0, dtype=torch.int32)
    shift_E = ends_E - padded_E - starts_E
    slot_RK = (found.slots_RK + shift_E[ids_RK.clamp(min=0).long()]).long()
    slot_RK = slot_RK.masked_fill(found.slots_RK < 0, num_slots)
    none = num_rows * num_choices
    choices = torch.arange(none, device=ids_RK.device)
    source_M = choices.new_full((num_slots + 1,), none).scatter_(0, slot_RK.flatten(), choices)[:-1]
    row_M = torch.where(source_M == none, num_rows, source_M // max(num_choices, 1))
    return _Slots(row_M, source_M, slot_RK, ends_E)


def _with_zeros(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1, x.shape[1])))


class _Gather(torch.autograd.Function):
    """The row of each slot; backward sums the slots of each row, without atomics."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, row_M: Tensor, slot_RK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_RK)
        return _with_zeros(x_RD)[row_M]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        (slot_RK,) = ctx.saved_tensors
        return _with_zeros(grad_MD)[slot_RK].sum(1), None, None


class _Sum(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, row_M: Tensor, slot_RK: Tensor) -> Tensor:
        ctx.save_for_backward(row_M)
        return _with_zeros(y_MD)[slot_RK].sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_M,) = ctx.saved_tensors
        return _with_zeros(grad_RD)[row_M], None, None
