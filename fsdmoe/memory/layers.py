"""The forward of layers that keep less: each call of theirs is a :class:`LayerCall`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.memory.layer_call import LayerCall, may_keep_less, tensors_in


def keep_less(layer: nn.Module, parts: frozenset[str]) -> None:
    """From now on, ``layer`` recomputes ``parts`` in backward; ``layer`` among them is all of it."""
    if "layer" in parts:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        parts = frozenset()
    if parts:
        layer.forward = functools.partial(_LayerForward(layer, parts), layer.forward)


class _LayerForward:
    def __init__(self, layer: nn.Module, parts: frozenset[str]) -> None:
        self._layer, self._parts = layer, parts

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not may_keep_less():
            return forward(*args, **kwargs)
        call = LayerCall(self._parts, self._kept(args, kwargs))
        with call.running():
            return forward(*args, **kwargs)

    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """Weights as they are gathered now, and what the layer is given beside its input: others have that
        too."""
        yield from self._layer.parameters()
        yield from self._layer.buffers()
        given = tensors_in((args, kwargs))
        next(given, None)
        yield from given
