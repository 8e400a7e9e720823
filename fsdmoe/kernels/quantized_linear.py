"""Linear layers whose products are quantised by a recipe: by torch's products in fp8 where they take the
layer, else emulated in plain torch.

The emulation rounds operands exactly as the formats say (:mod:`fsdmoe.precision.quantize`), accumulates in
float32, and is slow. It is the oracle of fused kernels, and the way to study any recipe on any machine
(``precision.emulate``). On a GPU, Triton kernels round and multiply to the same values where they can
(``kernels/triton/rounded_mlp.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.core.capturing import compute_again
from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.backend import takes_fp8_products, triton_for
from fsdmoe.kernels.fp8_linear import KeptCodes, supports_linear
from fsdmoe.kernels.fp8_linears import fp8_linear, fp8_linears
from fsdmoe.kernels.fp8_operands import is_blockwise
from fsdmoe.kernels.grad_sink import deliver, refuse_homeless, sink_of
from fsdmoe.kernels.products import Products
from fsdmoe.precision.formats import Product, Recipe
from fsdmoe.precision.operand_state import UNWATCHED, OperandState, Watch, watch_of
from fsdmoe.precision.quantize import rounded_product
from fsdmoe.precision.quantized_weight import decoded, scales_of


class LinearPolicy(NamedTuple):
    """How a covered linear layer computes."""

    recipe: Recipe
    """How products are quantised."""
    emulate: bool = True
    """Compute it in plain torch where torch has no such products for these tensors, instead of refusing."""
    state: OperandState | None = None
    """Statistics of its operands, where they are wanted."""
    kept: KeptCodes | None = None
    """The codes of its weight, where it stays in memory whole."""
    products: Products | None = None
    """Another library's, chosen by ``precision.backend``."""
    keeps_codes: bool = False
    """Of the input for backward, instead of the input: with scales of 1 x 128."""


# What was quantised is remembered: a compiled graph would not see it.
_outside_graphs = torch.compiler.disable(reason="codes and scales that are remembered between calls")


@_outside_graphs
def linear_by_recipe(x: Tensor, weight_NK: Tensor, policy: LinearPolicy) -> Tensor:
    """``x @ weight.T`` by a recipe: on products in fp8, or emulated."""
    if policy.products is not None:
        return policy.products.linear(x, weight_NK)
    recipe, watch = policy.recipe, watch_of(policy.state)
    refuse_other_codes(weight_NK, recipe)
    if takes_fp8_products(x) and supports_linear(recipe, x, weight_NK):
        return fp8_linear(x, weight_NK, recipe, watch, policy.kept, keeps_codes=policy.keeps_codes)
    if not policy.emulate and x.numel():
        raise ConfigError(
            f"precision.recipe: expected layers that products of {recipe.name} take (bfloat16 on Hopper, "
            f"CUDA 12.9 or later, inputs that are multiples of {128 if is_blockwise(recipe) else 16} and "
            f"outputs that are multiples of 16), got {x.dtype} on {x.device.type}, a weight "
            f"{tuple(weight_NK.shape)}; set precision.emulate = true "
            "to compute it in plain torch (slowly), or keep the layer out by precision.keep"
        )
    return quantized_linear(x, weight_NK, recipe, watch)


def refuse_other_codes(weight: Tensor, recipe: Recipe) -> None:
    """A weight that came quantised is in the codes of the recipe that its model was sharded with: no other
    recipe takes them."""
    scales, scaling = scales_of(weight), recipe.forward.second
    if scales is None or scaling is None:
        return
    rows, columns = weight.shape[-2:]
    wanted = scaling.block[0] or rows, scaling.block[1] or columns
    if scales.block != wanted:
        raise ConfigError(
            f"precision.recipe: expected weights in codes of {recipe.name}, blocks of {wanted[0]} x "
            f"{wanted[1]}, got blocks of {scales.block[0]} x {scales.block[1]}: with "
            "precision.quantized_weights a model keeps the recipe that it was parallelized with; build it "
            "again for another one, or set precision.quantized_weights = false"
        )


@_outside_graphs
def linears_by_recipe(
    x: Tensor, weights_NK: Sequence[Tensor], policies: Sequence[LinearPolicy]
) -> tuple[Tensor, ...]:
    """:func:`linear_by_recipe` of layers that read the same input; with kernels they share a backward."""
    recipe, ways = policies[0].recipe, {(w.requires_grad, sink_of(w) is None) for w in weights_NK}
    is_one_node = (
        len(ways) == 1  # of gradients: wanted or not, and who takes them
        and policies[0].products is None
        and all(policy.recipe == recipe for policy in policies)
        and takes_fp8_products(x)
        and all(supports_linear(recipe, x, weight) for weight in weights_NK)
    )
    if not is_one_node:
        pairs = zip(weights_NK, policies, strict=True)
        return tuple(linear_by_recipe(x, weight, policy) for weight, policy in pairs)
    for weight in weights_NK:
        refuse_other_codes(weight, recipe)
    watches = [watch_of(policy.state) for policy in policies]
    kept = [policy.kept for policy in policies]
    # Values that one of them keeps serve all.
    keeps_codes = all(policy.keeps_codes for policy in policies)
    return fp8_linears(x, weights_NK, recipe, watches, kept, keeps_codes=keeps_codes)


def quantized_linear(x: Tensor, weight_NK: Tensor, recipe: Recipe, watch: Watch = UNWATCHED) -> Tensor:
    """``x @ weight.T`` with all three products quantised; the gradient goes to the weight's sink."""
    if scales_of(weight_NK) is None:
        return QuantizedLinear.apply(x, weight_NK, recipe, watch)
    # Made again in backward: kept, the float32 values of all layers would be the whole model unsharded.
    # Not among its arguments: as one of them the weight may come back without its scales.
    return compute_again(partial(_linear, weight_NK=weight_NK, recipe=recipe, watch=watch), x)


def _linear(x: Tensor, weight_NK: Tensor, recipe: Recipe, watch: Watch) -> Tensor:
    return QuantizedLinear.apply(x, *weight_values(weight_NK, recipe), watch)


def weight_values(weight: Tensor, recipe: Recipe) -> tuple[Tensor, Recipe]:
    """What a weight that came quantised stands for, and the recipe for it; any other as it is."""
    if scales_of(weight) is None:
        return weight, recipe
    return _Values.apply(weight), recipe.with_weights_as_given()


class _Values(torch.autograd.Function):
    """float32 values of a quantised weight. Their gradient goes to the weight's sink: in the format of the
    codes it would mean nothing."""

    @staticmethod
    def forward(ctx: Any, codes: Tensor) -> Tensor:
        found, ctx.sink = scales_of(codes), sink_of(codes)
        assert found is not None
        return decoded(codes, found, torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> None:
        refuse_homeless(ctx.sink)
        deliver(grad, ctx.sink, grad.dtype)


class QuantizedLinear(torch.autograd.Function):
    """Of any dims before the last, or of as many ranges as there are weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, recipe: Recipe, watch: Watch) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        ctx.recipe, ctx.sink, ctx.watch = recipe, sink_of(weight_NK), watch
        x_TK, product = _rows_of(x, weight_NK), recipe.forward
        watch.collect_in_forward("input", x_TK, product.first)
        watch.collect_in_forward("weight", weight_NK, product.second)
        y_TN = quantized_matmul(x_TK, weight_NK, product)
        return y_TN.view(*x.shape[:-1], weight_NK.shape[-2]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NK = ctx.saved_tensors
        recipe, watch = ctx.recipe, ctx.watch
        grad_y_TN, x_TK = _rows_of(grad_y, weight_NK), _rows_of(x, weight_NK)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            watch.collect("grad", grad_y_TN, recipe.dgrad.first)
            grad_x = quantized_matmul(grad_y_TN, weight_NK.mT, recipe.dgrad).view(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_NK = _weight_grad(grad_y_TN, x_TK, recipe.wgrad, watch)
            grad_weight = deliver(grad_NK, ctx.sink, weight_NK.dtype)
        return grad_x, grad_weight, None, None


def _rows_of(x: Tensor, weight_NK: Tensor) -> Tensor:
    return x if weight_NK.dim() > 2 else x.reshape(-1, x.shape[-1])


def quantized_matmul(first_MC: Tensor, second_NC: Tensor, product: Product) -> Tensor:
    """:func:`~fsdmoe.precision.quantize.rounded_product`, by a kernel where one takes it; under autocast
    too."""
    with torch.autocast(first_MC.device.type, enabled=False):
        fused = triton_for(first_MC)
        if fused is not None and fused.supports_matmul(first_MC, second_NC, product):
            return fused.rounded_matmul(first_MC, second_NC, product)
        return rounded_product(first_MC, second_NC, product)


def _weight_grad(grad_y_TN: Tensor, x_TK: Tensor, product: Product, watch: Watch) -> Tensor:
    assert product.second is not None
    watch.collect("grad", grad_y_TN.mT, product.first)
    watch.collect("input", x_TK.mT, product.second)
    return quantized_matmul(grad_y_TN.mT, x_TK.mT, product)
