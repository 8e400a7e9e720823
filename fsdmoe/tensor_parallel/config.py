"""The ``[tensor_parallel]`` section, and what it cannot be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.errors import ConfigError
from fsdmoe.rules import one_of

Overlap = Literal["none", "ring"]


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig:
    """How layers that are split over ranks (mesh.tp) exchange tokens."""

    overlap: Overlap = "none"
    """What is done while tokens are exchanged: none waits for one collective before (or after) the matrix
    product; ring cuts both into mesh.tp pieces and multiplies one piece while the next passes from rank to
    rank. Same bytes; worth it where a piece is large enough to fill the device."""

    def __post_init__(self) -> None:
        if problems := one_of("tensor_parallel", vars(self), {"overlap": get_args(Overlap)}):
            raise ConfigError(*problems)


def check_overlap(config: TensorParallelConfig, *, compiled: bool) -> None:
    """Refuse an overlap that compiled layers would leave out: they keep their exchanges in one graph."""
    if compiled and config.overlap != "none":
        raise ConfigError(
            f"tensor_parallel.overlap: expected none in compiled layers, got {config.overlap}; write none, "
            "or set train.compile = false"
        )
