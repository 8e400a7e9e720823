"""Saving and loading a state, a tree of tensors and values.

A save is collective, through torch.distributed.checkpoint; every rank calls it with a tree of the same names.
A load needs no messages: each rank reads those parts of stored boxes that overlap the boxes it holds.
What concerns models and optimizers is in :mod:`fsdmoe.checkpoint.api`, what concerns a run in
:mod:`fsdmoe.checkpoint.checkpointer`.
"""

from __future__ import annotations

import datetime
import logging
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from fsdmoe.checkpoint.agree import world
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import MANIFEST, Index, StoredTensor, is_scale_history
from fsdmoe.checkpoint.hf_folder import index_of, is_hf_folder, open_hf_folder, refuse_transposed
from fsdmoe.checkpoint.planner import BoxSavePlanner, PlanCache
from fsdmoe.checkpoint.reader import RegionReader, check_blocks, check_sizes, open_checkpoint, region_reads
from fsdmoe.checkpoint.storage import Storage
from fsdmoe.checkpoint.tree import Tree, join_tree, sections_of, split_tree
from fsdmoe.checkpoint.writer import BoxWriter, SaveOrder

logger = logging.getLogger(__name__)

Verify = Literal["fast", "full"]


def write_state(
    order: SaveOrder,
    tensors: dict[str, torch.Tensor],
    cache: PlanCache | None = None,
    group: dist.ProcessGroup | None = None,
    staged: set[str] | None = None,
) -> None:
    """Write one checkpoint; it is whole and visible when this returns, or not there at all. Collective."""
    try:
        save_with(order, tensors, BoxSavePlanner(order.values, cache, staged), group)
    except CheckpointError:
        if cache is not None:
            cache.clear()
        raise


def save_with(
    order: SaveOrder,
    tensors: dict[str, torch.Tensor],
    planner: SavePlanner,
    group: dist.ProcessGroup | None = None,
    writer: StorageWriter | None = None,
) -> None:
    """One save with any planner (and writer, for another format); what a failed one left is removed."""
    rank, num_ranks = world(group)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")
            dcp.save(
                tensors,
                storage_writer=writer or BoxWriter(order, rank),
                planner=planner,
                process_group=group,
                no_dist=num_ranks == 1,
            )
    except CheckpointException as error:
        if rank == 0:
            order.storage.discard(order.name)
        raise _plain(error, f"{order.storage.root}/{order.name} was not saved") from error


def describe(about: Mapping[str, Any] | None = None) -> Tree:
    """Who wrote a checkpoint, for people who look at it later."""
    return {
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "ranks": world()[1],
        **(about or {}),
    }


def open_verified(storage: Storage, name: str, verify: Verify, threads: int = 4) -> Index:
    """Open, and check sizes (fast) or every block (full); ranks share the checks, so call it on all of them.

    A Hugging Face folder has no checksums; its headers and sizes are checked.
    """
    rank, num_ranks = world()
    if storage.size(name, MANIFEST) is None and is_hf_folder(storage, name):
        folder = open_hf_folder(storage, name)
        refuse_transposed(name, folder)
        return index_of(name, folder)
    index = open_checkpoint(storage, name)
    check_sizes(storage, name, index, rank, num_ranks)
    if verify == "full":
        check_blocks(storage, name, index, rank, num_ranks, threads)
    return index


def load_indexed(
    storage: Storage,
    name: str,
    index: Index,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    threads: int = 4,
) -> Tree:
    """This rank's part of a load: fills the state's tensors in place, and returns the tree with the stored
    values. No communication, no unpickling.

    Only the sections (top-level keys) that the state has are loaded. ``strict`` demands that each of them
    holds the same tensors as the state; otherwise what is missing stays as it is, and what is not asked
    for is passed over.
    """
    tensors = split_tree(state)[0]
    wanted = _match(name, index, tensors, set(state), strict)
    reads = [
        read
        for key, tensor in wanted.items()
        for low, held in _held_boxes(tensor)
        for read in region_reads(index.tensors[key], held, low)
    ]
    RegionReader(storage, name, index, threads).read(reads)
    stored = {key: index.values[key] for key in state if key in index.values}
    return join_tree(tensors, stored)


def _match(
    name: str, index: Index, tensors: dict[str, torch.Tensor], sections: set[str], strict: bool
) -> dict[str, torch.Tensor]:
    """The tensors to load; complains about names, shapes and kinds that do not fit, all at once."""
    stored = {key: t for key, t in index.tensors.items() if key.split("/", 1)[0] in sections}
    stored = _without_histories(name, stored)
    known = set(index.values) | set(sections_of(index.tensors))
    problems = []
    if strict:
        problems += [f"{key}: no such section in the checkpoint" for key in sorted(sections - known)]
        lost, unknown = tensors.keys() - stored.keys(), stored.keys() - tensors.keys()
        problems += [f"{key}: missing from the checkpoint" for key in sorted(lost)]
        problems += [f"{key}: in the checkpoint only" for key in sorted(unknown)]
    converted: dict[str, int] = {}
    for key in sorted(tensors.keys() & stored.keys()):
        ours, theirs = tensors[key], stored[key]
        if tuple(ours.shape) != theirs.shape:
            problems.append(f"{key}: shape {tuple(ours.shape)} here, {theirs.shape} in the checkpoint")
        elif ours.dtype.is_floating_point != theirs.dtype.is_floating_point:
            problems.append(f"{key}: {ours.dtype} here, {theirs.dtype} in the checkpoint")
        elif ours.dtype != theirs.dtype:
            change = f"{theirs.dtype} to {ours.dtype}"
            converted[change] = converted.get(change, 0) + 1
    if problems:
        shown = problems[:20] + ([f"… and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise CheckpointError(f"{name} does not fit:\n  " + "\n  ".join(shown))
    for change, count in converted.items():
        if world()[0] == 0:
            logger.warning("%s: %d tensors are converted from %s", name, count, change)
    return {key: tensors[key] for key in tensors if key in stored}


def _without_histories(name: str, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    kept = {key: tensor for key, tensor in stored.items() if not is_scale_history(key)}
    if len(kept) < len(stored) and world()[0] == 0:
        logger.warning(
            "%s: %d tensors amax_history are passed over: they belong to delayed scales, which were removed "
            "(docs/results/removed.md)",
            name,
            len(stored) - len(kept),
        )
    return kept


def _held_boxes(tensor: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The boxes of a global tensor that this rank holds: where each begins, and its elements."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return [((0,) * tensor.dim(), tensor.detach())]
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return []
    return [
        (tuple(chunk.offsets), tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets)).detach())
        for chunk in tensor.__create_chunk_list__()
    ]


def _plain(error: CheckpointException, what: str) -> CheckpointError:
    """torch wraps what went wrong on each rank; say it in one sentence, and keep damage recognisable."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, DamagedCheckpointError):
        return cause
    kind = "" if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: "
    return CheckpointError(f"{what}: rank {rank}: {kind}{cause}")
