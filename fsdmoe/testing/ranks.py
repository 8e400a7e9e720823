"""A pool of real gloo ranks: ``run_ranks(fn, 4, *args)`` runs ``fn(*args)`` on 4 ranks and returns their
results.

Starting ranks is what makes multi-rank tests slow (seconds with ``mp.spawn``), so the ranks are forked once
from a server that has already imported torch and then wait for work. Every case gets a fresh process group,
and the environment and settings of its process are put back after it
(:mod:`fsdmoe.testing.process_state`). A case that fails or hangs costs the whole pool: the ranks are killed
and the next case gets new ones, so no case can disturb another. ``fn`` must be a module-level function (it is
sent by name).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fsdmoe.testing.process_state import restored, seed_everything

_FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["torch", "torch.distributed.device_mesh", "torch.distributed.checkpoint", "fsdmoe.testing.ranks"]
ENVIRONMENT: dict[str, str] = {}
"""What ranks start with, where it is not empty. The server's own would be that of whichever test started it,
with what that test had set for a while."""

# Groups that a case left in cycles beyond the garbage collector's reach keep two threads each, and sockets;
# ranks that have gathered so many are replaced.
MAX_THREADS = 300
# New containers from which on a rank looks for garbage in the midst of a case.
_MANY_OBJECTS = 50_000
# Newly imported modules from which on a rank freezes what it holds.
_MANY_MODULES = 100
# For the other ranks to answer once one has failed.
_GRACE_SECONDS = 5.0


class RankFailure(AssertionError):
    """A rank raised, died or took too long; the message holds its traceback."""


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pipe, theirs = _FORKSERVER.Pipe()
        self.process: BaseProcess = _FORKSERVER.Process(
            target=_serve, args=(theirs, sys.path, ENVIRONMENT), daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def num_threads(self) -> int:
        return len(_threads(self.process.pid))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_pool: list[_Rank] = []
_stores: list[tempfile.TemporaryDirectory[str]] = []
"""The cases' stores, in a folder that lives as long as the pool: a group that the garbage collector frees
late would wait minutes for the file of its store if that were gone."""
_case_numbers = itertools.count()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0, fresh: bool = False
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` gloo ranks; their results by rank, or :class:`RankFailure`.

    Inside ``fn`` the process group is up (``dist.get_rank()`` tells the rank). ``fresh=True`` gives the case
    new ranks and kills them afterwards: for cases that change process-wide state or die on purpose.
    """
    if fresh:
        close_pool()
    if not _pool:
        _start_server()
        _stores.append(tempfile.TemporaryDirectory(prefix="fsdmoe-ranks-"))
    while len(_pool) < world_size:
        _pool.append(_Rank(len(_pool)))
    ranks = _pool[:world_size]
    store = f"{_stores[-1].name}/{next(_case_numbers)}"
    try:
        for member in ranks:
            member.pipe.send((fn, args, member.rank, world_size, store))
        results = _collect(ranks, time.monotonic() + timeout, timeout)
    except BaseException:
        close_pool()
        raise
    if fresh or any(member.num_threads > MAX_THREADS for member in ranks):
        close_pool()
    return results


def _start_server() -> None:
    """Where none runs yet. It sees no GPU, nor do its ranks: what looks for one while it is imported would
    initialise CUDA, which no forked process can use then."""
    _FORKSERVER.set_forkserver_preload(PRELOAD)
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()


def close_pool() -> None:
    """Kill every pooled rank; the next case starts new ones."""
    while _pool:
        _pool.pop().kill()
    while _stores:
        _stores.pop().cleanup()


atexit.register(close_pool)


def _collect(ranks: list[_Rank], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[str] = []
    waiting: dict[Any, _Rank] = {member.pipe: member for member in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and not errors:
            late = sorted(member.rank for member in waiting.values())
            raise RankFailure(f"no answer from rank(s) {late} within {timeout:.0f} s; they were killed")
        if not ready:
            break
        for pipe in ready:
            member = waiting.pop(pipe)
            try:
                error, results[member.rank] = member.pipe.recv()
            except EOFError:
                member.process.join()
                error = f"it died with exit code {member.process.exitcode}"
            if error is not None:
                errors.append(f"rank {member.rank} of {len(ranks)} failed: {error}")
                # The others fail or hang in consequence; those that know the cause answer within moments.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if errors:
        raise RankFailure("\n".join(sorted(errors, key=_is_consequence)))
    return [results[member.rank] for member in ranks]


def _is_consequence(error: str) -> bool:
    """Whether a rank failed only because another one failed before; the cause is reported first."""
    return "closed by peer" in error or "reset by peer" in error


def _serve(pipe: Connection, path: list[str], environment: dict[str, str]) -> None:
    """The loop of a pooled rank: one case after another, each in its own process group."""
    sys.path[:] = path
    gc.freeze()  # what was imported before the fork would be looked through, and its pages copied
    gc.enable()  # the server may have imported without it
    gc.set_threshold(_MANY_OBJECTS)  # a collection comes after every case anyway
    if environment:
        os.environ.clear()
        os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    _share_one_device()
    num_modules = 0
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        except Exception:  # a function that cannot be imported here, say
            pipe.send((traceback.format_exc(), None))
            continue
        if len(sys.modules) > num_modules + _MANY_MODULES:
            # What was imported stays: looking through it after every case is a tenth of a run.
            num_modules = len(sys.modules)
            gc.freeze()
        error, result = _run_case(*case)
        if error is not None:
            # Before the group goes, by which the others fail: the cause comes first.
            _answer(pipe, error, None)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        _forget_meshes()
        if error is None:
            _answer(pipe, None, result)
        gc.collect()


def _threads(process: int | str | None = "self") -> set[int]:
    """The native threads of a process; none where the system does not report them."""
    tasks = Path(f"/proc/{process}/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()


def _share_one_device() -> None:
    """Have all groups of this rank share one gloo device, where torch makes one for each: a device is a
    thread that wakes a hundred times a second, used or not, and a mesh has a dozen groups.

    That thread polls without a pause while another thread of the rank holds the lock of a connection. With
    more ranks than cores the holder is often without one just then: what it sends wakes another rank, which
    takes its core. So ranks that wake interrupt nobody, and the polling thread goes last.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    before = _threads()
    device = dist.ProcessGroupGloo.create_default_device()
    for thread in _threads() - before:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    create = dist.ProcessGroupGloo.__init__

    def create_on_device(group: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], timeout
        create(group, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = create_on_device  # type: ignore[method-assign, assignment]


def _forget_meshes() -> None:
    """Clear what DTensors remember of past operations, for it holds their meshes. The next case's meshes are
    equal to those, but for the groups, which are gone; and a group that is held keeps its threads."""
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _answer(pipe: Connection, error: str | None, result: Any) -> None:
    """What a case came to; a result that cannot travel is an error like any other."""
    try:
        pipe.send((error, result))
    except Exception:  # pickling comes before the first byte, so the pipe is still in step
        pipe.send((f"its result cannot be sent back:\n{traceback.format_exc()}", None))


def _run_case(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store_path: str
) -> tuple[str | None, Any]:
    with restored():
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        seed_everything()
        try:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store_path, world_size), rank=rank, world_size=world_size
            )
            result = fn(*args)
            dist.barrier()
            return None, result
        except Exception:
            return traceback.format_exc(), None
