"""Linear layers and embeddings that put their weight's gradient straight into its sink.

Autograd would make the gradient in the weight's precision, and the sharding engine would then copy it into
its buffer. Here the GEMM writes the buffer itself: a pass over memory less, no second gradient, and
an fp32 buffer gets the GEMM's accumulator unrounded. A weight without a sink, and a layer that is being
compiled, take torch's own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.embedding_grad import add_rows_by_id_
from fsdmoe.kernels.frozen_weights import frozen_linear
from fsdmoe.kernels.grad_sink import GradSink, sink_of
from fsdmoe.kernels.quantized_linear import LinearPolicy, linear_by_recipe, linears_by_recipe
from fsdmoe.precision.quantized_weight import scales_of


class Linear(nn.Linear):
    """``torch.nn.Linear`` with a gradient sink: the same parameters, the same state dict."""

    quantized: LinearPolicy | None = None
    """How its products are quantised; None computes in the precision of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias, self.quantized)


class Embedding(nn.Embedding):
    """``torch.nn.Embedding`` with a gradient sink."""

    def forward(self, tokens: Tensor) -> Tensor:
        return embed_tokens(self, tokens)


def embed_tokens(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """``nn.Embedding.forward`` with a gradient sink."""
    is_plain = embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse
    if not (is_plain and _is_wanted(embedding.weight)):
        return nn.Embedding.forward(embedding, tokens)
    return _Embedding.apply(tokens, embedding.weight, embedding.padding_idx)


def project(
    x: Tensor, weight_MN: Tensor, bias_M: Tensor | None = None, quantized: LinearPolicy | None = None
) -> Tensor:
    """``F.linear`` with a gradient sink, its products quantised as ``quantized`` says."""
    if quantized is not None:
        y = linear_by_recipe(x, weight_MN, quantized)
        return y if bias_M is None else y + bias_M
    if _is_wanted(weight_MN):
        return _Linear.apply(x, weight_MN, bias_M)
    if scales_of(weight_MN) is not None:  # frozen, so never wanted
        return frozen_linear(x, weight_MN, bias_M)
    return F.linear(x, weight_MN, bias_M)


def project_side_by_side(x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Each layer's call, of layers that read the same input; those in fp8 share their backward. A layer that
    somebody has changed or watches is called."""
    policies = [linear.quantized for linear in linears if isinstance(linear, Linear) and linear.quantized]
    if len(policies) != len(linears) or not all(map(_is_plain, linears)):
        return tuple(linear(x) for linear in linears)
    outputs = linears_by_recipe(x, [linear.weight for linear in linears], policies)
    pairs = zip(outputs, linears, strict=True)
    return tuple(y if linear.bias is None else y + linear.bias for y, linear in pairs)


def _is_plain(linear: nn.Linear) -> bool:
    hooks = (
        linear._forward_hooks,
        linear._forward_pre_hooks,
        linear._backward_hooks,
        linear._backward_pre_hooks,
    )
    return type(linear) is Linear and "forward" not in vars(linear) and not any(hooks)


def add_product_(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, accumulate: bool) -> None:
    """``out = a @ b``, added to what is there if ``accumulate``; ``out`` may be fp32 for bf16 factors."""
    if out_MN.dtype == a_MK.dtype:
        torch.addmm(out_MN, a_MK, b_KN, beta=1 if accumulate else 0, out=out_MN)
    elif _multiplies_into_fp32(out_MN) and a_MK.dtype.itemsize == 2:
        _add_unrounded_(out_MN, a_MK, b_KN, beta=1 if accumulate else 0)
    elif out_MN.dtype.itemsize > a_MK.dtype.itemsize:  # a host rounds no more, though it has no such product
        wide = out_MN.dtype
        torch.addmm(out_MN, a_MK.to(wide), b_KN.to(wide), beta=1 if accumulate else 0, out=out_MN)
    elif accumulate:
        out_MN.add_(a_MK @ b_KN)
    else:
        out_MN.copy_(a_MK @ b_KN)


def _multiplies_into_fp32(out_MN: Tensor) -> bool:
    """Whether products of half precision can be written, or added, to ``out`` as they are summed."""
    return out_MN.is_cuda and out_MN.dtype == torch.float32


def _add_unrounded_(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor, beta: int) -> None:
    torch.addmm(out_MN, a_MK, b_KN, beta=beta, out_dtype=out_MN.dtype, out=out_MN)


def weight_gradient(grad_y: Tensor, x: Tensor, sink: GradSink | None) -> Tensor | None:
    """The gradient of the weight in ``y = x @ weight.T``: in its sink, or without one for autograd."""
    if sink is None:
        return _rows(grad_y).t() @ _rows(x)
    claimed = sink.claim()
    if claimed is not None:
        buffer_MN, accumulate = claimed
        add_product_(buffer_MN, _rows(grad_y).t(), _rows(x), accumulate=accumulate)
    return None


def _is_wanted(weight: Tensor) -> bool:
    if not torch.is_grad_enabled() or sink_of(weight) is None:
        return False
    return not torch.is_autocast_enabled(weight.device.type)  # which gives F.linear other dtypes than these


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MN: Tensor, bias_M: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_MN)
        ctx.sink = sink_of(weight_MN)
        return F.linear(x, weight_MN, bias_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_MN = ctx.saved_tensors
        grad_x = grad_y @ weight_MN if ctx.needs_input_grad[0] else None
        grad_bias = _rows(grad_y).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, weight_gradient(grad_y, x, ctx.sink), grad_bias


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight_VD: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink, ctx.padding = sink_of(weight_VD), padding
        return F.embedding(tokens, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[None, None, None]:
        claimed = ctx.sink.claim()
        if claimed is None:
            return None, None, None
        buffer_VD, accumulate = claimed
        if not accumulate:
            buffer_VD.zero_()
        tokens_T, rows = ctx.saved_tensors[0].flatten(), _rows(grad_y)
        if ctx.padding is not None:  # its row is not learned
            rows = rows.masked_fill((tokens_T == ctx.padding)[:, None], 0)
        add_rows_by_id_(buffer_VD, tokens_T, rows)
        return None, None, None
