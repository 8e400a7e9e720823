"""The layer of another tree, a commit before, as a contender of ``moe_layer.py``: in the same process, of the
same weights.

Two packages of one name do not fit into a process, so a copy of the other tree's is made in which the name is
another one, of modules, imports and registered operators alike.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from moe_layer_contenders import Contender, Data, FsdmoeLayer

NAME = "fsdmoe_before"
_copies: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


def copy_renamed(tree: Path, folder: Path) -> None:
    """The tree's package under ``folder``, called ``NAME``."""
    for source in (tree / "fsdmoe").rglob("*.py"):
        target = folder / NAME / source.relative_to(tree / "fsdmoe")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(re.sub(r"\bfsdmoe\b", NAME, source.read_text()))


@functools.cache
def load(tree: Path) -> tuple[Any, Any]:
    """The other tree's kernels and its router's product."""
    if not (tree / "fsdmoe").is_dir():
        raise SystemExit(f"--before: expected a folder that holds fsdmoe/, got {tree}")
    _copies.append(tempfile.TemporaryDirectory())
    copy_renamed(tree, Path(_copies[-1].name))
    sys.path.append(_copies[-1].name)
    names = f"{NAME}.kernels.triton", f"{NAME}.experts.scores"
    return importlib.import_module(names[0]), importlib.import_module(names[1])


class LayerBefore(FsdmoeLayer):
    def __init__(self, data: Data, tree: Path) -> None:
        super().__init__(data)
        self.kernels, self.scores = load(tree)
        self.policy = self.kernels.TopKPolicy(top_k=data.shape.top_k)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_TD = x_BSD.view(-1, x_BSD.shape[-1])
        logits_TE, x_TD = self.scores.logits_and_input(x_TD, self.router)
        routed = self.kernels.router_topk_triton(logits_TE, None, self.policy)
        given = x_TD, routed.weights, routed.ids, self.gate_up, self.down
        return self.kernels.experts_mlp_triton(*given).view_as(x_BSD)


def contender(tree: Path) -> Contender:
    return Contender(lambda data: LayerBefore(data, tree.resolve()))
