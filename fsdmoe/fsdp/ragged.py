"""The placement that stock DTensor has no word for: a flat range of the local tensor, of any length."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class RaggedShard(Placement):
    """The ranks of a mesh axis share the flattened local tensor in ranges of any length; some hold nothing.

    It says what *this* rank holds, so it differs from rank to rank. torch's own operations do not know it:
    ``to_dtensor()`` gives the same tensor in placements that they do.
    """

    start: int
    """First element of the flattened local tensor that this rank holds."""
    end: int

    def __post_init__(self) -> None:
        super().__init__()  # torch 2.11's base is not Python's, and refuses an object it has not made

    def __repr__(self) -> str:
        return f"RaggedShard([{self.start}, {self.end}))"

    __str__ = __repr__
