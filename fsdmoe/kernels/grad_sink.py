"""The gradient sink: where a kernel may write a weight gradient without autograd in between.

A sharding engine that owns gradient buffers sets ``parameter.grad_sink``. A backward that computes the
gradient of such a weight asks for the buffer, writes it, and returns ``None`` to autograd for that input::

    sink = sink_of(weight)
    if sink is None:
        return weight_gradient
    claimed = sink.claim()
    if claimed is not None:                    # None: this backward is for other tensors' gradients alone
        buffer, accumulate = claimed           # same shape as the weight; may be fp32 for a bf16 weight
        write(buffer, beta=1.0 if accumulate else 0.0)
    return None

An operation whose forward has the gradient already asks for its place with ``stage`` and keeps what it gets
until its backward, which passes it to ``claim``.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Staged:
    """A gradient that forward made in the buffer, for a backward that has not run yet."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.tensor = buffer
        self.in_place = True
        """``tensor`` is the buffer itself, and nothing was written there since: nothing is left to do."""

    def move_out(self) -> None:
        """Keep the values for another backward: the buffer is about to be changed."""
        if self.in_place:
            self.tensor = self.tensor.clone()
            self.in_place = False


class GradSink(Protocol):
    """Set as ``parameter.grad_sink`` by the owner of the gradient buffers."""

    def claim(self, staged: Staged | None = None) -> tuple[torch.Tensor, bool] | None:
        """The buffer to write, and whether to add (True) or to overwrite (False: first use in this
        backward). None where the gradient is not wanted: autograd runs a node for any of its inputs, and does
        not say for which (``torch.autograd.grad``)."""
        ...

    def stage(self) -> Staged | None:
        """In forward: the place for a gradient in fp32 that is overwritten; None where it cannot be had."""
        ...


def sink_of(weight: torch.Tensor) -> GradSink | None:
    """The weight's sink, if it has one. A compiled graph returns its gradients to autograd: the compiler
    traces backward too, and cannot trace an object with side effects."""
    return None if torch.compiler.is_compiling() else getattr(weight, "grad_sink", None)


def deliver(gradient: torch.Tensor, sink: GradSink | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Into the sink's buffer where there is one; else in the weight's ``dtype``, for autograd."""
    if sink is None:
        return gradient.to(dtype)
    claimed = sink.claim()
    if claimed is not None:
        buffer, accumulate = claimed
        buffer.add_(gradient) if accumulate else buffer.copy_(gradient)
    return None


def refuse_homeless(sink: GradSink | None) -> None:
    """Of a gradient that is wanted of a weight in codes."""
    if sink is None:
        raise RuntimeError(
            "the gradient of a quantised weight has no place to go: it is not sharded, or "
            "its model is split by DTensors; set precision.quantized_weights = false"
        )
