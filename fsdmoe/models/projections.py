"""The linear layers on both sides of a tensor-parallel exchange, and the exchange with them::

    tokens/tp --gather--> q k v, or gate up --> all tokens, my columns --> o, or down --scatter--> tokens/tp

B rows, s tokens of a row on this rank, S on all; D and N widths.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fsdmoe.kernels.linear import project
from fsdmoe.kernels.quantized_linear import LinearPolicy
from fsdmoe.tensor_parallel.group import TensorGroup


def input_projections(x_BsD: Tensor, linears: Sequence[nn.Linear], tensor: TensorGroup) -> tuple[Tensor, ...]:
    """Each layer's outputs ``[B, S, N]`` for the tokens of all ranks, which are gathered once."""
    x_BSD = tensor.gather(x_BsD)
    return tuple(linear(x_BSD) for linear in linears)


def output_projection(linear: nn.Linear, x_BSN: Tensor, tensor: TensorGroup) -> Tensor:
    """``scatter_projection``, or the layer's own call where there is nothing to scatter."""
    return linear(x_BSN) if tensor.size == 1 else scatter_projection(linear, x_BSN, tensor)


def scatter_projection(linear: nn.Linear, x_BSN: Tensor, tensor: TensorGroup) -> Tensor:
    """This rank's tokens of the projection of all ranks' columns; the bias is added once, after the sum."""
    y_BsD = tensor.scatter(project(x_BSN, linear.weight, quantized=quantized_of(linear)))
    return y_BsD if linear.bias is None else y_BsD + linear.bias


def linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """For a linear layer of torch: its product, with a gradient sink, as its recipe says."""
    return project(input, self.weight, self.bias, quantized_of(self))


def quantized_of(linear: nn.Linear) -> LinearPolicy | None:
    """How a layer's products are quantised."""
    return getattr(linear, "quantized", None)  # a wrapped model's layer has one only where it is covered
