"""Copies of a run's state in the memory of its hosts (``checkpoint.in_memory``), each of them on two nodes.

Every rank writes its share of the state into a folder in memory of its own node, and sends the file to a rank
of the next node, which keeps it too::

    node 0   | files of its ranks | files of node 2's |
    node 1   | files of its ranks | files of node 0's |        any one node may be lost
    node 2   | files of its ranks | files of node 1's |

The files are those of a checkpoint (:mod:`fsdmoe.checkpoint.writer`), so that any number of ranks can load
them. A copy becomes visible on a node when all files are where they belong; the one before it is kept until
all nodes have come to the next. The folder outlives the ranks and their launcher, not the host. Where copies
lie and how they are found again is in :mod:`fsdmoe.checkpoint.node_memory`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.checkpoint.agree import from_first, together, world
from fsdmoe.checkpoint.api import Loaded, LoadPolicy, files_to_read, load_first, snapshot
from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import MANIFEST, METADATA, parse_manifest
from fsdmoe.checkpoint.host_memory import available_host_bytes
from fsdmoe.checkpoint.local_storage import LocalStorage, StrPath
from fsdmoe.checkpoint.node_memory import (
    Copy,
    CopyStorage,
    Nodes,
    bytes_in,
    drop_nodes,
    drop_others,
    fetch,
    find_copies,
    mapped,
    reserve,
    run_folder,
)
from fsdmoe.checkpoint.planner import Proposal
from fsdmoe.checkpoint.reader import open_checkpoint
from fsdmoe.checkpoint.saved_box import Boxes, held_boxes
from fsdmoe.checkpoint.saver import Parts, Saver, SaveRecord, held_bytes
from fsdmoe.checkpoint.session import saving
from fsdmoe.checkpoint.writer import (
    SaveOrder,
    WrittenFile,
    documents,
    travelling_errors,
    write_documents,
    write_share,
)
from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import size_text
from fsdmoe.mesh import Meshes

logger = logging.getLogger(__name__)

_KEPT = 2
_ID = "copies_id"
"""Next to the checkpoints: which copies in memory are of this course of the run."""
_NO_ID = "none"


class MemoryCopies(Saver):
    """Makes copies, and loads the newest. A copy that fails is said, and the run goes on. Every method is
    collective."""

    def __init__(
        self,
        config: CheckpointConfig,
        checkpoints: StrPath,
        meshes: Meshes | None,
        about: Mapping[str, Any] | None,
    ) -> None:
        # one file a rank, which is what is sent; a copy that fails must not end the run it is to protect
        own = replace(config, asynchronous=True, threads=1, max_failed_saves=sys.maxsize)
        self._nodes = Nodes()
        self._id_file = Path(checkpoints).expanduser() / _ID
        self._run = run_folder(from_first(lambda: os.path.abspath(checkpoints)))
        super().__init__(own, LocalStorage(self._run), meshes=meshes, about=about)
        self._num_copies = 0
        self._use(from_first(self._read_id))
        self.text = ""
        """For the start card."""

    @staticmethod
    def drop_id(checkpoints: StrPath) -> None:
        """The run goes on without copies: those of an earlier start are no longer of its course."""
        with suppress(OSError):
            (Path(checkpoints).expanduser() / _ID).unlink()

    def _use(self, identity: str) -> None:
        self._folder = self._run / identity
        self.storage = LocalStorage(self._folder / self._nodes.name)

    def _read_id(self) -> str:
        """Only what was written here: it names a folder beside which others are removed."""
        try:
            text = self._id_file.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return _NO_ID
        return text if re.fullmatch("[0-9a-f]{32}", text) else _NO_ID

    def _renew_id(self) -> str:
        identity = uuid.uuid4().hex
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._id_file.with_name(f".{_ID}")
        fresh.write_text(f"{identity}\n", encoding="ascii")
        fresh.replace(self._id_file)  # at once: half of an id is none
        return identity

    def maybe_save(self, step: int, parts: Parts | Callable[[], Parts]) -> None:
        """Make a copy if the interval says so."""
        if step % self.config.in_memory == 0:
            self.save(step, parts() if callable(parts) else parts)

    def are_there(self) -> bool:
        """Whether there is a copy to load."""
        return bool(find_copies(self._folder, self._nodes))

    def load(self, parts: Parts, policy: LoadPolicy, *, saved: int) -> Loaded | None:
        """The newest copy that is whole; None where there is none, or the checkpoint of step ``saved`` is
        newer. Without a checkpoint (-1), copies that are all damaged are removed.
        """
        copies = find_copies(self._folder, self._nodes)
        wanted = [copy for copy in copies if copy.step >= saved]
        for copy in wanted:
            try:
                return self._load_copy(copy, parts, replace(policy, verify="fast"))
            except DamagedCheckpointError as error:
                logger.error("%s of the copies in memory is passed over: %s", copy.name, error)
        if wanted and saved < 0:
            self.clear()
            raise CheckpointError("all copies in memory are damaged, and were removed; start the run again")
        return None

    def _load_copy(self, copy: Copy, parts: Parts, policy: LoadPolicy) -> Loaded:
        storage = CopyStorage(copy)

        def have(files: set[str]) -> None:
            fetch(storage, copy, files, into=self._folder, nodes=self._nodes, group=self._group)

        have({MANIFEST, METADATA})
        index = together(lambda: open_checkpoint(storage, copy.name))
        have(together(lambda: files_to_read(index, parts, policy)))
        return load_first(storage, [copy.name], parts, policy, explicit=True)

    def begin(self, parts: Parts, *, loaded: str | None) -> None:
        """Make ready for the first copy of this start. All copies are removed but the one that was
        ``loaded``; without one this is another course, to which those on other hosts do not belong.

        Raises:
            ConfigError: The hosts have no memory for copies.
        """
        if loaded is None:
            self._use(from_first(self._renew_id))
        tensors = together(lambda: snapshot(parts, self._meshes)[0])

        def make_folder() -> None:
            if self._nodes.leads_host:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                drop_others(self._folder, loaded)

        together(make_folder)
        self._require_memory(sum(map(held_bytes, tensors.values())))
        self.prepare(parts)

    def _require_memory(self, own: int) -> None:
        """``own``: bytes of this rank's state."""
        everyones = from_all_ranks(own)
        kept = [rank for rank in self._nodes.own for rank in (rank, *self._nodes.sources(rank))]
        needed = _KEPT * sum(everyones[rank] for rank in kept)
        place = self._run.parent
        found = min(shutil.disk_usage(place).free, available_host_bytes()) + bytes_in(self._folder)
        problem = "" if needed <= found else f"{size_text(needed)} in {place}, got {size_text(found)}"
        problems = [text for text in from_all_ranks(problem) if text]
        if problems:
            raise ConfigError(
                f"checkpoint.in_memory: expected memory for {_KEPT} copies of a node's ranks and of those it "
                f"keeps for another node, {problems[0]}; give hosts (containers: --shm-size) more shared "
                "memory, use more nodes, or set checkpoint.in_memory = 0"
            )
        others = self._nodes.sources(world()[0])
        where = (
            f"and for rank {others[0]} of another node" if others else "(one node: a lost host loses them)"
        )
        self.text = (
            f"in memory after every {self.config.in_memory} steps, the last {_KEPT}, for this rank {where}; "
            f"up to {size_text(needed)} of this node in {self._folder}"
        )

    def clear(self) -> None:
        """Remove all copies; the next one is the first."""
        self.wait()
        together(lambda: drop_others(self._folder, None) if self._nodes.leads_host else None)

    def remove(self) -> None:
        """Give the hosts' memory back: the run has ended. Not collective: each node removes its own."""
        if self._nodes.leads_node:
            shutil.rmtree(self.storage.root, ignore_errors=True)
            with suppress(OSError):  # not empty: another node of this host is not done
                self._folder.rmdir()
                self._run.rmdir()

    def _choose_name(self, step: int) -> str:
        return f"step_{step:08d}"

    def _put(self, order: SaveOrder, tensors: dict[str, torch.Tensor], staged: set[str] | None) -> None:
        rank, plan = world()[0], self._cache
        held: Boxes = {}
        made: dict[str, bytes] = {}

        def propose() -> Proposal:
            if self._nodes.leads_node:
                with travelling_errors():
                    order.storage.begin(order.name)
            held.update(held_boxes(tensors))
            return plan.propose(held, order.values)

        def write() -> list[WrittenFile]:
            # not before all ranks are here: until then another node may not have the copy before this one
            self._drop_oldest(order)
            mine = plan.accept(decided)
            changed = [] if staged is None else [box.name for box in mine if box.name not in staged]
            if changed:
                raise CheckpointError(f"{changed[0]}: the plan changed after the state was copied")
            return write_share(order, rank, {box: held[box] for box in mine})

        def make_documents(written: list[list[WrittenFile]]) -> dict[str, bytes]:
            return documents(order, chain.from_iterable(written), serial=1)

        try:
            with saving(order, self._group) as ranks:
                decided = ranks.reduce_scatter("plan", propose, plan.decide)
                made.update(ranks.all_reduce("write", write, make_documents))
                sizes = {
                    file: record.num_bytes
                    for file, record in parse_manifest(made[MANIFEST], order.name)[0].items()
                }
                # memory first: a rank that cannot receive would leave its sender waiting
                ranks.all_reduce("reserve", lambda: self._reserve(order, sizes), lambda _: None)
                ranks.all_reduce("send", lambda: self._exchange(order, sizes), lambda _: None)
        except CheckpointError:
            plan.clear()
            raise
        if self._nodes.leads_node:
            write_documents(order, made)

    def _saved(self, order: SaveOrder, record: SaveRecord) -> None:
        self._num_copies += 1

    def _drop_oldest(self, order: SaveOrder) -> None:
        if self._num_copies == 1 and self._nodes.leads_host:
            drop_nodes(self._folder, self._nodes.here)  # what they have was loaded, and is no longer needed
        if self._nodes.leads_node:
            older = sorted(name for name in order.storage.names() if name != order.name)
            for name in older[: 1 - _KEPT]:
                order.storage.delete(name)

    def _files(self, rank: int, order: SaveOrder, sizes: dict[str, int]) -> list[tuple[Path, int]]:
        """What a rank has written of a copy, if anything, where it lies or will lie on this node."""
        place = Path(order.storage.root) / f".saving-{order.name}"
        prefix = f"data-{rank:05d}-"
        return [(place / file, size) for file, size in sizes.items() if file.startswith(prefix)]

    def _reserve(self, order: SaveOrder, sizes: dict[str, int]) -> None:
        with travelling_errors():
            for source in self._nodes.sources(world()[0]):
                for path, size in self._files(source, order, sizes):
                    reserve(path, size)

    def _exchange(self, order: SaveOrder, sizes: dict[str, int]) -> None:
        """Send this rank's file to the next node, and take those it keeps for another."""
        rank = world()[0]
        target = self._nodes.target(rank)
        buffers: list[torch.Tensor] = []  # kept until all is sent
        transfers: list[dist.Work | None] = []
        for path, size in self._files(rank, order, sizes) if target is not None else ():
            buffers.append(mapped(path, size))
            transfers.append(dist.isend(buffers[-1], target, group=self._group))
        for source in self._nodes.sources(rank):
            for path, size in self._files(source, order, sizes):
                buffers.append(mapped(path, size))
                transfers.append(dist.irecv(buffers[-1], source, group=self._group))
        with travelling_errors():
            for transfer in transfers:
                assert transfer is not None  # of ranks that are in the group
                transfer.wait()
