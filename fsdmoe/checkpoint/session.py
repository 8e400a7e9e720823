"""Saving and loading a state, a tree of tensors and values.

A save is collective; every rank calls it with a tree of the same names.
A load needs no messages: each rank reads those parts of stored boxes that overlap the boxes it holds.
What concerns models and optimizers is in :mod:`fsdmoe.checkpoint.api`, what concerns a run in
:mod:`fsdmoe.checkpoint.checkpointer`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from fsdmoe.checkpoint.agree import from_first, together, world
from fsdmoe.checkpoint.catalog import require
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from fsdmoe.checkpoint.format import MANIFEST, Index, StoredTensor, is_scale_history
from fsdmoe.checkpoint.hf_folder import index_of, is_hf_folder, open_hf_folder, refuse_transposed
from fsdmoe.checkpoint.planner import PlanCache, Proposal
from fsdmoe.checkpoint.reader import RegionReader, check_blocks, check_sizes, open_checkpoint, region_reads
from fsdmoe.checkpoint.saved_box import (
    Boxes,
    Progress,
    SavedBox,
    check_whole,
    held_boxes,
    no_progress,
    plain_checksums,
)
from fsdmoe.checkpoint.storage import Storage, StrPath, open_storage, split_address
from fsdmoe.checkpoint.tree import SEPARATOR, Tree, join_tree, split_tree
from fsdmoe.checkpoint.writer import SaveOrder, WrittenFile, begin, finish, write_share
from fsdmoe.fsdp.sharded_tensor import ShardedTensor

logger = logging.getLogger(__name__)

Verify = Literal["fast", "full"]


def write_state(
    order: SaveOrder,
    tensors: dict[str, torch.Tensor],
    cache: PlanCache | None = None,
    group: dist.ProcessGroup | None = None,
    staged: set[str] | None = None,
) -> None:
    """Write one checkpoint; it is whole and visible when this returns, or not there at all. Collective.

    ``staged`` names the tensors that may be written where the others are not copies and keep changing.
    """
    plan = PlanCache() if cache is None else cache
    held: Boxes = {}
    checksums = partial(plain_checksums, tensors) if world(group)[1] > 1 else dict

    def propose() -> Proposal:
        held.update(held_boxes(tensors))
        return plan.propose(held, order.values, checksums)

    def decide(proposals: list[Proposal]) -> list[list[SavedBox] | None]:
        decided = plan.decide(proposals)
        begin(order)
        return decided

    def write() -> list[WrittenFile]:
        mine = plan.accept(decided)
        changed = [] if staged is None else [box.name for box in mine if box.name not in staged]
        if changed:
            raise CheckpointError(f"{changed[0]}: the plan changed after the state was copied; save again")
        return write_share(order, ranks.rank, {box: held[box] for box in mine})

    try:
        with saving(order, group) as ranks:
            decided = ranks.reduce_scatter("plan", propose, decide)
            ranks.all_reduce("write", write, lambda written: finish(order, chain.from_iterable(written)))
    except CheckpointError:
        plan.clear()
        raise


def save_boxes(
    target: StrPath, boxes: Boxes, about: Tree, values: Tree | None = None, progress: Progress = no_progress
) -> None:
    """Write a checkpoint of boxes that are made while they are written, this rank its share of them.
    Collective; every rank passes the same boxes."""
    storage, name = split_address(target)
    order = SaveOrder(storage, name, values or {}, describe(about))
    rank, num_ranks = world()

    def start(_: list[None]) -> None:
        check_whole(boxes)
        begin(order)

    def write() -> list[WrittenFile]:
        return write_share(order, rank, dict(list(boxes.items())[rank::num_ranks]), progress)

    with saving(order) as ranks:
        ranks.all_reduce("plan", lambda: None, start)
        ranks.all_reduce("write", write, lambda written: finish(order, chain.from_iterable(written)))


@contextlib.contextmanager
def saving(order: SaveOrder, group: dist.ProcessGroup | None = None) -> Iterator[_DistWrapper]:
    """The ranks of one save, with torch's exchanges of what each did or of its error. What a failed save left
    is removed, and its error is said in one sentence."""
    rank, num_ranks = world(group)
    try:
        yield _DistWrapper(group, num_ranks > 1, 0)
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


def open_newest(path: StrPath, threads: int = 4, verify: Verify = "fast") -> RegionReader:
    """The checkpoint at ``path``, or the newest of a folder of them, with its sizes checked (or every block).
    Collective."""
    root, (name, *others), _ = from_first(lambda: require(path))
    storage = open_storage(root)

    def index() -> Index:
        try:
            return open_verified(storage, name, verify)
        except DamagedCheckpointError as error:
            if others:
                error.args = (f"{error}; name another one, such as {root}/{others[0]}",)
            raise

    return RegionReader(storage, name, together(index), threads)


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
    for tensor in wanted.values():
        if isinstance(tensor, ShardedTensor):
            tensor.access.writes += 1  # on every rank, so that all count alike, also those that hold no box
    reads = [
        read
        for box, held in held_boxes(wanted).items()
        for read in region_reads(index.tensors[box.name], held().detach(), box.offsets)
    ]
    RegionReader(storage, name, index, threads).read(reads)
    stored = {key: index.values[key] for key in state if key in index.values}
    return join_tree(tensors, stored)


def _match(
    name: str, index: Index, tensors: dict[str, torch.Tensor], sections: set[str], strict: bool
) -> dict[str, torch.Tensor]:
    """The tensors to load; complains about names, shapes and kinds that do not fit, all at once."""
    section_of = {key: key.split(SEPARATOR, 1)[0] for key in index.tensors}
    stored = {key: tensor for key, tensor in index.tensors.items() if section_of[key] in sections}
    stored = _without_histories(name, stored)
    known = {*index.values, *section_of.values()}
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
        raise CheckpointError(f"{name} does not fit:{listed(problems, 20)}{_way_out(problems)}")
    for change, count in converted.items():
        if world()[0] == 0:
            logger.warning("%s: %d tensors are converted from %s", name, count, change)
    return {key: tensors[key] for key in tensors if key in stored}


def _way_out(problems: list[str]) -> str:
    """What to do about tensors that do not fit, where they tell which setting is another."""
    if any(".lora_" in problem for problem in problems):
        return (
            "\n  the adapters are not the same: one of the runs has none, or others. Give this run a "
            "folder of its own (train.output_dir); to train adapters on the weights of a run, write them "
            "with to-hf and start from that folder"
        )
    if all(problem.startswith((f"optimizer{SEPARATOR}", f"ema{SEPARATOR}")) for problem in problems):
        return (
            "\n  the weights fit: only what the optimizer keeps is another (optim.name, formats of moments, "
            "frozen in optim.groups); set it back, or leave it out by load_only_model = true in "
            "[checkpoint]: the run then begins at step 0"
        )
    if all("e_score_correction_bias: " in problem for problem in problems):
        return "\n  experts.balance.bias_rate above 0 gives a model these biases; set it as it was there"
    return ""


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


def _plain(error: CheckpointException, what: str) -> CheckpointError:
    """torch wraps what went wrong on each rank; say it in one sentence, and keep damage recognisable."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, DamagedCheckpointError):
        return cause
    kind = "" if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: "
    return CheckpointError(f"{what}: rank {rank}: {kind}{cause}")
