"""The forward of layers that keep less: each call of theirs is a :class:`LayerCall`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fsdmoe.core.capturing import compute_again
from fsdmoe.core.rewrites import Rewrite, rewrite
from fsdmoe.memory.calls import change_calls
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.memory.layer_call import LayerCall, may_keep_less, tensors_in
from fsdmoe.memory.offload import Offload, refuse_capture


def keep_less(layers: Sequence[nn.Module], memory: MemoryConfig, offload: Offload | None = None) -> None:
    """From now on, the layers recompute what ``memory`` says, and give what it names to ``offload``."""
    for index, layer in enumerate(layers):
        parts = memory.parts_at(index, len(layers))
        if "layer" in parts:
            rewrite(layer, Rewrite.LAYER_AGAIN, compute_again, says="recomputed: layer")
            parts = frozenset()
        if parts or offload is not None:
            change_calls(layer)
            moves = memory.offloads_at(index, len(layers))
            around = _LayerForward(layer, parts, offload, index, moves)
            says = [f"recomputed: {', '.join(sorted(parts))}"] * bool(parts) + ["offloads"] * moves
            rewrite(layer, Rewrite.LAYER_CALL, around, says="; ".join(says))


class _LayerForward:
    def __init__(
        self, layer: nn.Module, parts: frozenset[str], offload: Offload | None, index: int, moves: bool
    ) -> None:
        self._layer, self._parts = layer, parts
        self._offload, self._index, self._moves = offload, index, moves

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not may_keep_less():
            return forward(*args, **kwargs)
        x, *others = tensors_in((args, kwargs), depth=5)  # which reaches into sub-batches
        if self._offload is None:
            with LayerCall(self._parts, self._kept(others)).running():
                return forward(*args, **kwargs)
        refuse_capture(x.device)
        moved = self._offload.begin(self._index, moves=self._moves)
        call = LayerCall(self._parts, self._kept(others), moved)
        call.name("layer_input", x)
        with call.running():
            result = forward(*args, **kwargs)
        moved.end_forward(next((each for each in tensors_in(result) if each.requires_grad), None))
        return result

    def _kept(self, others: list[Tensor]) -> Iterator[Tensor]:
        """Weights as they are gathered now, and what the layer is given apart from its input, which others
        hold too."""
        for module in self._layer.modules():  # one walk, without the names that ``parameters`` would make
            yield from (each for each in module._parameters.values() if each is not None)
            yield from (each for each in module._buffers.values() if each is not None)
        yield from others
