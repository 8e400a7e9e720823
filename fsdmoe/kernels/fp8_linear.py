"""The parts of a linear layer on matrix products in fp8: what a recipe rounds, computed by the matrix units.
:mod:`fsdmoe.kernels.fp8_linears` makes layers of them.

=====================  =======================================================================================
forward                x as it lies, the weight as it lies
backward               dy both ways round in one pass; the weight transposed; x transposed
kept for backward      x in its own precision, which layers side by side share, or the codes of forward
                       (``memory.keep``); and the few scales that its transpose takes over from forward
=====================  =======================================================================================

Layers that read the same tensor (q, k, v; gate and up) quantise it once: the last one is remembered. A weight
is quantised once for as long as it does not change, where it stays in memory whole; one that is gathered for
every use is quantised when it is used, unless it comes quantised (``precision.quantized_weights``).

Sizes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.core.capturing import is_capturing
from fsdmoe.kernels.fp8_operands import (
    Both,
    Operand,
    Wanted,
    as_operand,
    is_blockwise,
    padding_of,
    scales_of_all_tokens,
    takes_products,
    takes_shape,
)
from fsdmoe.kernels.fp8_quantize import decode, quantize_both, transpose_codes
from fsdmoe.kernels.grad_sink import sink_of
from fsdmoe.kernels.scaled_matmul import scaled_matmul
from fsdmoe.precision.formats import Recipe, Scaling
from fsdmoe.precision.operand_state import Watch
from fsdmoe.precision.quantized_weight import WeightScales, scales_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supports_linear(recipe: Recipe, x: Tensor, weight_NK: Tensor) -> bool:
    """Whether products in fp8 take this recipe and these shapes; the device is the caller's to ask."""
    if x.dtype not in _DTYPES or not x.numel():
        return False
    return takes_products(recipe) and takes_shape(recipe, *weight_NK.shape)


def codes_of(weight_NK: Tensor, kept: KeptCodes | None) -> GivenCodes:
    """Where the codes of a weight are: its own, kept by its layer, or nowhere yet. Refuses a quantised weight
    whose gradient nobody takes."""
    scales = scales_of(weight_NK)
    if scales is None:
        return kept
    if weight_NK.requires_grad and torch.is_grad_enabled() and sink_of(weight_NK) is None:
        raise RuntimeError("the gradient of a quantised weight has no place to go: it is not sharded")
    return scales


def forward_product(
    x: Tensor, weight_NK: Tensor, recipe: Recipe, given: GivenCodes, watch: Watch
) -> tuple[Tensor, InputCodes]:
    """``y``, and what x was quantised to."""
    x_TK, scaling = x.reshape(-1, x.shape[-1]), recipe.forward.first
    # A frozen weight has no gradient that would read x transposed.
    transposed = _second(recipe.wgrad) if weight_NK.requires_grad else None

    def make() -> InputCodes:
        rows, _ = quantize_both(x_TK, Wanted(scaling), None)
        assert rows is not None
        return InputCodes(rows, None if transposed is None else scales_of_all_tokens(rows, transposed))

    made = _inputs.get(x, (scaling, transposed), make)
    watch.collect_in_forward("input", x_TK, scaling)
    plain = _plain_weight(weight_NK, recipe, given)
    if not isinstance(given, WeightScales):
        watch.collect_in_forward("weight", weight_NK, recipe.forward.second)
    y_TN = scaled_matmul(made.rows, plain, x.dtype)[: len(x_TK), : len(weight_NK)]
    return y_TN.view(*x.shape[:-1], -1), made


def quantize_gradient(grad_y: Tensor, recipe: Recipe, watch: Watch, *, rows: bool, transposed: bool) -> Both:
    grad_y_TN = grad_y.reshape(-1, grad_y.shape[-1])
    if padding := padding_of(recipe, grad_y.shape[-1]):
        grad_y_TN = F.pad(grad_y_TN, (0, padding))
    of_rows = Wanted(recipe.dgrad.first) if rows else None
    of_transposed = Wanted(recipe.wgrad.first) if transposed else None
    if of_rows is not None:
        watch.collect("grad", grad_y_TN, of_rows.scaling)
    if of_transposed is not None:
        watch.collect("grad", grad_y_TN.t(), of_transposed.scaling)
    return quantize_both(grad_y_TN, of_rows, of_transposed)


def input_gradient(rows: Operand, shape: torch.Size, dtype: torch.dtype, weight_KN: Operand) -> Tensor:
    """In the shape and precision of the input."""
    grad_x = scaled_matmul(rows, weight_KN, dtype)
    return grad_x[: math.prod(shape[:-1])].view(shape)


class KeptInput(NamedTuple):
    """What backward has of an input."""

    values: Tensor
    """Or codes, of as many rows as products take."""
    code_scales: Tensor | None
    """Of codes, 1 x 128."""
    transposed_scales: Tensor | None
    """Where they are known by now."""

    def rows(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """``[T, K]``."""
        if self.code_scales is None:
            return self.values.reshape(-1, shape[-1])
        return decode(Operand(self.values, self.code_scales, "block"), dtype)[: math.prod(shape[:-1])]

    def transposed(self, recipe: Recipe, shape: torch.Size, dtype: torch.dtype, watch: Watch) -> Operand:
        """The operand of the weight gradient."""
        scaling = _second(recipe.wgrad)

        def make() -> Both:
            return quantize_both(self.rows(shape, dtype), None, Wanted(scaling, self.transposed_scales))

        both = _transposed_inputs.get(self.values, scaling, make)
        if watch.counts:
            watch.collect("input", self.rows(shape, dtype).t(), scaling)
        assert both.transposed is not None
        return both.transposed


def _second(product: Any) -> Scaling:
    assert product.second is not None
    return product.second


# Weights


class KeptCodes:
    """The codes of a weight that stays in memory whole, both ways round: made once for as long as it does not
    change."""

    def __init__(self, version: Callable[[], int]) -> None:
        """``version``: another number once the weight has other values. Autograd's own counter is not enough:
        it misses what is written through ``.data``."""
        self._version = version
        self._key: tuple[int, Scaling, Scaling] | None = None
        self._both = Both(None, None)

    def both(self, weight_NK: Tensor, recipe: Recipe) -> Both | None:
        """None inside of a capture: a replay asks no version, so each product of a graph makes its own."""
        if is_capturing():
            self._key = None
            self._both = Both(None, None)
            return None
        key = self._version(), _second(recipe.forward), _second(recipe.dgrad)
        if key != self._key:
            self._key = key
            pad = is_blockwise(recipe)
            self._both = quantize_both(weight_NK.detach(), Wanted(key[1]), Wanted(key[2]), pad=pad)
        return self._both


GivenCodes = WeightScales | KeptCodes | None
"""The weight is codes itself and has these scales; its layer keeps codes of it; or they are made for each
product."""


def _plain_weight(weight_NK: Tensor, recipe: Recipe, given: GivenCodes) -> Operand:
    scaling = _second(recipe.forward)
    if isinstance(given, WeightScales):
        codes = _padded_codes(weight_NK.detach(), (0, 0, 0, padding_of(recipe, len(weight_NK))))
        return as_operand(codes, given.scales, scaling)
    kept = None if given is None else given.both(weight_NK, recipe)
    pad = is_blockwise(recipe)
    made = kept or quantize_both(weight_NK.detach(), Wanted(scaling), None, pad=pad)
    assert made.rows is not None
    return made.rows


def transposed_weight(weight_NK: Tensor, recipe: Recipe, given: GivenCodes) -> Operand:
    scaling = _second(recipe.dgrad)
    if isinstance(given, WeightScales):
        transposed = transpose_codes(weight_NK.detach()) if given.transposed is None else given.transposed
        codes = _padded_codes(transposed, (0, padding_of(recipe, len(weight_NK))))
        return as_operand(codes, given.scales.t(), scaling)
    kept = None if given is None else given.both(weight_NK, recipe)
    pad = is_blockwise(recipe)
    made = kept or quantize_both(weight_NK.detach(), None, Wanted(scaling), pad=pad)
    assert made.transposed is not None
    return made.transposed


def _padded_codes(codes: Tensor, padding: tuple[int, ...]) -> Tensor:
    """As bytes: torch pads no codes."""
    return F.pad(codes.view(torch.uint8), padding).view(codes.dtype) if any(padding) else codes


# Inputs that several layers share


class InputCodes(NamedTuple):
    """As the forward product reads it."""

    rows: Operand
    transposed_scales: Tensor | None
    """Of its transpose, where they are known by now."""

    def kept(self, x: Tensor, *, codes: bool) -> KeptInput:
        """For backward: ``x``, or the codes of its rows."""
        if codes:
            return KeptInput(self.rows.codes_RC, self.rows.scales, self.transposed_scales)
        return KeptInput(x, None, self.transposed_scales)


Made = TypeVar("Made")


class _Latest(Generic[Made]):
    """What was last made of a tensor, for as long as that tensor is there and is not written."""

    def __init__(self) -> None:
        self._entry: tuple[Any, ...] | None = None

    def get(self, tensor: Tensor, key: Any, make: Callable[[], Made]) -> Made:
        entry, version = self._entry, tensor._version
        if entry is not None and entry[0]() is tensor and entry[1:3] == (version, key):
            return entry[3]
        made = make()
        self._entry = (weakref.ref(tensor, self._forget), version, key, made)
        return made

    def _forget(self, reference: Any) -> None:
        entry = self._entry
        if entry is not None and entry[0] is reference:
            self._entry = None


_inputs: _Latest[InputCodes] = _Latest()
_transposed_inputs: _Latest[Both] = _Latest()
