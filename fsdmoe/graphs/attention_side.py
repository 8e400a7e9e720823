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

What forward saved is overwritten by the layer's next forward: one micro-batch is under way at a time. All
that lives from forward to backward is held by autograd's graph, so no other layer is given its memory; what
else a graph needs, it needs inside of one replay, and all graphs use the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block
from fsdmoe.core.autograd import once_differentiable
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp.param_grad import ParamGrad
from fsdmoe.graphs.device_graph import Recorder, recorded
from fsdmoe.kernels.grad_sink import deliver, sink_of
from fsdmoe.memory.layer_call import as_current
from fsdmoe.models.attention import AttentionContext
from fsdmoe.models.decoder import DecoderLayer

Variant = tuple[tuple[int, bool], ...]
"""Of each weight: where its gradient goes, and whether it is added to what is there."""


class Shared:
    """What all layers of a micro-batch use one after the other, at fixed addresses."""

    def __init__(self) -> None:
        self._context: AttentionContext | None = None
        self._taken: AttentionContext | None = None
        self._buffers: dict[object, Tensor] = {}

    def follow(self, context: AttentionContext) -> AttentionContext | None:
        """The fixed one, with what ``context`` holds; None where the host knows other lengths."""
        if self._context is None:
            own: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(context).items()}
            self._context = replace(context, **own)
        elif not _are_alike(context.block, self._context.block):
            return None
        elif context is not self._taken:
            places = _tensors(self._context)
            for name, tensor in _tensors(context).items():
                places[name].data.copy_(tensor)  # what autograd saved of it is to follow
        self._taken = context
        return self._context

    def buffer(self, name: object, like: Tensor) -> Tensor:
        """Outside of the graphs' memory; layers that give the same name share it."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty_like(like.detach())
        return self._buffers[name]

    def end(self) -> None:
        """The micro-batch is over."""
        self._taken = None


def _tensors(context: AttentionContext) -> dict[str, Tensor]:
    return {name: value for name, value in vars(context).items() if isinstance(value, Tensor)}


def _are_alike(block: Block | None, other: Block | None) -> bool:
    """Whether what one says on the device is what the other says."""
    if block is None or other is None:
        return block is other
    names = ("query_index", "key_index", "query_lengths", "key_lengths", "causal")
    found, wanted = ([getattr(each, name) for name in names] for each in (block, other))
    return found[:2] == wanted[:2] == [None, None] and found[2:] == wanted[2:]


@dataclass
class _CapturedBackward:
    graph: torch.cuda.CUDAGraph
    found: list[Tensor | None]
    """Gradients of the input and of weights without a sink; None for others."""
    written: list[ParamGrad]
    """The sinks that it fills."""


@dataclass
class _CapturedSide:
    """The side for one shape of micro-batch."""

    x: Tensor
    parameters: list[Tensor]
    addresses: tuple[int, ...]
    """Where they were gathered; others, once their memory was released and restored."""
    forward: torch.cuda.CUDAGraph
    inner: list[tuple[Tensor, ...]]
    """What the captured forward made, with autograd's graph of it; one entry."""
    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    """Of the outputs; all layers use the same."""
    x_grad: Tensor
    """Every second layer uses the same: who reads that of a layer is done with it two layers later."""
    backwards: dict[Variant, _CapturedBackward] = field(default_factory=dict)
    weights: list[Tensor] = field(init=False)
    """Those that are trained."""

    def __post_init__(self) -> None:
        self.weights = [parameter for parameter in self.parameters if parameter.requires_grad]


class AttentionSide:
    """Stands for ``layer.attend`` of the layer with this ``index``."""

    def __init__(self, layer: DecoderLayer, index: int, recorder: Recorder) -> None:
        self._attend: Callable[..., tuple[Tensor, Tensor]] = layer.attend
        self._index, self._recorder = index, recorder
        self._modules = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm)
        self._captured: dict[object, _CapturedSide] = {}
        self._checked = False
        self._shape: object = None
        self._shared: Shared | None = None
        self.num_replays = 0

    def use(self, shape: object, shared: Shared | None) -> None:
        """The layer's next forward belongs to a micro-batch of this shape, which is the only one under way;
        without ``shared``, forwards run as they are."""
        self._shape, self._shared = shape, shared

    def __call__(self, x_BSD: Tensor, attention: AttentionContext) -> tuple[Tensor, Tensor]:
        shared, self._shared = self._shared, None  # a second forward would overwrite what this one saves
        if not torch.is_grad_enabled():
            return self._attend(x_BSD, attention)
        static = None if shared is None else shared.follow(attention)
        if shared is None or static is None:
            return self._watched(x_BSD, attention)
        captured = self._captured.get(self._shape)
        if captured is None or captured.addresses != _addresses(captured.parameters):
            captured = self._captured[self._shape] = self._capture(x_BSD, static, shared)
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

    def _capture(self, given_BSD: Tensor, attention: AttentionContext, shared: Shared) -> _CapturedSide:
        x = given_BSD.detach().clone().requires_grad_(given_BSD.requires_grad)
        inner: list[tuple[Tensor, ...]] = []
        outputs: list[Tensor] = []

        def work() -> None:
            with torch.enable_grad(), as_current(None):  # nothing of it is computed again
                made = self._attend(x, attention)
            inner[:] = [made]
            if not outputs:
                outputs.extend(each.detach() for each in made)
            for place, each in zip(outputs, made, strict=True):
                if place.data_ptr() != each.data_ptr():  # never on a device, which repeats addresses
                    place.copy_(each.detach())

        parameters: list[Tensor] = [each for module in self._modules for each in module.parameters()]
        forward = recorded(self._recorder, work, f"attention of {tuple(x.shape)} values")
        return _CapturedSide(
            x=x,
            parameters=parameters,
            addresses=_addresses(parameters),
            forward=forward,
            inner=inner,
            outputs=tuple(outputs),
            grads=tuple(shared.buffer(number, each) for number, each in enumerate(outputs)),
            x_grad=shared.buffer(("x", self._index % 2), x),
        )


def _addresses(parameters: list[Tensor]) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in parameters)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, captured: _CapturedSide, recorder: Recorder, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.captured, ctx.recorder = captured, recorder
        captured.x.data.copy_(x)
        captured.forward.replay()
        return tuple(each.detach() for each in captured.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        captured: _CapturedSide = ctx.captured
        for place, grad in zip(captured.grads, grads, strict=True):
            place.copy_(grad)
        x, *weights = _backward(captured, ctx.recorder)
        return x, None, None, *(None if grad is None else grad.detach() for grad in weights)


def _backward(captured: _CapturedSide, recorder: Recorder) -> list[Tensor | None]:
    sinks = [_sink(weight) for weight in captured.weights]
    variant = tuple(_place(sink) for sink in sinks)
    known = captured.backwards.get(variant)
    if known is not None:
        for each in known.written:
            each.claim()
    else:
        found: list[Tensor | None] = []
        graph = recorded(
            recorder,
            lambda: _differentiate(captured, found),  # which claims by itself
            f"the backward of attention of {tuple(captured.x.shape)} values",
        )
        written = [each for each in sinks if each is not None and each.written]
        known = captured.backwards[variant] = _CapturedBackward(graph, found, written)
    known.graph.replay()
    return known.found


def _sink(weight: Tensor) -> ParamGrad | None:
    sink = sink_of(weight)
    assert sink is None or isinstance(sink, ParamGrad)
    return sink


def _place(sink: ParamGrad | None) -> tuple[int, bool]:
    if sink is None:
        return 0, False
    assert sink.is_wanted, "a micro-batch's backward is for the gradients of its weights"
    assert sink.view is not None
    return sink.view.data_ptr(), sink.written


def _differentiate(captured: _CapturedSide, places: list[Tensor | None]) -> None:
    """Gradients of the input and of the weights, into ``places``; the first time, these are where they
    came to lie."""
    weights, has_grad = captured.weights, captured.x.requires_grad
    inputs = [captured.x, *weights] if has_grad else weights
    found: list[Tensor | None] = list(
        torch.autograd.grad(captured.inner[0], inputs, captured.grads, retain_graph=True, allow_unused=True)
    )
    if not has_grad:
        found.insert(0, None)
    # Here, not by autograd: it would do so on the stream that captured, and nobody would wait for it.
    for index, weight in enumerate(weights, 1):
        grad, sink = found[index], sink_of(weight)
        if grad is not None and sink is not None:
            found[index] = deliver(grad, sink, weight.dtype)
    if not places:
        places.extend([captured.x_grad if has_grad else None, *found[1:]])
    for place, grad in zip(places, found, strict=True):
        if place is not None and grad is not None and place.data_ptr() != grad.data_ptr():
            place.copy_(grad)
