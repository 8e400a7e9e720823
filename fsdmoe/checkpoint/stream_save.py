"""Writing checkpoints whose tensors are computed box by box while they are written, never whole.

Conversions use it: every rank takes a share of the boxes, makes each when its turn comes, and the folder
becomes visible only when all are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fsdmoe.checkpoint.agree import world
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.planner import check_whole, item_bytes
from fsdmoe.checkpoint.session import save_with
from fsdmoe.checkpoint.writer import SaveOrder


@dataclass(frozen=True)
class LazyBox:
    """A box of a tensor, and how to make its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    low: tuple[int, ...]
    sizes: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    def item(self) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(self.low), torch.Size(self.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape))
        return WriteItem(
            MetadataIndex(self.name, torch.Size(self.low)), WriteItemType.SHARD, tensor_data=data
        )


class _LazyPlanner(SavePlanner):
    def __init__(self, boxes: Sequence[LazyBox], progress: Callable[[int], None]) -> None:
        rank, num_ranks = world()
        self._mine = list(boxes)[rank::num_ranks]
        self._by_index = {box.item().index: box for box in self._mine}
        self._progress = progress

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([box.item() for box in self._mine])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        check_whole(metadata)
        return [dataclasses.replace(plan) for plan in plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        box = self._by_index[write_item.index]
        made = box.make()
        if tuple(made.shape) != box.sizes or made.dtype != box.dtype:
            raise CheckpointError(
                f"{box.name}: made {tuple(made.shape)} {made.dtype}, promised {box.sizes} {box.dtype}"
            )
        self._progress(item_bytes(write_item))
        return made


def save_boxes(
    order: SaveOrder, boxes: Sequence[LazyBox], progress: Callable[[int], None] = lambda count: None
) -> None:
    """Write a checkpoint of boxes, this rank its share of them. Collective; every rank passes the same
    list."""
    save_with(order, {}, _LazyPlanner(boxes, progress))
