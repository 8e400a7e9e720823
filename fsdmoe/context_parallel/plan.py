"""The attention plan of one micro-batch: its split, its process group, and the blocks that each mode needs.

Made once for a micro-batch and shared by all layers. The group belongs to the plan, not to the attention
module, so consecutive micro-batches may use groups of different sizes (dynamic context parallelism).
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block, build_block
from fsdmoe.context_parallel.config import Mode
from fsdmoe.context_parallel.split import SequenceSplit, pick

_Kind = Literal["ring", "gathered", "whole"]


class OwnTokens(NamedTuple):
    """Of a rank, each ``[B, L]``; see :class:`SequenceSplit`."""

    index_BL: Tensor
    document_BL: Tensor
    position_BL: Tensor


class AttentionPlan:
    """What this rank's queries see, and where it is. Blocks are built on the host, on first use or ahead of
    it (:meth:`build`), and moved when they are first asked for."""

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
        self._host: dict[_Kind, list[Block | None]] = {}

    def build(self, mode: Mode) -> AttentionPlan:
        """Do the host's part of what ``mode`` needs now, before the first layer asks for it."""
        if self.size == 1 or mode == "all_to_all":
            self._on_host("whole")
        else:
            self._on_host("ring" if mode == "ring" else "gathered")
        return self

    def part(self, rows: slice) -> AttentionPlan:
        """Of some of the rows."""
        return AttentionPlan(self.split.part(rows), self.group, self.device)

    @cached_property
    def own(self) -> OwnTokens:
        """This rank's tokens, on the device: moved once for all columns of the batch."""
        split = self.split
        host = torch.stack([x[self.rank] for x in (split.index_RBL, split.document_RBL, split.position_RBL)])
        if self.device.type == "cuda":
            host = host.pin_memory()
        return OwnTokens(*host.to(self.device, non_blocking=True))

    def cut(self, x_BS: Tensor) -> Tensor:
        """This rank's ``[B, L]`` of a column of whole rows; zeros where there is no token."""
        return pick(x_BS, self.own.index_BL, is_padded=self.split.num_padding > 0)

    @cached_property
    def ring(self) -> list[Block | None]:
        """Own queries against the keys of each rank in turn."""
        return self._moved("ring")

    @cached_property
    def gathered(self) -> Block | None:
        """Own queries against the keys of all ranks, rank after rank."""
        return self._moved("gathered")[0]

    @cached_property
    def whole(self) -> Block | None:
        """All queries against all keys, rank after rank."""
        return self._moved("whole")[0]

    def _moved(self, kind: _Kind) -> list[Block | None]:
        return [None if block is None else block.to(self.device) for block in self._on_host(kind)]

    def _on_host(self, kind: _Kind) -> list[Block | None]:
        """Built when they are first asked for."""
        if kind not in self._host:
            own, everyone = [self.rank], list(range(self.size))
            sides = {
                "ring": [(own, [source]) for source in everyone],
                "gathered": [(own, everyone)],
                "whole": [(everyone, everyone)],
            }
            self._host[kind] = [self._block(queries, keys) for queries, keys in sides[kind]]
        return self._host[kind]

    def _block(self, query_ranks: list[int], key_ranks: list[int]) -> Block | None:
        return build_block(
            *self._tokens(query_ranks), *self._tokens(key_ranks), causal=set(query_ranks) <= set(key_ranks)
        )

    def _tokens(self, ranks: list[int]) -> tuple[Tensor, Tensor]:
        return self.split.document_RBL[ranks].reshape(-1), self.split.position_RBL[ranks].reshape(-1)
