"""Products of NVIDIA's Transformer Engine (``precision.backend = "te"``): of linear layers, and of experts in
groups.

==================  ==========================================================================================
``fp8_tensorwise``  ``Float8CurrentScaling``: E4M3, gradients E5M2; in experts, one scale for an expert's
``fp8_blockwise``   ``Float8BlockScaling`` with float32 scales: rows 1 x 128, weights 128 x 128, and both
                    operands of weight gradients 128 x 1. Hopper only
``mxfp8``           ``MXFP8BlockScaling``. Blackwell only
``nvfp4``           ``NVFP4BlockScaling``: weights 16 x 16, a random Hadamard transform for weight gradients,
                    stochastic rounding of gradients. Blackwell only
==================  ==========================================================================================

These are the quantisers and products below Transformer Engine's modules: weights stay where fsdmoe has them,
and their gradients are written into the buffers that are reduced. The input is quantised once, as rows and
transposed, and its transposed codes are what backward keeps; a weight is quantised in forward and again in
backward, since codes that are kept would be the model unsharded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.architecture import Architecture
from fsdmoe.kernels.expert_autograd import Gradient
from fsdmoe.kernels.grad_sink import sink_of
from fsdmoe.kernels.products import Products, with_filled_rows
from fsdmoe.precision.config import Part

_ALL: frozenset[Part] = frozenset({"experts", "attention", "dense", "shared"})
_COVERED: dict[Architecture, tuple[str, ...]] = {
    "hopper": ("fp8_tensorwise", "fp8_blockwise"),
    "blackwell": ("fp8_tensorwise", "mxfp8", "nvfp4"),
}
_ALIGN = {"mxfp8": 32, "nvfp4": 128}
"""Rows of a group, as Transformer Engine fills them up; 16 by any other recipe."""
_WIDTH = {"fp8_blockwise": 128, "mxfp8": 32, "nvfp4": 128}
INSTALL_TE = "pip install --no-build-isolation 'fsdmoe[te]'"
"""Its extension is compiled against the torch that is installed."""
Operand = Literal["input", "weight", "grad"]


def te_parts(recipe: str, on: Architecture | None, *, emulate: bool = False) -> frozenset[Part]:
    """What Transformer Engine computes of a recipe on a GPU of this architecture. It emulates nothing."""
    return _ALL if on is not None and recipe in _COVERED.get(on, ()) else frozenset()


def require_te() -> None:
    """Refuse what needs Transformer Engine where it is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "precision.backend: expected Transformer Engine to be installed, found no such package; "
            f'{INSTALL_TE}, or set precision.backend = "own"'
        )


def te_products(recipe: str, on: Architecture | None) -> Products:
    """For a GPU of this architecture."""
    require_te()
    if not te_parts(recipe, on):
        raise AssertionError(f"expected a recipe of Transformer Engine for {on}, got {recipe}")
    calls = _TeCalls(_library(), recipe)

    def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return _TeLinear.apply(x_TK, weight_NK, calls, torch.is_grad_enabled())

    def grouped(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
        return _TeGrouped.apply(x_MK, weight_ENK, ends_E, calls, torch.is_grad_enabled())

    align = _ALIGN.get(recipe, 16)
    width = _WIDTH.get(recipe, 16)
    return Products("Transformer Engine", with_filled_rows(linear, align), grouped, align, width)


class _TeModules(NamedTuple):
    """The modules of Transformer Engine that this file takes anything from."""

    pytorch: Any
    """Quantisers, and what saves their codes for backward."""
    gemm: Any
    """``general_gemm`` and ``general_grouped_gemm``."""
    extension: Any
    """The compiled part: ``split_quantize``."""


@functools.cache
def _library() -> _TeModules:
    try:
        pytorch = importlib.import_module("transformer_engine.pytorch")
        gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        extension = importlib.import_module("transformer_engine_torch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # what its own checks raise
        raise ConfigError(
            "precision.backend: expected a Transformer Engine that loads with torch "
            f"{torch.__version__}, got {type(error).__name__}: {error}; its extension is compiled against "
            "the torch that is installed: pip install --no-build-isolation --force-reinstall --no-deps "
            'transformer_engine_torch, or set precision.backend = "own"'
        ) from error
    return _TeModules(pytorch, gemm, extension)


class _TeCalls:
    """Transformer Engine's calls by one recipe. They know no shapes and hold no tensors."""

    def __init__(self, library: _TeModules, recipe: str) -> None:
        self._library = library
        operands: tuple[Operand, ...] = ("input", "weight", "grad")
        self._quantizers = {
            (operand, transposed): _quantizer(library.pytorch, recipe, operand, transposed)
            for operand in operands
            for transposed in (False, True)
        }
        # As its recipes have it: sums of fewer bits in forward, by one scale an operand.
        self._splits_sums = recipe != "fp8_tensorwise"

    def codes(self, x: Tensor, operand: Operand, *, transposed: bool) -> Any:
        """Of a matrix: for products that contract its rows' elements, and if ``transposed`` its columns'."""
        return self._quantizers[operand, transposed](x)

    def group_codes(self, x: Tensor, sizes: list[int], operand: Operand, *, transposed: bool) -> list[Any]:
        """Of each group of rows by itself."""
        quantizers = [self._quantizers[operand, transposed]] * len(sizes)
        return self._library.extension.split_quantize(x, sizes, quantizers)

    def forward(self, x: Any, weight: Any, dtype: torch.dtype) -> Tensor:
        return self._library.gemm.general_gemm(
            weight, x, dtype, layout="TN", use_split_accumulator=self._splits_sums
        )[0]

    def dgrad(self, dy: Any, weight: Any, dtype: torch.dtype) -> Tensor:
        return self._library.gemm.general_gemm(
            weight, dy, dtype, layout="NN", grad=True, use_split_accumulator=True
        )[0]

    def wgrad(self, dy: Any, x: Any, out: Tensor, accumulate: bool) -> None:
        self._library.gemm.general_gemm(
            x, dy, out.dtype, layout="NT", grad=True, use_split_accumulator=True, out=out,
            accumulate=accumulate,
        )  # fmt: skip

    def group_forward(self, x: list[Any], weight: list[Any], out_MN: Tensor, sizes: list[int]) -> None:
        self._library.gemm.general_grouped_gemm(
            weight, x, [out_MN], [None] * len(x), out_MN.dtype, layout="TN", m_splits=sizes,
            single_output=True, use_split_accumulator=self._splits_sums,
        )  # fmt: skip

    def group_dgrad(self, dy: list[Any], weight: list[Any], out_MK: Tensor, sizes: list[int]) -> None:
        self._library.gemm.general_grouped_gemm(
            weight, dy, [out_MK], [None] * len(dy), out_MK.dtype, layout="NN", m_splits=sizes,
            single_output=True, grad=True, use_split_accumulator=True,
        )  # fmt: skip

    def group_wgrad(
        self, dy: list[Any], x: list[Any], out: list[Tensor], sizes: list[int], accumulate: bool
    ) -> None:
        self._library.gemm.general_grouped_gemm(
            x, dy, out, [None] * len(x), out[0].dtype, layout="NT", m_splits=sizes, grad=True,
            accumulate=accumulate, use_split_accumulator=True,
        )  # fmt: skip

    def saved(self, codes: list[Any]) -> list[Tensor | None]:
        """The tensors of codes of which the transposed half alone is needed, taken out of them."""
        for each in codes:
            each.update_usage(rowwise_usage=False, columnwise_usage=True)
        return self._library.pytorch.prepare_for_saving(*codes)[0]

    def restore(self, codes: list[Any], tensors: list[Tensor | None]) -> None:
        """Put them back."""
        self._library.pytorch.restore_from_saved(codes, tensors)


def _quantizer(te: Any, recipe: str, operand: Operand, transposed: bool) -> Any:
    """Rows are always made: its kernels make transposed codes next to them only."""
    made = {"rowwise": True, "columnwise": transposed}
    e4m3 = te.DType.kFloat8E4M3
    match recipe:
        case "fp8_tensorwise":
            element = te.DType.kFloat8E5M2 if operand == "grad" else e4m3
            quantizer = te.Float8CurrentScalingQuantizer(element, torch.device("cuda"), **made)
        case "fp8_blockwise":
            num_dims = 2 if operand == "weight" else 1
            quantizer = te.Float8BlockQuantizer(
                e4m3, **made, force_pow_2_scales=False, block_scaling_dim=num_dims
            )
        case "mxfp8":
            quantizer = te.MXFP8Quantizer(e4m3, **made)
        case "nvfp4":
            is_weight = operand == "weight"
            quantizer = te.NVFP4Quantizer(
                **made, with_rht=not is_weight, with_post_rht_amax=not is_weight,
                with_2d_quantization=is_weight, stochastic_rounding=operand == "grad",
            )  # fmt: skip
        case _:
            raise AssertionError(f"expected a recipe of Transformer Engine, got {recipe}")
    quantizer.internal = True  # codes that only its products see: no tensor subclass around them
    return quantizer


class _TeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, calls: _TeCalls, keeps: bool) -> Tensor:
        keeps_x = keeps and ctx.needs_input_grad[1]
        x = calls.codes(x_TK.contiguous(), "input", transposed=keeps_x)
        weight = calls.codes(weight_NK, "weight", transposed=False)
        y_TN = calls.forward(x, weight, x_TK.dtype)
        ctx.calls, ctx.sink = calls, sink_of(weight_NK)
        ctx.codes = [x] if keeps_x else []
        ctx.save_for_backward(weight_NK, *calls.saved(ctx.codes))
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        weight_NK, *saved = ctx.saved_tensors
        calls: _TeCalls = ctx.calls
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dy = calls.codes(dy_TN.contiguous(), "grad", transposed=needs_weight)
        dx_TK = None
        if needs_x:
            weight = calls.codes(weight_NK, "weight", transposed=True)
            dx_TK = calls.dgrad(dy, weight, dy_TN.dtype)
            del weight
        gradient = Gradient(weight_NK, ctx.sink)
        place = gradient.place() if needs_weight else None
        if place is not None:
            calls.restore(ctx.codes, saved)
            calls.wgrad(dy, ctx.codes[0], *place)
            calls.saved(ctx.codes)  # taken out again: the node may live longer than what it saved
        return dx_TK, gradient.for_autograd, None, None


class _TeGrouped(torch.autograd.Function):
    """The host waits for the device to learn how many rows each group has: it starts a product for each."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor, calls: _TeCalls, keeps: bool
    ) -> Tensor:
        ends = ends_E.tolist()
        sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        keeps_x = keeps and ctx.needs_input_grad[1]
        filled = [expert for expert, size in enumerate(sizes) if size]
        num_rows = [sizes[expert] for expert in filled]
        x = calls.group_codes(x_MK[: ends[-1]], num_rows, "input", transposed=keeps_x)
        weight = _weight_codes(calls, weight_ENK, filled, transposed=False)
        y_MN = x_MK.new_empty(len(x_MK), weight_ENK.shape[1])
        if filled:
            calls.group_forward(x, weight, y_MN, num_rows)
        ctx.calls, ctx.sink, ctx.filled, ctx.num_rows = calls, sink_of(weight_ENK), filled, num_rows
        ctx.codes = x if keeps_x else []
        ctx.save_for_backward(weight_ENK, *calls.saved(ctx.codes))
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        weight_ENK, *saved = ctx.saved_tensors
        calls: _TeCalls = ctx.calls
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dy = calls.group_codes(
            dy_MN[: sum(ctx.num_rows)].contiguous(), ctx.num_rows, "grad", transposed=needs_weight
        )
        dx_MK = None
        if needs_x:
            dx_MK = dy_MN.new_empty(len(dy_MN), weight_ENK.shape[2])
            if ctx.filled:
                weight = _weight_codes(calls, weight_ENK, ctx.filled, transposed=True)
                calls.group_dgrad(dy, weight, dx_MK, ctx.num_rows)
                del weight
        gradient = Gradient(weight_ENK, ctx.sink)
        place = gradient.place() if needs_weight else None
        if place is not None:
            buffer_ENK, accumulate = place
            if not accumulate and len(ctx.filled) < len(buffer_ENK):
                buffer_ENK.zero_()  # of experts without rows
            calls.restore(ctx.codes, saved)
            if ctx.filled:
                out = [buffer_ENK[expert] for expert in ctx.filled]
                calls.group_wgrad(dy, ctx.codes, out, ctx.num_rows, accumulate)
            calls.saved(ctx.codes)  # taken out again: the node may live longer than what it saved
        return dx_MK, gradient.for_autograd, None, None, None


def _weight_codes(calls: _TeCalls, weight_ENK: Tensor, filled: list[int], *, transposed: bool) -> list[Any]:
    """Of the experts that have rows."""
    num_experts, num_out, _ = weight_ENK.shape
    rows = weight_ENK.flatten(0, 1)
    codes = calls.group_codes(rows, [num_out] * num_experts, "weight", transposed=transposed)
    return [codes[expert] for expert in filled]
