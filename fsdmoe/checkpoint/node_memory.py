"""Where copies of a run's state lie in host memory, which of them are whole, and how one is read.

::

    /dev/shm/fsdmoe-USER-RUN/        of the run, by the path of its checkpoints
        ID/                          of this course of the run: one that starts anew has another
            node-4711/               of the node whose launcher has this pid
                step_00000012/       a checkpoint folder, with the files of this node's ranks and of another's
                step_00000013/
            fetched/                 what other hosts sent for a load

A copy is whole where the hosts together have all files of its manifest. In a load each rank needs some of the
files; those that its host does not have are sent to it by a host that does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fsdmoe.checkpoint.agree import together, world
from fsdmoe.checkpoint.errors import DamagedCheckpointError
from fsdmoe.checkpoint.format import MANIFEST, parse_manifest
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.core.all_ranks import from_all_ranks

ROOT = Path("/dev/shm")
"""A file system in memory; what is in it outlives processes, not the host."""
_FETCHED = "fetched"


def run_folder(checkpoints: str) -> Path:
    """Where the hosts keep copies of the run with these checkpoints."""
    digest = hashlib.blake2b(os.path.abspath(checkpoints).encode(), digest_size=8).hexdigest()
    return ROOT / f"fsdmoe-{os.getuid()}-{digest}"


class Nodes:
    """The ranks of each node, and of each host: on one host there may be several launchers, each of which
    counts as a node. Building it is collective."""

    def __init__(self) -> None:
        self.name = f"node-{os.getppid()}"
        rank, _ = world()
        host = f"{socket.gethostname()}{ROOT}"
        told = from_all_ranks([host, self.name])
        nodes: dict[tuple[str, str], list[int]] = {}
        self._first_of_host: dict[str, int] = {}
        for number, (its_host, its_node) in enumerate(told):
            nodes.setdefault((its_host, its_node), []).append(number)
            self._first_of_host.setdefault(its_host, number)
        self.ranks = list(nodes.values())
        self.first_here = self._first_of_host[host]
        """The first rank of this host."""
        self.firsts = [self._first_of_host[its_host] for its_host, _ in told]
        """The same of every rank's host."""
        self.here = {its_node for its_host, its_node in told if its_host == host}
        """The nodes of this host."""
        self.own = nodes[host, self.name]
        self.leads_node = rank == self.own[0]
        self.leads_host = rank == self.first_here

    def target(self, rank: int) -> int | None:
        """The rank of the next node that keeps a copy for ``rank``; None where there is one node."""
        if len(self.ranks) < 2:
            return None
        number = next(number for number, found in enumerate(self.ranks) if rank in found)
        following = self.ranks[(number + 1) % len(self.ranks)]
        return following[self.ranks[number].index(rank) % len(following)]

    def sources(self, rank: int) -> list[int]:
        """The ranks that ``rank`` keeps copies for."""
        return [other for found in self.ranks for other in found if self.target(other) == rank]


@dataclass(frozen=True)
class Copy:
    """A copy that is whole."""

    name: str
    step: int
    holders: dict[str, list[int]]
    """The first ranks of the hosts that have a file."""
    paths: dict[str, Path]
    """The files on this host."""
    sizes: dict[str, int]


class CopyStorage(LocalStorage):
    """One copy, whose files lie in several folders of a host; sizes are known of files elsewhere too."""

    def __init__(self, copy: Copy) -> None:
        super().__init__("copies in memory")  # the same on all hosts
        self._paths = dict(copy.paths)
        self._sizes = copy.sizes

    def take(self, file: str, path: Path) -> None:
        """From here on this host has a file."""
        self._paths[file] = path

    def has(self, file: str) -> bool:
        return file in self._paths

    def size(self, name: str, file: str) -> int | None:
        return self._sizes.get(file)

    def _file(self, name: str, file: str) -> Path:
        if file not in self._paths:
            raise DamagedCheckpointError(f"{name}/{file}", "not sent to this host")
        return self._paths[file]


def find_copies(folder: Path, nodes: Nodes) -> list[Copy]:
    """The copies in ``folder`` that all hosts together have whole, the newest first. Collective."""
    here = _copies_here(folder)
    listed = {key: {file: path.stat().st_size for file, path in found.items()} for key, found in here.items()}
    wholes: dict[str, dict[str, int]] = {}
    holders: dict[str, dict[str, list[int]]] = {}
    told = from_all_ranks(listed if nodes.leads_host else {})
    for rank, copies in enumerate(told):
        for key, files in copies.items():
            for file, size in files.items():
                wholes.setdefault(key, {})[file] = size
                holders.setdefault(key, {}).setdefault(file, []).append(rank)
    asked = {key: _expected(found) for key, found in here.items()} if nodes.leads_host else {}
    expected = {key: files for each in from_all_ranks(asked) for key, files in each.items()}
    found = [
        Copy(key.partition("/")[0], _step(key), holders[key], here.get(key, {}), wholes[key])
        for key in wholes
        if set(expected[key]) <= wholes[key].keys()
    ]
    return sorted(found, key=lambda copy: copy.step, reverse=True)


def _copies_here(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of each copy that this host has, by name and manifest: two that are called alike may be of
    different starts. Files of another size than the manifest says are left out."""
    copies: dict[str, dict[str, Path]] = {}
    for place in sorted(folder.glob("node-*/step_*")):
        with suppress(OSError, DamagedCheckpointError):  # half of one, or being removed
            data = (place / MANIFEST).read_bytes()
            expected = parse_manifest(data, place.name)[0]
            digest = hashlib.blake2b(data, digest_size=8).hexdigest()
            files = copies.setdefault(f"{place.name}/{digest}", {MANIFEST: place / MANIFEST})
            for file, record in expected.items():
                with suppress(OSError):
                    if (place / file).stat().st_size == record.num_bytes:
                        files.setdefault(file, place / file)
    return copies


def _expected(files: dict[str, Path]) -> list[str]:
    return list(parse_manifest(files[MANIFEST].read_bytes(), MANIFEST)[0])


def _step(key: str) -> int:
    return int(key.partition("/")[0].removeprefix("step_"))


def fetch(
    storage: CopyStorage,
    copy: Copy,
    needed: Iterable[str],
    *,
    into: Path,
    nodes: Nodes,
    group: dist.ProcessGroup | None,
) -> None:
    """Have the files that this rank ``needed`` on its host. Collective; a file travels to a host once."""
    rank, _ = world()
    lacking = from_all_ranks(sorted(file for file in needed if not storage.has(file)))
    # first of a host, file: all ranks go through the same list in the same order, so that none waits for good
    wanted = sorted({(nodes.firsts[asker], file) for asker, files in enumerate(lacking) for file in files})
    mine = [file for first, file in wanted if first == nodes.first_here]

    def reserve_all() -> None:
        if nodes.leads_host:
            for file in mine:
                reserve(into / _FETCHED / copy.name / file, copy.sizes[file])

    together(reserve_all)  # before anyone sends: who cannot receive would leave the sender waiting
    for first, file in wanted:
        sender = copy.holders[file][0]
        if rank == sender:
            dist.send(mapped(storage._file(copy.name, file), copy.sizes[file]), first, group=group)
        if rank == first:
            dist.recv(mapped(into / _FETCHED / copy.name / file, copy.sizes[file]), sender, group=group)
    together(lambda: None)
    for file in mine:
        storage.take(file, into / _FETCHED / copy.name / file)


def reserve(path: Path, num_bytes: int) -> None:
    """A file of that size, with its memory taken: a mapping of a file in a full file system ends its process
    when it is written to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
    try:
        if num_bytes:
            os.posix_fallocate(handle, 0, num_bytes)
    finally:
        os.close(handle)


def mapped(path: Path, num_bytes: int) -> torch.Tensor:
    """The bytes of a file, as a tensor."""
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def drop_others(folder: Path, kept: str | None) -> None:
    """Of this host: remove what is of another course of the run, and all copies but the one of the name
    ``kept``."""
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    shutil.rmtree(folder / _FETCHED, ignore_errors=True)
    for place in folder.glob("node-*/*"):
        if place.name != kept:
            shutil.rmtree(place, ignore_errors=True)
    for place in folder.glob("node-*/.*"):
        shutil.rmtree(place, ignore_errors=True)


def drop_nodes(folder: Path, kept: Iterable[str]) -> None:
    """Of this host: remove the copies of nodes that take no part any more."""
    for place in folder.glob("node-*"):
        if place.name not in kept:
            shutil.rmtree(place, ignore_errors=True)


def bytes_in(folder: Path) -> int:
    """What the files below a folder take."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total
