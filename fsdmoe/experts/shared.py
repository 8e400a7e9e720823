"""Shared experts: a gated MLP for every token, computed while the routed rows are being exchanged.

They see this rank's own tokens only and hold whole weights, so they need no communication. On a GPU they run
on a second stream, from the moment the tokens are sent until their output is added. On a CPU the threads of
the process group overlap the exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdmoe.kernels.activations import activation_of
from fsdmoe.kernels.linear import Linear
from fsdmoe.memory.calls import plain_calls


class SharedExperts(nn.Module):
    """Hugging Face's names: ``gate_proj``, ``up_proj``, ``down_proj``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.activation = activation_of("swiglu").forward
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)
        self.memory_calls = plain_calls("activation")

    def forward(self, x_TD: Tensor) -> Tensor:
        activated = self.memory_calls["activation"]
        return self.down_proj(activated(self.activation, self.gate_proj(x_TD), self.up_proj(x_TD)))


class SideStream:
    """Runs a function concurrently with the current stream; on a CPU, simply runs it."""

    _stream: torch.cuda.Stream | None = None

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)``, perhaps not yet computed: call :meth:`join` before its first use."""
        if not x.is_cuda:
            return function(x)
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        x = _Enter.apply(x, torch.cuda.current_stream(), self._stream)
        with torch.cuda.stream(self._stream):
            return function(x)

    def join(self, y: Tensor) -> Tensor:
        """``y`` as the current stream may use it."""
        if not y.is_cuda:
            return y
        assert self._stream is not None
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        y.record_stream(current)
        return y


class _Enter(torch.autograd.Function):
    """Identity into the side stream.

    Its backward makes the main stream wait for all that the side stream did: autograd itself only orders the
    gradient of ``x``, while gradients of weights are read by hooks that do not wait for this stream.
    """

    @staticmethod
    def forward(ctx, x: Tensor, main: torch.cuda.Stream, side: torch.cuda.Stream) -> Tensor:
        ctx.streams = main, side
        side.wait_stream(main)
        x.record_stream(side)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor):
        main, side = ctx.streams
        main.wait_stream(side)
        return dx, None, None
