"""A state as a tree: nested dicts whose leaves are tensors or plain JSON values.

Tensors get one global name each, the keys of their path joined by ``/`` (parameter names keep their dots)::

    {"model": {"lm_head.weight": T}, "step": 7}  ->  tensors {"model/lm_head.weight": T}, values {"step": 7}

Values are stored as JSON, so only what JSON returns unchanged is accepted: no tuples, no integer keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fsdmoe.checkpoint.errors import CheckpointError

Tree = dict[str, Any]
SEPARATOR = "/"


def split_tree(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Tree]:
    """The tensors of a state by global name, and the tree of what is left."""
    tensors: dict[str, torch.Tensor] = {}
    values = _split(state, (), tensors)
    return tensors, values


def _split(node: Mapping[str, Any], path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Tree:
    values: Tree = {}
    for key, child in node.items():
        if not isinstance(key, str) or not key or SEPARATOR in key:
            where = SEPARATOR.join(path) or "the state"
            raise CheckpointError(f"{where}: expected keys that are text without {SEPARATOR!r}, got {key!r}")
        here = (*path, key)
        if isinstance(child, torch.Tensor):
            tensors[SEPARATOR.join(here)] = child
        elif isinstance(child, Mapping):
            below = _split(child, here, tensors)
            if below or not child:
                values[key] = below
        else:
            check_json(child, SEPARATOR.join(here))
            values[key] = child
    return values


def check_json(value: Any, where: str) -> None:
    """Refuse what would come back from JSON as something else."""
    if value is None or type(value) in (str, int, float, bool):
        return
    if isinstance(value, list):
        for index, child in enumerate(value):
            check_json(child, f"{where}[{index}]")
        return
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: expected text as keys, got {key!r}; turn them into text")
            check_json(child, f"{where}.{key}")
        return
    raise CheckpointError(
        f"{where}: expected a tensor, a dict, a list, text, a number, true, false or None, "
        f"got {type(value).__name__}; turn it into one of these before saving"
    )


def join_tree(tensors: Mapping[str, torch.Tensor], values: Tree) -> Tree:
    """The inverse of :func:`split_tree`."""
    joined = _copy_dicts(values)
    for name, tensor in tensors.items():
        *path, last = name.split(SEPARATOR)
        node = joined
        for key in path:
            node = node.setdefault(key, {})
        node[last] = tensor
    return joined


def _copy_dicts(node: Any) -> Any:
    return {key: _copy_dicts(child) for key, child in node.items()} if isinstance(node, dict) else node
