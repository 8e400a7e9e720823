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
        return _TeProduct.apply(x_TK, weight_NK, _TeLinear(calls), torch.is_grad_enabled())

    def grouped(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
        groups = _TeGroups.of(calls, ends_E.tolist())
        return _TeProduct.apply(x_MK, weight_ENK, groups, torch.is_grad_enabled())

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
        self.gemm = library.gemm
        self._library = library
        operands: tuple[Operand, ...] = ("input", "weight", "grad")
        self.quantizers = {
            (operand, transposed): _quantizer(library.pytorch, recipe, operand, transposed)
            for operand in operands
            for transposed in (False, True)
        }
        # As its recipes have it: sums of fewer bits in forward, by one scale an operand.
        self.splits_sums = recipe != "fp8_tensorwise"

    def group_codes(self, x: Tensor, sizes: list[int], operand: Operand, *, transposed: bool) -> list[Any]:
        """Of each group of rows by itself."""
        quantizers = [self.quantizers[operand, transposed]] * len(sizes)
        return self._library.extension.split_quantize(x, sizes, quantizers)

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


class _TeLinear(NamedTuple):
    """The three products of one weight."""

    calls: _TeCalls

    def codes(self, x: Tensor, operand: Operand, *, transposed: bool) -> list[Any]:
        """Of a matrix: for products that contract its rows' elements, and if ``transposed`` its columns'."""
        return [self.calls.quantizers[operand, transposed](x.contiguous())]

    def weight(self, weight_NK: Tensor, *, transposed: bool) -> list[Any]:
        return [self.calls.quantizers["weight", transposed](weight_NK)]

    def forward(self, x: list[Any], weight: list[Any], like_TK: Tensor, width: int) -> Tensor:
        return self.calls.gemm.general_gemm(
            *weight, *x, like_TK.dtype, layout="TN", use_split_accumulator=self.calls.splits_sums
        )[0]

    def dgrad(self, dy: list[Any], weight: list[Any], like_TN: Tensor, width: int) -> Tensor:
        return self.calls.gemm.general_gemm(
            *weight, *dy, like_TN.dtype, layout="NN", grad=True, use_split_accumulator=True
        )[0]

    def wgrad(self, dy: list[Any], x: list[Any], out: Tensor, accumulate: bool) -> None:
        self.calls.gemm.general_gemm(
            *x, *dy, out.dtype, layout="NT", grad=True, use_split_accumulator=True, out=out,
            accumulate=accumulate,
        )  # fmt: skip


class _TeGroups(NamedTuple):
    """Those of the experts' weights, each with its group of rows. The host knows how many rows each group
    has: it starts a product for each."""

    calls: _TeCalls
    filled: list[int]
    """Experts that have rows."""
    sizes: list[int]
    """Their rows."""

    @classmethod
    def of(cls, calls: _TeCalls, ends: list[int]) -> _TeGroups:
        sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        filled = [expert for expert, size in enumerate(sizes) if size]
        return cls(calls, filled, [sizes[expert] for expert in filled])

    def codes(self, x: Tensor, operand: Operand, *, transposed: bool) -> list[Any]:
        x = x[: sum(self.sizes)].contiguous()
        return self.calls.group_codes(x, self.sizes, operand, transposed=transposed)

    def weight(self, weight_ENK: Tensor, *, transposed: bool) -> list[Any]:
        num_experts, num_out, _ = weight_ENK.shape
        rows, sizes = weight_ENK.flatten(0, 1), [num_out] * num_experts
        codes = self.calls.group_codes(rows, sizes, "weight", transposed=transposed)
        return [codes[expert] for expert in self.filled]

    def forward(self, x: list[Any], weight: list[Any], like_MK: Tensor, width: int) -> Tensor:
        y_MN = like_MK.new_empty(len(like_MK), width)
        self._multiply(
            weight, x, [y_MN], layout="TN", single_output=True, use_split_accumulator=self.calls.splits_sums
        )
        return y_MN

    def dgrad(self, dy: list[Any], weight: list[Any], like_MN: Tensor, width: int) -> Tensor:
        dx_MK = like_MN.new_empty(len(like_MN), width)
        self._multiply(
            weight, dy, [dx_MK], layout="NN", single_output=True, grad=True, use_split_accumulator=True
        )
        return dx_MK

    def wgrad(self, dy: list[Any], x: list[Any], out_ENK: Tensor, accumulate: bool) -> None:
        if not accumulate and len(self.filled) < len(out_ENK):
            out_ENK.zero_()  # of experts without rows
        out = [out_ENK[expert] for expert in self.filled]
        self._multiply(x, dy, out, layout="NT", grad=True, accumulate=accumulate, use_split_accumulator=True)

    def _multiply(self, first: list[Any], second: list[Any], out: list[Tensor], **options: Any) -> None:
        if self.filled:
            blank = [None] * len(self.filled)
            self.calls.gemm.general_grouped_gemm(
                first, second, out, blank, out[0].dtype, m_splits=self.sizes, **options
            )


class _TeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: _TeLinear | _TeGroups, keeps: bool) -> Tensor:
        keeps_x = keeps and ctx.needs_input_grad[1]
        codes = by.codes(x, "input", transposed=keeps_x)
        y = by.forward(codes, by.weight(weight, transposed=False), x, weight.shape[-2])
        ctx.by, ctx.sink = by, sink_of(weight)
        ctx.codes = codes if keeps_x else []
        ctx.save_for_backward(weight, *by.calls.saved(ctx.codes))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        by: _TeLinear | _TeGroups = ctx.by
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        codes = by.codes(dy, "grad", transposed=needs_weight)
        dx = None
        if needs_x:
            dx = by.dgrad(codes, by.weight(weight, transposed=True), dy, weight.shape[-1])
        gradient = Gradient(weight, ctx.sink)
        place = gradient.place() if needs_weight else None
        if place is not None:
            by.calls.restore(ctx.codes, saved)
            by.wgrad(codes, ctx.codes, *place)
            by.calls.saved(ctx.codes)  # taken out again: the node may live longer than what it saved
        return dx, gradient.for_autograd, None, None
