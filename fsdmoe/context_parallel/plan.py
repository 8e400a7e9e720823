"""The attention plan of one micro-batch: its split, its process group, and the blocks that each mode needs.

Made once for a micro-batch and shared by all layers. The group belongs to the plan, not to the attention
module, so consecutive micro-batches may use groups of different sizes (dynamic context parallelism).
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block, build_block
from fsdmoe.context_parallel.split import SequenceSplit


class AttentionPlan:
    """What this rank's queries see, and where it is. Blocks are built on first use, on the host."""

    def __init__(
        self, split: SequenceSplit, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        size = 1 if group is None else dist.get_world_size(group)
        if size != split.size:
            raise AssertionError(
                f"expected a group of {split.size} ranks, as many as the split has, got {size}"
            )
        self.split = split
        self.group = group
        self.size = size
        self.rank = 0 if group is None else dist.get_rank(group)
        self.device = torch.device(device)

    @cached_property
    def ring(self) -> list[Block | None]:
        """Own queries against the keys of each rank in turn."""
        return [self._block([self.rank], [source]) for source in range(self.size)]

    @cached_property
    def gathered(self) -> Block | None:
        """Own queries against the keys of all ranks, rank after rank."""
        return self._block([self.rank], list(range(self.size)))

    @cached_property
    def whole(self) -> Block | None:
        """All queries against all keys, rank after rank."""
        everyone = list(range(self.size))
        return self._block(everyone, everyone)

    def _block(self, query_ranks: list[int], key_ranks: list[int]) -> Block | None:
        block = build_block(
            *self._tokens(query_ranks), *self._tokens(key_ranks), causal=set(query_ranks) <= set(key_ranks)
        )
        return None if block is None else block.to(self.device)

    def _tokens(self, ranks: list[int]) -> tuple[Tensor, Tensor]:
        return self.split.document_RBL[ranks].reshape(-1), self.split.position_RBL[ranks].reshape(-1)
