"""A checkpoint of ours to a stock torch.distributed.checkpoint folder, chunk by chunk, ranks in parallel.

FSDP2 loads it with ``dcp.load`` into what ``get_state_dict`` returns, and ``set_state_dict``. Chunks are
plain boxes of rows, so any number of ranks and any placements read it.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdmoe.checkpoint.agree import from_first, together, world
from fsdmoe.checkpoint.catalog import require
from fsdmoe.checkpoint.dcp_folder import DCP_METADATA
from fsdmoe.checkpoint.dcp_names import Rules, apply_rules
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Index, Shape, StoredTensor, is_scale_history
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.session import open_verified, save_with
from fsdmoe.checkpoint.storage import open_storage, split_address
from fsdmoe.checkpoint.stream_save import LazyBox
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.checkpoint.writer import BoxWriter, SaveOrder, travelling_errors

Progress = Callable[[int], None]
Path = tuple[str | int, ...]
# A reader takes in a chunk whole, whatever it needs of it.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class DCPExportPolicy:
    """How a stock folder is written."""

    model_key: str = "model"
    """Key of the model's state in the state that will be loaded; empty: its names stand bare."""
    optimizer_key: str = "optim"
    """Key of the optimizer's state."""
    rules: Rules = ()
    """(pattern, replacement) for parameter names; an empty replacement leaves a tensor out."""
    flat_optimizer: bool = False
    """As ``StateDictOptions(flatten_optimizer_state_dict=True)`` reads it, which torchtitan uses."""
    one_group: bool = False
    """All parameters in one group, with the settings of the decayed ones."""
    only_model: bool = False
    """Leave the optimizer state."""


@dataclass
class _Stock:
    """The content of a stock folder."""

    boxes: list[LazyBox] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def add_object(self, path: Path, value: Any) -> None:
        self.objects[self._key(path)] = value

    def add_tensor(self, path: Path, name: str, stored: StoredTensor, reader: RegionReader) -> None:
        key = self._key(path)
        for low, sizes in _rows(stored):
            self.boxes.append(
                LazyBox(key, stored.shape, stored.dtype, low, sizes, _maker(reader, name, low, sizes))
            )

    def _key(self, path: Path) -> str:
        key = ".".join(map(str, path))
        if key in self.paths:
            raise CheckpointError(f"{key}: two tensors would have this name; look at --map")
        self.paths[key] = path
        return key


def to_dcp(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    policy: DCPExportPolicy | None = None,
    *,
    progress: Progress = lambda count: None,
) -> None:
    """Write a checkpoint as a folder that stock ``torch.distributed.checkpoint`` loads. Collective.

    Args:
        source: A checkpoint, or a folder of them: then the newest.
        target: The folder to write.
        policy: Keys and names, and how the optimizer's parameters are grouped.
        progress: Called with the number of bytes that were done since the last call.
    """
    policy = policy or DCPExportPolicy()
    root, name = from_first(lambda: _found(source))
    storage = open_storage(root)
    index = together(lambda: open_verified(storage, name, "fast"))
    stock = together(lambda: _content(index, RegionReader(storage, name, index, threads=1), policy))
    there, called = split_address(target)
    order = SaveOrder(there, called, {}, {})
    save_with(order, {}, _Planner(stock, progress), writer=_Writer(order, world()[0]))


def _content(index: Index, reader: RegionReader, policy: DCPExportPolicy) -> _Stock:
    stock = _Stock()
    model = {
        n.removeprefix("model/"): t for n, t in index.tensors.items()
        if n.startswith("model/") and not is_scale_history(n)
    }  # fmt: skip
    if not model:
        raise CheckpointError("there is no model in this checkpoint: no tensors under 'model'")
    tied = {
        a.removeprefix("model/"): b.removeprefix("model/") for a, b in index.about.get("tied", {}).items()
    }
    owners = {**{name: name for name in model}, **{a: b for a, b in tied.items() if b in model}}
    head = tuple(word for word in policy.model_key.split(".") if word)
    for name, owner in owners.items():
        renamed = _renamed(policy, name)
        if renamed:
            stock.add_tensor((*head, renamed), f"model/{owner}", model[owner], reader)
    if not policy.only_model and "optimizer" in index.values:
        _add_optimizer(stock, index, reader, policy)
    step = index.values.get("progress", {}).get("step", index.values.get("step", index.about.get("step")))
    if isinstance(step, int):
        stock.add_object(("step",), step)
    return stock


def _add_optimizer(stock: _Stock, index: Index, reader: RegionReader, policy: DCPExportPolicy) -> None:
    names: dict[str, bool] = {}
    head = tuple(policy.optimizer_key.split("."))
    for full, stored in index.tensors.items():
        section, _, rest = full.partition("/state/")
        name, _, kind = rest.rpartition("/")
        if section != "optimizer" or not name or not (renamed := _renamed(policy, name)):
            continue
        if kind not in ("step", "exp_avg", "exp_avg_sq"):
            raise CheckpointError(f"{full}: only AdamW's state is written; --only-model leaves the optimizer")
        if kind == "exp_avg":
            names[renamed] = len(stored.shape) >= 2
        tail = (f"state.{renamed}.{kind}",) if policy.flat_optimizer else ("state", renamed, kind)
        stock.add_tensor((*head, *tail), full, stored, reader)
    for number, (settings, members) in enumerate(_groups(index.values["optimizer"], names, policy)):
        for key, value in settings.items():
            if policy.flat_optimizer:
                for member in members:
                    stock.add_object((*head, f"param_groups.{member}.{key}"), value)
            else:
                stock.add_object((*head, "param_groups", number, key), value)
        if not policy.flat_optimizer:
            stock.add_object((*head, "param_groups", number, "params"), members)


def _groups(optimizer: Tree, names: dict[str, bool], policy: DCPExportPolicy) -> list[tuple[Tree, list[str]]]:
    """Groups of a ``torch.optim.AdamW``: settings and members; ``names`` says which are matrices."""
    blank = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    defaults = {key: value for key, value in blank.items() if key != "params"}
    stored = [
        {**defaults, **{k: tuple(v) if isinstance(v, list) else v for k, v in group.items() if k != "name"}}
        for group in optimizer.get("groups", [])
    ]
    if policy.one_group or len(stored) == 1:
        return [(stored[0] if stored else defaults, list(names))]
    if [group.get("name") for group in optimizer.get("groups", [])] != ["decayed", "not decayed"]:
        raise CheckpointError(
            f"the optimizer has {len(stored)} parameter groups, and the checkpoint does not say which "
            "parameter is in which; pass --one-group, or --only-model"
        )
    decayed, others = ([n for n, is_matrix in names.items() if is_matrix == w] for w in (True, False))
    return [
        (settings, members) for settings, members in zip(stored, (decayed, others), strict=True) if members
    ]


def _renamed(policy: DCPExportPolicy, name: str) -> str:
    found = apply_rules(policy.rules, name)
    return name if found is None else found


def _rows(stored: StoredTensor) -> Iterator[tuple[Shape, Shape]]:
    """The tensor as boxes of whole rows, of about the size of a chunk."""
    shape = stored.shape
    if not shape or not shape[0]:
        yield (0,) * len(shape), shape
        return
    rows = max(1, _CHUNK_BYTES * shape[0] // max(1, stored.num_bytes))
    for row in range(0, shape[0], rows):
        yield (row, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - row), *shape[1:])


def _maker(reader: RegionReader, name: str, low: Shape, sizes: Shape) -> Callable[[], torch.Tensor]:
    return lambda: reader.read_tensor(name, low, sizes)


class _Planner(SavePlanner):
    """Every rank its share of the boxes; the first one the objects too."""

    def __init__(self, stock: _Stock, progress: Progress) -> None:
        rank, num_ranks = world()
        self._stock, self._progress, self._is_first = stock, progress, rank == 0
        self._boxes = {box.item().index: box for box in stock.boxes[rank::num_ranks]}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        objects = self._stock.objects if self._is_first else {}
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]
        return SavePlan(items + [box.item() for box in self._boxes.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self._stock.paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            saved = io.BytesIO()
            torch.save(self._stock.objects[write_item.index.fqn], saved)
            return saved
        made = self._boxes[write_item.index].make()
        self._progress(made.numel() * made.element_size())
        return made


class _Writer(BoxWriter):
    """The files of a stock folder, in a folder that becomes visible when it is whole."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        with travelling_errors():
            done.set_result(self._write_stock(f"__{self._rank}_0.distcp", plan, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = StorageMeta()
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        with travelling_errors():
            with self._order.storage.create(self._order.name, DCP_METADATA) as handle:
                pickle.dump(metadata, handle)
            self._order.storage.commit(self._order.name)

    def _write_stock(self, file: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results = []
        with self._order.storage.create(self._order.name, file) as handle:
            for item in plan.items:
                start, data = handle.tell(), planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    handle.write(data.getbuffer())
                else:
                    torch.save(data, handle)
                length = handle.tell() - start
                results.append(WriteResult(item.index, length, filesystem._StorageInfo(file, start, length)))
        return results


def _found(path: str | os.PathLike[str]) -> tuple[str, str]:
    storage, names, _ = require(path)
    return storage.root, names[0]
