"""Rotary positions of wrapped models whose frequencies follow the length of a text: dynamic and longrope.

transformers looks at the last position of a call, and ``dynamic`` at those of earlier calls too: which rows
share a micro-batch, or which piece of a row a rank holds, would decide what a document gets. Here it is each
document's own length, as in fsdmoe's decoders (:mod:`fsdmoe.models.rope_scaling`); for one document a call
the two are the same.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from fsdmoe.checkpoint.hf_rope import read_rope
from fsdmoe.core.rewrites import Rewrite, rewrite
from fsdmoe.huggingface.for_a_while import set_for_a_while
from fsdmoe.models.rope_scaling import RotaryPositions, document_reach

FOLLOW_LENGTH = ("dynamic", "longrope")


class DocumentRotary:
    """The rotary modules of one model; replaces their forward while :meth:`following` is in effect."""

    def __init__(self, model: nn.Module) -> None:
        self._lengths_BS: Tensor | None = None
        self.unknown: list[str] = []
        """Modules that follow the length of a call in a way that is not known here."""
        self._is_used = False
        for name, module in model.named_modules():
            if getattr(module, "rope_type", None) is None or not _follows_length(module.rope_type):
                continue
            positions = _positions_of(name, module)
            if positions is None:
                self.unknown.append(name)
            else:
                self._is_used = True
                rewrite(module, Rewrite.ROTARY, self._rotate, positions)

    def lengths(self, positions_BS: Tensor, document_ids_BS: Tensor | None) -> Tensor | None:
        """The length of every token's document, from whole rows; none where no module asks for it."""
        return document_reach(positions_BS, document_ids_BS) if self._is_used else None

    def following(self, lengths_BS: Tensor | None) -> contextlib.AbstractContextManager[None]:
        """In here, frequencies are those of the ``lengths`` of the tokens of the call; a trial may run inside
        of another call."""
        return set_for_a_while(self, "_lengths_BS", lengths_BS)

    def _rotate(
        self, positions: RotaryPositions, own: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._lengths_BS is None:  # called by somebody else, for generation say
            return own(x, position_ids, *args, **kwargs)
        return _doubled(positions.tables(position_ids, self._lengths_BS), x.dtype)


def _follows_length(rope_type: Any) -> bool:
    """Of one kind, or of several by kind of layer."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind in FOLLOW_LENGTH for kind in kinds)


def _positions_of(name: str, module: nn.Module) -> RotaryPositions | None:
    """What the module computes, found by trying; none for another form than that of transformers' models.

    A module inside a layer is not known either: recomputed in backward, it would not find the lengths."""
    config: Any = getattr(module, "config", None)
    table = getattr(config, "rope_parameters", None)
    if not isinstance(table, dict) or any(part.isdigit() for part in name.split(".")):
        return None
    found, inv_freq = read_rope({"rope_parameters": table}), getattr(module, "inv_freq", None)
    if found.problems or found.theta is None or not isinstance(inv_freq, Tensor):
        return None
    dim, longest = 2 * inv_freq.shape[-1], config.max_position_embeddings
    positions = RotaryPositions(dim, found.theta, found.rope, longest)
    return positions if _computes(module, positions, inv_freq.device) else None


@torch.no_grad()
def _computes(module: nn.Module, positions: RotaryPositions, device: torch.device) -> bool:
    """Whether the module's own forward, tried with a short and a long text, is what ``positions`` says."""
    trained = positions.rope.original_max_position_embeddings or positions.max_position_embeddings
    for length in (8, 8 * trained):
        position_ids = torch.tensor([[1, 7, length - 1]], device=device)
        try:
            # Of a copy, because it may remember the length; by the class, in case it was replaced before.
            theirs = type(module).forward(
                copy.deepcopy(module), torch.zeros(1, 1, device=device), position_ids
            )
        except Exception:  # an unknown forward, given inputs it may not expect: any failure means "not known"
            return False
        ours = _doubled(positions.tables(position_ids, document_reach(position_ids, None)), torch.float32)
        # Small angles: in those of the last position, the last bit of a frequency shows.
        if len(theirs) != 2 or any(
            a.shape != b.shape or not torch.allclose(a[:, :2], b[:, :2], 1e-4, 1e-4)
            for a, b in zip(ours, theirs, strict=True)
        ):
            return False
    return True


def _doubled(tables: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for both halves of a head, as transformers' models take them."""
    cos, sin = (torch.cat((table, table), dim=-1).to(dtype) for table in tables)
    return cos, sin
