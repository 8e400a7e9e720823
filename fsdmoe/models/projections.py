"""The linear layers on both sides of a tensor-parallel exchange, and the exchange with them::

    tokens/tp --gather--> q k v, or gate up --> all tokens, my columns --> o, or down --scatter--> tokens/tp

With ``tensor_parallel.overlap = "ring"`` a gather and the products behind it are one operation, as are a
product and the scatter behind it: each works on a rank's stretch while the next is being sent
(:mod:`fsdmoe.tensor_parallel.ring`). They are each other's backward for the input; the weight's gradient is
one product over all tokens, for which the gathered tensor is kept (as it is without overlap).

B rows, s tokens of a row on this rank, S on all, R ranks; D and N widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fsdmoe.kernels.grad_sink import sink_of
from fsdmoe.kernels.linear import add_rows_, project, weight_gradient
from fsdmoe.kernels.quantized_linear import LinearPolicy
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.ring import gather_while, scatter_while


def input_projections(x_BsD: Tensor, linears: Sequence[nn.Linear], tensor: TensorGroup) -> tuple[Tensor, ...]:
    """Each layer's outputs ``[B, S, N]`` for the tokens of all ranks, which are gathered once."""
    if does_overlap(x_BsD, tensor):
        return overlapped_projections(x_BsD, linears, tensor)[1:]
    x_BSD = tensor.gather(x_BsD)
    return tuple(linear(x_BSD) for linear in linears)


def overlapped_projections(
    x_BsD: Tensor, linears: Sequence[nn.Linear], tensor: TensorGroup
) -> tuple[Tensor, ...]:
    """The tokens of all ranks ``[B, S, D]``, for whatever else needs them, and each layer's outputs."""
    x_BSD, *outputs = _GatherLinear.apply(x_BsD, tensor, *(linear.weight for linear in linears))
    biases = [linear.bias for linear in linears]
    return x_BSD, *(y if b is None else y + b for y, b in zip(outputs, biases, strict=True))


def output_projection(linear: nn.Linear, x_BSN: Tensor, tensor: TensorGroup) -> Tensor:
    """``scatter_projection``, or the layer's own call where there is nothing to scatter."""
    return linear(x_BSN) if tensor.size == 1 else scatter_projection(linear, x_BSN, tensor)


def scatter_projection(linear: nn.Linear, x_BSN: Tensor, tensor: TensorGroup) -> Tensor:
    """This rank's stretch of the projection of all ranks' columns; the bias is added once, after the sum."""
    if does_overlap(x_BSN, tensor):
        y_BsD = _LinearScatter.apply(x_BSN, tensor, linear.weight)
    else:
        y_BsD = tensor.scatter(project(x_BSN, linear.weight, quantized=quantized_of(linear)))
    return y_BsD if linear.bias is None else y_BsD + linear.bias


def quantized_of(linear: nn.Linear) -> LinearPolicy | None:
    """How a layer's products are quantised."""
    return getattr(linear, "quantized", None)  # a wrapped model's layer has one only where it is covered


def does_overlap(x: Tensor, tensor: TensorGroup) -> bool:
    """Whether products run while tokens are being exchanged; not under autocast, which chooses their dtypes
    by itself."""
    return tensor.overlap == "ring" and not torch.is_autocast_enabled(x.device.type)


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsD: Tensor, tensor: TensorGroup, *weights_ND: Tensor) -> tuple[Tensor, ...]:
        rows, length = len(x_BsD), tensor.size * x_BsD.shape[1]
        outputs = [x_BsD.new_empty(rows, length, len(weight)) for weight in weights_ND]
        stretches = [_stretches(y_BSN, tensor) for y_BSN in outputs]

        def consume(rank: int, piece_BsD: Tensor) -> None:
            for y_RBsN, weight_ND in zip(stretches, weights_ND, strict=True):
                add_rows_(y_RBsN[rank], piece_BsD, weight_ND.t(), accumulate=False)

        x_BSD = gather_while(x_BsD, tensor, consume)
        ctx.save_for_backward(x_BSD, *weights_ND)
        ctx.sinks = [sink_of(weight) for weight in weights_ND]
        ctx.tensor = tensor
        ctx.set_materialize_grads(False)  # seldom does anything but the products need the gathered tensor
        return x_BSD, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_BSD: Tensor | None, *grads_BSN: Tensor | None) -> tuple[Any, ...]:
        x_BSD, *weights_ND = ctx.saved_tensors
        needs_x, _, *needs_weight = ctx.needs_input_grad
        products = [
            (_stretches(grad, ctx.tensor), weight)
            for grad, weight in zip(grads_BSN, weights_ND, strict=True)
            if grad is not None
        ]
        direct_RBsD = None if grad_x_BSD is None else _stretches(grad_x_BSD, ctx.tensor)
        grad_weights: list[Tensor | None] = []

        def produce(rank: int) -> Tensor:
            rows, length, width = x_BSD.shape
            part_BsD = x_BSD.new_empty(rows, length // ctx.tensor.size, width)
            if direct_RBsD is not None:
                part_BsD.copy_(direct_RBsD[rank])
            for index, (grad_RBsN, weight_ND) in enumerate(products):
                add = direct_RBsD is not None or index > 0
                add_rows_(part_BsD, grad_RBsN[rank], weight_ND, accumulate=add)
            return part_BsD

        def make_weight_gradients() -> None:
            for grad, sink, needed in zip(grads_BSN, ctx.sinks, needs_weight, strict=True):
                if grad is None or not needed:
                    grad_weights.append(None)
                else:
                    grad_weights.append(weight_gradient(grad, x_BSD, sink))

        grad_x_BsD = None
        if needs_x:
            grad_x_BsD = scatter_while(produce, ctx.tensor, meanwhile=make_weight_gradients)
        else:
            make_weight_gradients()
        return grad_x_BsD, None, *grad_weights


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSN: Tensor, tensor: TensorGroup, weight_DN: Tensor) -> Tensor:
        x_RBsN = _stretches(x_BSN, tensor)

        def produce(rank: int) -> Tensor:
            part_BsD = x_BSN.new_empty(*x_RBsN.shape[1:3], len(weight_DN))
            add_rows_(part_BsD, x_RBsN[rank], weight_DN.t(), accumulate=False)
            return part_BsD

        ctx.save_for_backward(x_BSN, weight_DN)
        ctx.sink, ctx.tensor = sink_of(weight_DN), tensor
        return scatter_while(produce, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BsD: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        x_BSN, weight_DN = ctx.saved_tensors
        needs_x, _, needs_weight = ctx.needs_input_grad
        grad_x_BSN = x_BSN.new_empty(x_BSN.shape) if needs_x else None

        def consume(rank: int, piece_BsD: Tensor) -> None:
            if grad_x_BSN is not None:
                add_rows_(_stretches(grad_x_BSN, ctx.tensor)[rank], piece_BsD, weight_DN, accumulate=False)

        grad_BSD = gather_while(grad_BsD, ctx.tensor, consume)
        return grad_x_BSN, None, weight_gradient(grad_BSD, x_BSN, ctx.sink) if needs_weight else None


def _stretches(x_BSD: Tensor, tensor: TensorGroup) -> Tensor:
    """The ranks' stretches of every row, ``[R, B, s, D]``: a view."""
    return x_BSD.unflatten(1, (tensor.size, -1)).transpose(0, 1)
