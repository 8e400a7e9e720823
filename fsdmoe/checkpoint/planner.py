"""Who writes which box: torch.distributed.checkpoint's planners, for a flat dict of tensors.

Saving: every rank lists the boxes it holds; the coordinator gives each box that several ranks hold
(replicas over ``dp_outer``, plain tensors) to the one with the fewest bytes so far, and checks that all
boxes together make up every tensor once. While nothing changes, ranks say so instead of sending their
lists again, and the coordinator's answer is reused: from the second save on, planning costs one small
message a rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import StoredBox, check_tiling
from fsdmoe.checkpoint.tree import Tree


@dataclass
class PlanCache:
    """What one rank remembers between the saves of one run."""

    signature: str = ""
    """Of this rank's own boxes, as of the last plan that was carried out."""
    final: SavePlan | None = None
    """What this rank writes."""
    all_signatures: list[str] = field(default_factory=list)
    """Coordinator: every rank's signature, their boxes, and the metadata made of them."""
    all_plans: list[SavePlan] = field(default_factory=list)
    metadata: Metadata | None = None
    hits: int = 0

    def names(self) -> set[str] | None:
        """The tensors of which this rank writes anything; None when there is no plan yet."""
        return None if self.final is None else {item.index.fqn for item in self.final.items}

    def clear(self) -> None:
        self.signature, self.final, self.metadata = "", None, None
        self.all_signatures, self.all_plans = [], []


class BoxSavePlanner(SavePlanner):
    """Plans one save of a flat dict of tensors and of plain values."""

    def __init__(self, values: Tree, cache: PlanCache | None = None, staged: set[str] | None = None) -> None:
        """``staged`` names the tensors that may be written where the others are not copies and keep
        changing.
        """
        self._staged = staged
        self._digests = {key: _digest(value) for key, value in values.items()}
        self._cache = cache if cache is not None else PlanCache()
        self._tensors: dict[str, torch.Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._tensors = state_dict

    def create_local_plan(self) -> SavePlan:
        items = [item for name, tensor in self._tensors.items() for item in _create_write_items(name, tensor)]
        self._signature = _signature(items)
        note = {"signature": self._signature, "digests": self._digests, "same": False}
        if self._cache.final is not None and self._cache.signature == self._signature:
            return SavePlan([], planner_data={**note, "same": True})
        return SavePlan(items, planner_data=note)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        cache, signatures = self._cache, [plan.planner_data["signature"] for plan in all_plans]
        _check_values_agree([plan.planner_data["digests"] for plan in all_plans])
        known = cache.metadata is not None and signatures == cache.all_signatures
        if known and all(plan.planner_data["same"] for plan in all_plans):
            cache.hits += 1
            assert cache.metadata is not None
            return [SavePlan([], planner_data={"same": True}) for _ in all_plans], cache.metadata
        whole = []
        for rank, plan in enumerate(all_plans):
            if plan.planner_data["same"]:
                if cache.all_signatures[rank : rank + 1] != [signatures[rank]]:
                    raise CheckpointError(
                        f"rank {rank} and the coordinator remember different plans; save again"
                    )
                plan = cache.all_plans[rank]
            whole.append(plan)
        plans, metadata = create_default_global_save_plan(_assign(whole))
        check_whole(metadata)
        cache.all_signatures, cache.all_plans, cache.metadata = signatures, whole, metadata
        return [dataclasses.replace(plan, planner_data={"same": False}) for plan in plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.planner_data["same"]:
            assert self._cache.final is not None
            return self._cache.final
        self._cache.signature, self._cache.final = self._signature, new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        if self._staged is not None and write_item.index.fqn not in self._staged:
            raise CheckpointError(
                f"{write_item.index.fqn}: the plan changed after the state was copied; save again"
            )
        found = find_state_dict_object(self._tensors, write_item.index).detach()
        data = write_item.tensor_data
        if data is not None and (data.properties.dtype != found.dtype or data.chunk.sizes != found.shape):
            raise CheckpointError(f"{write_item.index.fqn} changed between planning and writing")
        return found


def item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _assign(plans: list[SavePlan]) -> list[SavePlan]:
    """Every box to one of the ranks that hold it, so that bytes come out even."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            first = items.setdefault(item.index, item)
            if first.tensor_data is None or item.tensor_data is None or not _same_box(first, item):
                raise CheckpointError(
                    f"{item.index.fqn}: ranks {holders[item.index][0]} and {rank} hold different boxes at "
                    f"{tuple(item.index.offset or ())}: a plain tensor must be the same on every rank"
                )
    load, kept = [0] * len(plans), [[] for _ in plans]  # type: tuple[list[int], list[list[WriteItem]]]
    for index in sorted(holders, key=lambda i: len(holders[i])):  # boxes without a choice first
        rank = min(holders[index], key=lambda r: load[r])
        load[rank] += item_bytes(items[index])
        kept[rank].append(items[index])
    return [dataclasses.replace(plan, items=mine) for plan, mine in zip(plans, kept, strict=True)]


def _same_box(one: WriteItem, other: WriteItem) -> bool:
    a, b = one.tensor_data, other.tensor_data
    assert a is not None
    assert b is not None
    return a.size == b.size and a.chunk.sizes == b.chunk.sizes and a.properties.dtype == b.properties.dtype


def check_whole(metadata: Metadata) -> None:
    """Every tensor made up of boxes exactly once, or :class:`CheckpointError`."""
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        boxes = [StoredBox(tuple(c.offsets), tuple(c.sizes), "", 0) for c in tensor.chunks]
        try:
            check_tiling(name, tuple(tensor.size), boxes)
        except ValueError as error:
            raise CheckpointError(f"cannot save {name}: {error}; do all ranks hold their pieces?") from error


def _check_values_agree(digests: list[dict[str, str]]) -> None:
    for rank, other in enumerate(digests):
        differing = sorted(
            key for key in digests[0].keys() | other.keys() if digests[0].get(key) != other.get(key)
        )
        if differing:
            raise CheckpointError(
                f"values under {', '.join(map(repr, differing))} differ between rank 0 and rank {rank}; "
                "a checkpoint holds one value for all ranks, so that it can be loaded on any number of them"
            )


def _signature(items: list[WriteItem]) -> str:
    found = hashlib.sha256()
    for item in items:
        assert item.type != WriteItemType.BYTE_IO
        data = item.tensor_data
        assert data is not None
        text = (item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size))
        found.update(repr((*text, data.properties.dtype)).encode())
    return found.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
