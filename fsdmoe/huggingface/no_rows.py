"""A call without rows: ``input_ids`` of shape [0, S], on a rank that has nothing to do while others have.

Every rank must run every layer, for the others' rows need its weights and its experts; but transformers'
models do not compute on tensors without elements. So the call is made with one row of zeros, and its outputs
are cut to no rows again; its losses, times zero, are zeros whose backward runs through all layers and adds
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdmoe.huggingface.loss import UnmadeLogits
from fsdmoe.huggingface.routing import policies_of

_ROWS = ("input_ids", "inputs_embeds")
_IMAGES = ("pixel_values", "image_", "video_", "mm_encoder_outputs")


def take_calls_without_rows(model: nn.Module) -> None:
    """Let a model of transformers be called with batches that have no rows."""
    if not hasattr(model, "get_input_embeddings"):
        return
    calls = _Calls()
    model.register_forward_pre_hook(calls.fill, with_kwargs=True)
    model.register_forward_hook(calls.cut, with_kwargs=True)


class _Calls:
    def __init__(self) -> None:
        self._is_filled = False
        """The forward under way has a row that its caller did not give."""

    @torch._dynamo.disable
    def fill(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = next(
            (kwargs[name] for name in _ROWS if kwargs.get(name) is not None), args[0] if args else None
        )
        self._is_filled = isinstance(rows, Tensor) and rows.dim() > 1 and not rows.shape[0]
        if (policies := policies_of(model)) is not None:
            policies.has_rows = not self._is_filled
        if not self._is_filled:
            return None
        kept = {name: value for name, value in kwargs.items() if not name.startswith(_IMAGES)}
        if kept.get("attention_mask") is not None:
            del kept["attention_mask"]  # of zeros it would leave nothing to attend to
        return tree_map_only(Tensor, _with_a_row, (args, kept))

    @torch._dynamo.disable
    def cut(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._is_filled:
            return None
        self._is_filled = False
        if isinstance(output, dict):
            for key, value in output.items():  # in place: transformers' outputs refuse update()
                output[key] = tree_map_only(Tensor, _without_rows, value)
            return output
        return tree_map_only(Tensor, _without_rows, output)


def _with_a_row(tensor: Tensor) -> Tensor:
    """One of zeros, where there was none."""
    if tensor.numel() or not tensor.dim():
        return tensor
    shape = list(tensor.shape)
    shape[shape.index(0)] = 1  # the rows, whether or not another dim comes before them
    shape = [size or 2 for size in shape]  # rows of no tokens: two, so that one has a next
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def _without_rows(tensor: Tensor) -> Tensor:
    if isinstance(tensor, UnmadeLogits):
        return tensor  # has no values anyway
    if tensor.dim():
        return tensor[:0]
    return tensor.nan_to_num() * 0 if tensor.is_floating_point() else tensor
