"""Names of layers and phases in profiles: ``layer 3 forward``, ``layer 3 experts backward``.

Each is a range of torch's profiler (on the host, where kernels are launched) and an NVTX range. A forward
lies between two hooks of its module. A backward begins when the gradient of the module's output is there, and
ends with that of its input: hooks of these two tensors, which leave the graph as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

PARTS = {"self_attn": "attention", "mlp": "mlp", "mlp.experts": "experts"}
"""Submodules of a layer that have ranges of their own, and what these are called."""


class Range:
    """One name, open or not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._recorded: record_function | None = None
        self._nvtx: int | None = None

    def open(self) -> None:
        self.close()  # a pass that failed midway left it open
        self._recorded = record_function(self.name)
        self._recorded.__enter__()
        if torch.cuda.is_available():
            self._nvtx = torch.cuda.nvtx.range_start(self.name)

    def close(self) -> None:
        if self._recorded is not None:
            self._recorded.__exit__(None, None, None)
            self._recorded = None
        if self._nvtx is not None:
            torch.cuda.nvtx.range_end(self._nvtx)
            self._nvtx = None


def name_ranges(layers: Sequence[nn.Module]) -> None:
    """Give every layer, and what :data:`PARTS` names of it, ranges for forward and backward."""
    for index, layer in enumerate(layers):
        _follow(layer, f"layer {index}")
        modules = dict(layer.named_modules())
        for path, part in PARTS.items():
            if path in modules:
                _follow(modules[path], f"layer {index} {part}")


def _follow(module: nn.Module, name: str) -> None:
    forward, backward = Range(f"{name} forward"), Range(f"{name} backward")

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        forward.open()
        _on_gradient((args, kwargs), backward.close)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        forward.close()
        _on_gradient(output, backward.open)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _on_gradient(tree: Any, act: Callable[[], None]) -> None:
    """Call ``act`` when the gradient of the first tensor in ``tree`` that takes one is known."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _gradient: act())
            return
