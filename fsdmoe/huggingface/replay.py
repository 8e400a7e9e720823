"""Record and replay of the routing of wrapped models, whose routers are their own.

Recording looks at the choices that reach an experts module. Replaying puts the recorded experts where the
router would choose: while the block around the experts runs, a top-k over all experts gives the recorded
indices and the values that stand there. So whatever a router does with what it chose (softmax before or
after, sigmoid, renormalisation, scaling) it does with the recorded experts, from its current logits, and it
learns. A router that chooses in another way is refused by the experts, which do not get what was recorded; so
is one that takes weights from scores in which experts outside of the best groups are masked (DeepSeek-V2),
where a recorded expert is one of those.

Legend: T tokens of this rank, E experts, K choices a token.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fsdmoe.core.autograd import next_node
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rewrites import Rewrite, foreign_forward, rewrite, rewrites_of
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.replay import RoutingTape
from fsdmoe.fsdp.outputs import tensors_of
from fsdmoe.huggingface.lora import path_around
from fsdmoe.huggingface.wrapped_experts import FollowedForward, ParallelForward


@contextlib.contextmanager
def follow_routing(
    model: nn.Module, experts: Mapping[str, ParallelForward], routing: RoutingContext
) -> Iterator[Callable[[Any], None]]:
    """In calls of the model inside, record or replay as the context says. ``experts`` by name, in order.
    Yields :func:`_follow_again`, to be called with what such a call returned."""
    tape = routing.replay
    assert tape is not None
    _check(model, experts, tape)
    for layer, (name, forward) in enumerate(experts.items()):
        forward.routing = routing.at_layer(layer)
        if tape.replays:
            block = model.get_submodule(path_around(name).rpartition(".")[0])
            if not any(each.which is Rewrite.REPLAY for each in rewrites_of(block)):
                rewrite(block, Rewrite.REPLAY, _replayed, forward)
    try:
        yield functools.partial(_follow_again, list(experts.values()), routing, next_node())
    finally:
        for forward in experts.values():
            forward.routing = None


def _follow_again(
    experts: Sequence[ParallelForward], routing: RoutingContext, first_node: int, out: Any
) -> None:
    """Let layers that are recomputed for the tensors of ``out`` follow ``routing``, as their forward did,
    whatever else is called before that backward, or shares it."""
    nodes = range(first_node, next_node())
    again = [
        (forward, FollowedForward(routing.at_layer(layer), nodes)) for layer, forward in enumerate(experts)
    ]

    def begin(_: Tensor) -> None:
        for forward, own in again:
            forward.routing_again = own
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        for forward, _ in again:
            forward.routing_again = None

    for tensor in tensors_of(out):
        if tensor.grad_fn is not None:
            tensor.register_hook(begin)


def _check(model: nn.Module, experts: Mapping[str, ParallelForward], tape: RoutingTape) -> None:
    if not experts:
        raise ConfigError(
            f"replay: expected experts that are known, got none in {type(model).__name__}; describe them "
            "with fsdmoe.register_moe_adapter"
        )
    if any(_is_compiled(module) for module in model.modules()):
        raise ConfigError(
            "replay: expected layers that are not compiled, got some; call torch.compile on none of them"
        )
    if tape.enforce == "ids_and_weights":
        raise ConfigError(
            "experts.replay_weights: the routers of a wrapped model weigh by themselves; set it to false"
        )
    wrong = {f.spec.num_experts for f in experts.values()} - {tape.num_experts}
    if wrong and tape.num_experts is not None:
        raise ConfigError(
            f"replay: expected {wrong.pop()} experts, as {type(model).__name__} has, got a tape of "
            f"{tape.num_experts}; replay with the recorded model"
        )


def _is_compiled(module: nn.Module) -> bool:
    forward = foreign_forward(module)
    # What stays outside of compiled graphs (torch.compiler.disable) has the first mark as well.
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def _replayed(experts: ParallelForward, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block that chooses as ``experts.routing`` says, whenever that has something to replay."""
    routing = experts.followed
    if routing is None or routing.replay is None or not routing.replay.replays:
        return forward(*args, **kwargs)
    with _RecordedTopK(routing, experts.spec.num_experts) as mode:
        experts.enforced = mode
        try:
            return forward(*args, **kwargs)
        finally:
            experts.enforced = None


def replays_choices() -> bool:
    """Whether a block around the caller makes its router choose what was recorded."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(isinstance(mode, _RecordedTopK) for mode in _get_current_function_mode_stack())


class _RecordedTopK(TorchFunctionMode):
    """``topk`` over all experts chooses what was recorded; every other function is itself."""

    def __init__(self, routing: RoutingContext, num_experts: int) -> None:
        super().__init__()
        self._routing, self._num_experts = routing, num_experts
        self.ids_TK: Tensor | None = None
        """What was put in place of the router's choice."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk) or not self._is_choice(args[0], found.indices):
            return found
        scores, like = args[0], found.indices
        tape, place = self._routing.replay, self._routing.place
        assert tape is not None
        like_TK = like.reshape(-1, like.shape[-1])
        self.ids_TK = tape.decision(place, like=like_TK, num_experts=self._num_experts).ids_TK
        ids = self.ids_TK.view_as(like)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _is_choice(self, scores: Tensor, indices: Tensor) -> bool:
        """Whether this is the choice among experts, and not one among groups of them, or of parts."""
        origin, tape = self._routing.origin, self._routing.replay
        num_tokens = scores.numel() // max(scores.shape[-1], 1)
        is_last = indices.shape[:-1] == scores.shape[:-1]
        return (
            is_last
            and tape is not None
            and (scores.shape[-1], indices.shape[-1]) == (self._num_experts, tape.top_k)
            and (origin is None or num_tokens == len(origin.document))
        )
