"""Linear layers in fp8 as one node of autograd, all that read the same input (q, k and v): its backward
quantises the input once for all weight gradients, and where blocks are 1 x 128 the gradients of several
layers lie next to each other as if the layers were one::

    d x   = [dq dk dv] @ [Wq; Wk; Wv]        one product, whose sum was three and two more passes before
    d W   = [dq dk dv].T @ x                 one product, into buffers that lie next to each other

With one scale for each weight neither can be: a contraction over all three would need one scale for them.

Sizes: T tokens, K inputs, N outputs of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.fp8_linear import (
    GivenCodes,
    KeptCodes,
    KeptInput,
    codes_of,
    forward_product,
    input_gradient,
    quantize_gradient,
    transposed_weight,
)
from fsdmoe.kernels.fp8_operands import Operand, is_blockwise
from fsdmoe.kernels.fp8_quantize import quantize_side_by_side
from fsdmoe.kernels.grad_sink import GradSink, sink_of
from fsdmoe.kernels.scaled_matmul import scaled_matmul
from fsdmoe.precision.formats import Recipe
from fsdmoe.precision.operand_state import UNWATCHED, Watch


def fp8_linear(
    x: Tensor,
    weight_NK: Tensor,
    recipe: Recipe,
    watch: Watch = UNWATCHED,
    kept: KeptCodes | None = None,
    *,
    keeps_codes: bool = False,
) -> Tensor:
    """``x @ weight.T``, all three products in fp8; the gradient goes to the weight's sink."""
    return fp8_linears(x, (weight_NK,), recipe, (watch,), (kept,), keeps_codes=keeps_codes)[0]


def fp8_linears(
    x: Tensor,
    weights_NK: Sequence[Tensor],
    recipe: Recipe,
    watches: Sequence[Watch],
    kept: Sequence[KeptCodes | None],
    *,
    keeps_codes: bool = False,
) -> tuple[Tensor, ...]:
    """``x @ weight.T`` of each; gradients go to the weights' sinks. All weights are trained, or none is.
    ``keeps_codes``: for backward, of x with scales of 1 x 128, instead of x."""
    given = tuple(map(codes_of, weights_NK, kept))
    return _Fp8Linears.apply(x, recipe, given, tuple(watches), keeps_codes, *weights_NK)


class _Fp8Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        recipe: Recipe,
        given: tuple[GivenCodes, ...],
        watches: tuple[Watch, ...],
        keeps_codes: bool,
        *weights_NK: Tensor,
    ) -> tuple[Tensor, ...]:
        layers = zip(weights_NK, given, watches, strict=True)
        made = [forward_product(x, weight, recipe, own, watch) for weight, own, watch in layers]
        is_trained = ctx.needs_input_grad[5]
        kept = made[0][1].kept(x, codes=keeps_codes) if is_trained else (None, None, None)
        ctx.save_for_backward(*kept, *weights_NK)
        ctx.of_x = x.shape, x.dtype
        ctx.sinks = [sink_of(weight) for weight in weights_NK]
        ctx.recipe, ctx.given, ctx.watches = recipe, given, watches
        return tuple(y for y, _ in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, code_scales, transposed_scales, *weights_NK = ctx.saved_tensors
        x = KeptInput(values, code_scales, transposed_scales)
        shape, dtype = ctx.of_x
        recipe = ctx.recipe
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        grad_x: Tensor | None = None
        grad_weights: list[Tensor | None] = [None for _ in weights_NK]
        weights = list(zip(weights_NK, ctx.given, strict=True))
        x_KT: Operand | None = None
        if is_joint(recipe, weights_NK):
            if needs_weights:
                x_KT = x.transposed(recipe, shape, dtype, ctx.watches[0])
            rows, columns = _quantize_side_by_side(grads, recipe, ctx.watches)
            if needs_x:
                transposed = [transposed_weight(weight, recipe, given) for weight, given in weights]
                grad_x = input_gradient(rows, shape, dtype, _next_to_each_other(transposed))
            if x_KT is not None:
                grad_weights = _deliver_all(columns, x_KT, ctx.sinks, weights_NK)
            return grad_x, None, None, None, None, *grad_weights
        for i, (weight, given) in enumerate(weights):
            both = quantize_gradient(grads[i], recipe, ctx.watches[i], rows=needs_x, transposed=needs_weights)
            if both.rows is not None:
                part = input_gradient(both.rows, shape, dtype, transposed_weight(weight, recipe, given))
                grad_x = part if grad_x is None else grad_x.add_(part)
            if both.transposed is not None:
                x_KT = x_KT or x.transposed(recipe, shape, dtype, ctx.watches[0])
                (grad_weights[i],) = _deliver_all(both.transposed, x_KT, ctx.sinks[i : i + 1], (weight,))
        return grad_x, None, None, None, None, *grad_weights


def is_joint(recipe: Recipe, weights_NK: Sequence[Tensor]) -> bool:
    """Whether there are several gradients, which next to each other are quantised as each is alone."""
    blocks = recipe.dgrad.first.block, recipe.wgrad.first.block
    are_whole = all(len(weight) % 128 == 0 for weight in weights_NK)
    return len(weights_NK) > 1 and is_blockwise(recipe) and blocks == ((1, 128), (1, 128)) and are_whole


def _quantize_side_by_side(
    grads: Sequence[Tensor], recipe: Recipe, watches: Sequence[Watch]
) -> tuple[Operand, Operand]:
    grads_TN = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    for grad_TN, watch in zip(grads_TN, watches, strict=True):
        watch.collect("grad", grad_TN, recipe.dgrad.first)
        watch.collect("grad", grad_TN.t(), recipe.wgrad.first)
    both = quantize_side_by_side(grads_TN, recipe.dgrad.first, recipe.wgrad.first)
    assert both.rows is not None
    assert both.transposed is not None
    return both.rows, both.transposed


def _next_to_each_other(weights_KN: Sequence[Operand]) -> Operand:
    """The codes are copied, which takes less than a sum of results."""
    codes = torch.cat([weight.codes_RC.view(torch.uint8) for weight in weights_KN], 1)
    scales = torch.cat([weight.scales for weight in weights_KN], 1)
    return Operand(codes.view(weights_KN[0].codes_RC.dtype), scales, weights_KN[0].kind)


def _deliver_all(
    columns: Operand,
    x_KT: Operand,
    sinks: Sequence[GradSink | None],
    weights_NK: Sequence[Tensor],
) -> list[Tensor | None]:
    """One product, into the sinks' buffers where they lie next to each other, else as the accumulator has
    it."""
    sizes = [len(weight) for weight in weights_NK]
    if any(sink is None for sink in sinks):
        dtype = weights_NK[0].dtype
        return list(scaled_matmul(columns, x_KT, dtype)[: sum(sizes)].split(sizes))
    claimed = [sink.claim() for sink in sinks if sink is not None]
    joint = _joint_buffer([each[0] for each in claimed if each is not None and not each[1]], len(sinks))
    is_padded = len(columns.codes_RC) > sum(sizes)
    if joint is not None and not is_padded:
        scaled_matmul(columns, x_KT, joint.dtype, out_MN=joint)
    elif any(each is not None for each in claimed):
        gradient = scaled_matmul(columns, x_KT, torch.float32)[: sum(sizes)]
        for each, part in zip(claimed, gradient.split(sizes), strict=True):
            if each is not None:
                buffer_NK, accumulate = each
                buffer_NK.add_(part) if accumulate else buffer_NK.copy_(part)
    return [None for _ in sinks]


def _joint_buffer(buffers_NK: list[Tensor], count: int) -> Tensor | None:
    """``count`` matrices as one, where each begins where the one before it ends."""
    if len(buffers_NK) != count or not all(buffer.is_contiguous() for buffer in buffers_NK):
        return None
    first = buffers_NK[0]
    end = first.storage_offset()
    for buffer in buffers_NK:
        is_next = buffer.storage_offset() == end and buffer.dtype == first.dtype
        if not is_next or buffer.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += buffer.numel()
    return first.as_strided((sum(map(len, buffers_NK)), first.shape[1]), first.stride())
