"""A checkpoint of ours to a stock torch.distributed.checkpoint folder, chunk by chunk, ranks in parallel.

FSDP2 loads it with ``dcp.load`` into what ``get_state_dict`` returns, and ``set_state_dict``. Chunks are
plain boxes of rows, so any number of ranks and any placements read it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdmoe.checkpoint.agree import together, world
from fsdmoe.checkpoint.dcp_folder import DCP_METADATA
from fsdmoe.checkpoint.dcp_names import Rules, apply_rules
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Index, Shape, StoredTensor, is_scale_history
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.saved_box import Boxes, Progress, SavedBox, no_progress
from fsdmoe.checkpoint.session import open_newest, saving
from fsdmoe.checkpoint.storage import StrPath, split_address
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.checkpoint.writer import SaveOrder, begin, travelling_errors
from fsdmoe.optim.group_config import DECAYED, NOT_DECAYED
from fsdmoe.optim.groups import MEMBERS, is_matrix_of

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

    boxes: Boxes = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def add_object(self, path: Path, value: Any) -> None:
        self.objects[self._key(path)] = value

    def add_tensor(self, path: Path, name: str, stored: StoredTensor, reader: RegionReader) -> None:
        key = self._key(path)
        for low, sizes in _rows(stored):
            box = SavedBox(key, stored.shape, stored.dtype, low, sizes)
            self.boxes[box] = partial(reader.read_tensor, name, low, sizes)

    def _key(self, path: Path) -> str:
        key = ".".join(map(str, path))
        if key in self.paths:
            raise CheckpointError(f"{key}: two tensors would have this name; look at --map")
        self.paths[key] = path
        return key


def to_dcp(
    source: StrPath,
    target: StrPath,
    policy: DCPExportPolicy | None = None,
    *,
    progress: Progress = no_progress,
) -> None:
    """Write a checkpoint as a folder that stock ``torch.distributed.checkpoint`` loads. Collective.

    Args:
        source: A checkpoint, or a folder of them: then the newest.
        target: The folder to write.
        policy: Keys and names, and how the optimizer's parameters are grouped.
        progress: Called with the number of bytes that were done since the last call.
    """
    policy = policy or DCPExportPolicy()
    reader = open_newest(source, threads=1)
    stock = together(lambda: _content(reader.index, reader, policy))
    there, called = split_address(target)
    order = SaveOrder(there, called, {}, {})
    rank, num_ranks = world()
    boxes = dict(list(stock.boxes.items())[rank::num_ranks])
    objects = stock.objects if rank == 0 else {}
    with saving(order) as ranks:
        ranks.all_reduce("plan", lambda: None, lambda _: begin(order))
        ranks.all_reduce(
            "write",
            lambda: _write(order, rank, boxes, objects, progress),
            lambda written: _finish(order, stock, written),
        )


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
    names: dict[str, str] = {}
    matrices: set[str] = set()
    head = tuple(policy.optimizer_key.split("."))
    for full, stored in index.tensors.items():
        section, _, rest = full.partition("/state/")
        name, _, kind = rest.rpartition("/")
        if section != "optimizer" or not name or not (renamed := _renamed(policy, name)):
            continue
        if kind not in ("step", "exp_avg", "exp_avg_sq"):
            raise CheckpointError(f"{full}: only AdamW's state is written; --only-model leaves the optimizer")
        if kind == "exp_avg":
            names[name] = renamed
            if is_matrix_of(name, len(stored.shape)):
                matrices.add(name)
        tail = (f"state.{renamed}.{kind}",) if policy.flat_optimizer else ("state", renamed, kind)
        stock.add_tensor((*head, *tail), full, stored, reader)
    groups = _groups(index.values["optimizer"], list(names), matrices, policy)
    for number, (settings, held) in enumerate(groups):
        members = [names[name] for name in held]
        for key, value in settings.items():
            if policy.flat_optimizer:
                for member in members:
                    stock.add_object((*head, f"param_groups.{member}.{key}"), value)
            else:
                stock.add_object((*head, "param_groups", number, key), value)
        if not policy.flat_optimizer:
            stock.add_object((*head, "param_groups", number, "params"), members)


def _groups(
    optimizer: Tree, names: list[str], matrices: set[str], policy: DCPExportPolicy
) -> list[tuple[Tree, list[str]]]:
    """Groups of a ``torch.optim.AdamW``: settings, and which of ``names`` are members."""
    blank = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    defaults = {key: value for key, value in blank.items() if key != "params"}
    groups = optimizer.get("groups", [])
    stored = [
        {
            **defaults,
            **{
                k: tuple(v) if isinstance(v, list) else v
                for k, v in group.items()
                if k not in ("name", MEMBERS)
            },
        }
        for group in groups
    ]
    if policy.one_group or len(stored) == 1:
        return [(stored[0] if stored else defaults, names)]
    if groups and all(MEMBERS in group for group in groups):
        known = set(names)
        held = [[name for name in group[MEMBERS] if name in known] for group in groups]
    elif [group.get("name") for group in groups] == [DECAYED, NOT_DECAYED]:  # of an early version
        held = [[name for name in names if (name in matrices) == decayed] for decayed in (True, False)]
    else:
        raise CheckpointError(
            f"the optimizer has {len(stored)} parameter groups, and the checkpoint does not say which "
            "parameter is in which; pass --one-group, or --only-model"
        )
    return [(settings, members) for settings, members in zip(stored, held, strict=True) if members]


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


Places = dict[MetadataIndex, filesystem._StorageInfo]


def _write(order: SaveOrder, rank: int, boxes: Boxes, objects: Tree, progress: Progress) -> Places:
    """This rank's file: one ``torch.save`` after another."""
    file = f"__{rank}_0.distcp"

    def fill(handle: Any) -> Places:
        places: Places = {}

        def put(index: MetadataIndex, value: Any) -> None:
            start = handle.tell()
            torch.save(value, handle)
            places[index] = filesystem._StorageInfo(file, start, handle.tell() - start)

        for key, value in objects.items():
            put(MetadataIndex(key), value)
        for box, make in boxes.items():
            put(MetadataIndex(box.name, torch.Size(box.offsets)), make())
            progress(box.num_bytes)
        return places

    with travelling_errors():
        return order.storage.write(order.name, file, fill)


def _finish(order: SaveOrder, stock: _Stock, written: list[Places]) -> None:
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in stock.objects}
    for box in stock.boxes:
        blank = TensorStorageMetadata(TensorProperties(dtype=box.dtype), torch.Size(box.shape), [])
        entry = entries.setdefault(box.name, blank)
        entry.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
    metadata = Metadata(
        entries,
        planner_data=stock.paths,
        storage_data={index: place for places in written for index, place in places.items()},
        storage_meta=StorageMeta(),
        version=filesystem.CURRENT_DCP_VERSION,
    )
    with travelling_errors():
        order.storage.write(order.name, DCP_METADATA, lambda handle: pickle.dump(metadata, handle))
        order.storage.commit(order.name)
