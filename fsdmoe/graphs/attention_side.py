"""The attention side of a layer as two graphs: its forward, and its backward.

Norms and attention launch the same kernels every time, whatever happens between them and the next layer; what
the experts do may depend on what the host reads of the device. So the side is captured apart::

    eager        x ─copy─> x'   (x', normed') ─> router, dispatch, experts, combine ─> ...
    graph              x' ──forward──> (x', normed')
                           └─ saved, in the graph's memory, until the next replay
    eager        ... ─copy─> gradients of both   gradient of x' ─> the layer before
    graph                    gradients of both ──backward──> gradient of x'

To autograd the side is one node. Inside, its graph of the captured forward is kept, and backward captured
from it: once where weights' gradients are overwritten, once where they are added to. Weights lie where the
engine gathers them, and gradients go straight into its buffers, whose notes are made before a replay
(:meth:`fsdmoe.fsdp.param_grad.ParamGrad.claim`).

What forward saved is overwritten by the layer's next forward: one micro-batch is under way at a time. Memory
that one graph needs for a moment is another's later; those that are replayed first were captured first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdmoe.errors import ConfigError
from fsdmoe.fsdp.param_grad import ParamGrad
from fsdmoe.graphs.device_graph import Graph, Recorder, recorded
from fsdmoe.kernels.grad_sink import GradSink, sink_of
from fsdmoe.memory.layer_call import as_current
from fsdmoe.models.attention import AttentionContext
from fsdmoe.models.decoder import DecoderLayer

Variant = tuple[tuple[int, bool], ...]
"""Of each weight: where its gradient goes, and whether it is added to what is there."""


class StaticContext:
    """What all layers of a micro-batch share, at fixed addresses."""

    def __init__(self, first: AttentionContext) -> None:
        own: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(first).items()}
        self._own = replace(first, **own)
        self._taken: AttentionContext | None = first

    def follow(self, context: AttentionContext) -> AttentionContext:
        """The fixed one, with what ``context`` holds."""
        if context is not self._taken:
            own = _tensors(self._own)
            for name, tensor in _tensors(context).items():
                own[name].data.copy_(tensor)  # what autograd saved of it is to follow
            self._taken = context
        return self._own

    def end(self) -> None:
        """The micro-batch is over."""
        self._taken = None


def _tensors(context: AttentionContext) -> dict[str, Tensor]:
    return {name: value for name, value in vars(context).items() if isinstance(value, Tensor)}


@dataclass
class _Backward:
    graph: Graph
    found: list[Tensor | None]
    """Gradients of the input and of all weights; None for those that were written where they belong."""
    written: list[ParamGrad]
    """These."""


@dataclass
class _Captured:
    """The side for one shape of micro-batch."""

    x: Tensor
    weights: list[Tensor]
    addresses: tuple[int, ...]
    forward: Graph
    inner: list[tuple[Tensor, ...]]
    """What the captured forward made, with autograd's graph of it; one entry."""
    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    backwards: dict[Variant, _Backward] = field(default_factory=dict)


class AttentionSide:
    """Stands for ``layer.attend``. ``shape`` and ``context`` are set before each micro-batch."""

    def __init__(self, layer: DecoderLayer, recorder: Recorder) -> None:
        self._attend: Callable[..., tuple[Tensor, Tensor]] = layer.attend
        self._layer, self._recorder = layer, recorder
        self._captured: dict[object, _Captured] = {}
        self._checked = False
        self.shape: object = None
        """Which graphs to use; None: none."""
        self.context: list[StaticContext] = []
        """Of that shape; made by the first layer that is captured."""
        self.num_replays = 0

    def __call__(self, x_BSD: Tensor, attention: AttentionContext) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return self._attend(x_BSD, attention)
        if self.shape is None or attention.block is not None:
            return self._watched(x_BSD, attention)
        if not self.context:
            self.context.append(StaticContext(attention))
        static = self.context[0].follow(attention)
        captured = self._captured.get(self.shape)
        if captured is None or captured.addresses != _addresses(captured.weights):
            captured = self._captured[self.shape] = self._capture(x_BSD, static)
        self.num_replays += 1
        x_BSD, normed_BSD = _Replay.apply(x_BSD, captured, self._recorder, *captured.weights)
        return x_BSD, normed_BSD

    @property
    def num_graphs(self) -> int:
        return sum(1 + len(each.backwards) for each in self._captured.values())

    def drop(self) -> None:
        """All graphs."""
        for captured in self._captured.values():
            for graph in (captured.forward, *(each.graph for each in captured.backwards.values())):
                graph.reset()
        self._captured.clear()

    def _watched(self, x_BSD: Tensor, attention: AttentionContext) -> tuple[Tensor, Tensor]:
        """As it is; whether it can be captured is found out."""
        before = None if self._checked else self._recorder.random_state()
        found = self._attend(x_BSD, attention)
        if before is not None and self._recorder.random_state() != before:
            raise ConfigError(
                "train.graphs: expected attention that draws no random numbers in training, got one that "
                'does (dropout); set its dropout to 0, or train.graphs = "none"'
            )
        self._checked = True
        return found

    def _capture(self, given_BSD: Tensor, attention: AttentionContext) -> _Captured:
        layer = self._layer
        modules = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm)
        weights: list[Tensor] = [p for module in modules for p in module.parameters() if p.requires_grad]
        x = given_BSD.detach().clone().requires_grad_(given_BSD.requires_grad)
        inner: list[tuple[Tensor, ...]] = []
        outputs: list[Tensor] = []

        def work() -> None:
            with torch.enable_grad(), as_current(None):  # nothing of it is computed again: see the docs
                made = self._attend(x, attention)
            inner[:] = [made]
            if not outputs:
                outputs.extend(each.detach() for each in made)
            for place, each in zip(outputs, made, strict=True):
                if place.data_ptr() != each.data_ptr():  # never on a device, which repeats addresses
                    place.copy_(each.detach())

        forward = recorded(self._recorder, work, f"attention of {tuple(x.shape)} values")
        grads = tuple(torch.empty_like(each) for each in outputs)
        addresses = _addresses(weights)
        return _Captured(x, weights, addresses, forward, inner, tuple(outputs), grads)


def _addresses(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in weights)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, captured: _Captured, recorder: Recorder, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.captured, ctx.recorder = captured, recorder
        captured.x.data.copy_(x)
        captured.forward.replay()
        return tuple(each.detach() for each in captured.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        captured: _Captured = ctx.captured
        for place, grad in zip(captured.grads, grads, strict=True):
            place.copy_(grad)
        found = _backward(captured, ctx.recorder)
        x, weights = (found[0], found[1:]) if captured.x.requires_grad else (None, found)
        return x, None, None, *(None if grad is None else grad.detach() for grad in weights)


def _backward(captured: _Captured, recorder: Recorder) -> list[Tensor | None]:
    sinks = [sink_of(weight) for weight in captured.weights]
    variant = tuple(_place(sink) for sink in sinks)
    known = captured.backwards.get(variant)
    if known is not None:
        for each in known.written:
            each.claim()
    else:
        found: list[Tensor | None] = []
        graph = recorded(
            recorder,
            lambda: _put(found, _differentiate(captured)),  # which claims by itself
            f"the backward of attention of {tuple(captured.x.shape)} values",
        )
        written: list[ParamGrad] = []
        for sink, grad in zip(sinks, found[-len(sinks) :], strict=True):
            if isinstance(sink, ParamGrad) and grad is None and sink.written:
                written.append(sink)
        known = captured.backwards[variant] = _Backward(graph, found, written)
    known.graph.replay()
    return known.found


def _place(sink: GradSink | None) -> tuple[int, bool]:
    if not isinstance(sink, ParamGrad):
        return 0, False
    assert sink.is_wanted, "a micro-batch's backward is for the gradients of its weights"
    assert sink.view is not None
    return sink.view.data_ptr(), sink.written


def _differentiate(captured: _Captured) -> list[Tensor | None]:
    inputs = [captured.x, *captured.weights] if captured.x.requires_grad else captured.weights
    return list(
        torch.autograd.grad(captured.inner[0], inputs, captured.grads, retain_graph=True, allow_unused=True)
    )


def _put(place: list[Tensor | None], found: list[Tensor | None]) -> None:
    """At the same addresses, where they were before."""
    if not place:
        place.extend(found)
        return
    for own, grad in zip(place, found, strict=True):
        if own is not None and grad is not None and own.data_ptr() != grad.data_ptr():
            own.copy_(grad)
