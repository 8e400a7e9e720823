"""The checkpoints of a run: when to save, in the background or not, what to keep, what to resume from.

::

    step 500   |compute|copy to host|compute … compute|           the loop waits for the copy only
    background             |plan|write|fsync|rename|latest|delete old ones|

At most one save is in flight: the next one waits for it. The background part communicates over a gloo group
of its own, so it never mixes with the collectives of training. A save that fails leaves the earlier
checkpoints as they were and is reported at the next save, or at :meth:`Checkpointer.close`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.all_ranks import from_all_ranks
from fsdmoe.checkpoint.agree import from_first, together, world
from fsdmoe.checkpoint.api import LoadPolicy, about_parts, load_first, snapshot
from fsdmoe.checkpoint.catalog import entries, name_for, require, require_start, retain
from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.planner import PlanCache
from fsdmoe.checkpoint.session import describe, write_state
from fsdmoe.checkpoint.staging import Stager
from fsdmoe.checkpoint.storage import StrPath, open_storage
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.checkpoint.writer import NOT_ENOUGH, SaveOrder
from fsdmoe.errors import ConfigError
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Meshes
from fsdmoe.rules import size_text

logger = logging.getLogger(__name__)

Parts = Mapping[str, Any]


@dataclass
class SaveRecord:
    """How the last save went."""

    step: int
    stall_seconds: float
    """How long the loop waited, for the save before this one too."""
    num_bytes: int
    """What this rank staged or wrote."""
    total_seconds: float | None = None
    """Until it was whole; None while it is being written or when it failed."""


class Checkpointer:
    """Saves and resumes one run: intervals, background saves, retention. Every method is collective."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: StrPath,
        *,
        meshes: Meshes | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the folder of a run.

        Args:
            config: The ``checkpoint`` section.
            folder: Used where ``config.folder`` is empty.
            meshes: Needed for models that are split over mesh axes (DTensors) and not sharded.
            about: Kept with the tensors for readers, such as the run's configuration.
        """
        self.config = config
        self.storage = open_storage(config.folder or folder)
        self.record: SaveRecord | None = None
        self._meshes, self._about = meshes, json.loads(json.dumps(dict(about or {}), default=str))
        self._cache, self._stager = PlanCache(), Stager()
        self._is_asynchronous = config.asynchronous
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._failed_in_a_row = 0
        self._tidied = False
        self.before_save: Callable[[], None] = lambda: None
        """Called on the first rank before each save; its error is every rank's, and nothing is saved."""
        self.told: Container[str] = ()
        """Changes that need not be told again when a checkpoint is loaded, as ``train.steps 2 -> 4``."""
        self._shape: list[tuple[Any, ...]] = []
        self._group: dist.ProcessGroup | None = None
        if config.asynchronous and world()[1] > 1:
            self._group = dist.new_group(backend="gloo")

    def is_due(self, step: int) -> bool:
        """Whether the interval asks for a save after this step."""
        return self.config.interval > 0 and step % self.config.interval == 0

    def maybe_save(self, step: int, parts: Parts | Callable[[], Parts], *, is_last: bool = False) -> bool:
        """Save if the interval says so, or the run ends here.

        Args:
            step: Optimizer steps done.
            parts: Name to part, as for ``fsdmoe.checkpoint.save``; or a function that makes it, called only
                for a save.
            is_last: Save whatever the interval says, and not in the background: there is nothing left to
                compute meanwhile, and no second copy of the state is needed.

        Returns:
            Whether it saved.
        """
        if not is_last and not self.is_due(step):
            return False
        self.save(step, parts() if callable(parts) else parts, in_background=not is_last)
        return True

    def save(self, step: int, parts: Parts, *, in_background: bool = True) -> None:
        """Save now. Returns when the parts may change again; asynchronous saves finish later.

        ``in_background``: as far as ``checkpoint.asynchronous`` and the host's memory allow it.
        """
        asked = time.perf_counter()
        self.wait()
        began = time.perf_counter()
        tensors, values = together(lambda: snapshot(parts, self._meshes))
        about = describe({"step": step, "run": self._about, **about_parts(parts, self._meshes)})
        name = from_first(lambda: self._choose_name(step))
        order = SaveOrder(self.storage, name, values, about, self.config.threads, point=True)
        needed = self._needed(tensors)
        staged = None
        if in_background and self._is_asynchronous:
            staged = needed if needed is not None else set(tensors)
            chosen = {key: tensors[key] for key in tensors if key in staged}
            if self._has_host_memory(chosen):
                # together: a rank without the host memory would leave the others waiting in the background
                copies = together(lambda: self._stager.stage(chosen))
                tensors = {key: copies.get(key, tensor) for key, tensor in tensors.items()}
            else:
                staged = None
        num_bytes = sum(_held_bytes(tensors[key]) for key in (staged if staged is not None else tensors))
        self.record = SaveRecord(step, time.perf_counter() - asked, num_bytes)
        if staged is None:
            self._write(order, tensors, None, began)
            self._settle(is_last=not in_background)
            return
        self._thread = threading.Thread(
            target=self._write, args=(order, tensors, staged, began), name="checkpoint-save"
        )
        self._thread.start()

    def prepare(self, parts: Parts) -> None:
        """Take the host memory for asynchronous saves now: pinning it is slow, and the first save would
        pay."""
        if self._is_asynchronous:
            tensors = together(lambda: snapshot(parts, self._meshes)[0])
            if self._has_host_memory(tensors):
                together(lambda: self._stager.prepare(tensors))

    def _has_host_memory(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether all ranks have the host memory for a copy; if not, saves are no longer in the
        background."""
        lack = together(lambda: self._stager.lack_of_memory(tensors))
        if any(from_all_ranks(lack is not None)):
            self._is_asynchronous = False
            if world()[0] == 0:
                why = lack or "another host has no memory for a copy of the state"
                logger.warning("checkpoint.asynchronous: training will wait for saves: %s", why)
        return self._is_asynchronous

    @property
    def is_saving(self) -> bool:
        """Whether a background save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until no save is in flight; raises if the last one failed once too often."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._settle()

    def join(self) -> None:
        """Until no save is in flight, however it ends; not collective."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Finish what is in flight."""
        self.wait()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def will_load(self) -> bool:
        """Whether ``load`` is going to find weights, so that no others need be read before. A
        ``checkpoint.load`` that names nothing is refused here already, before a model takes memory."""
        if self.config.load == "none":
            return False
        names = from_first(self._recovered)
        if not names and self.config.load != "latest":
            with self._naming_the_key():
                names = from_first(lambda: require(self.config.load)[1])
        return bool(names)

    def load(self, parts: Parts) -> Tree | None:
        """Do what ``checkpoint.load`` says: the stored plain values, or None for a run from scratch.

        A run that will save takes its host memory here too (see ``prepare``).
        """
        loaded = self.load_only(parts, is_optional=True)
        if self.config.interval > 0:
            self.prepare(parts)
        return loaded

    def load_only(self, parts: Parts, *, is_optional: bool) -> Tree | None:
        """As :meth:`load`, for a program that saves nothing; finding nothing is an error unless
        ``is_optional``."""
        with self._naming_the_key():
            loaded = self._load(parts)
        if loaded is None and not is_optional:
            raise ConfigError(
                f"checkpoint.load: expected a checkpoint, got none in {self.storage.root}; is "
                "train.output_dir right?"
            )
        return loaded

    @contextlib.contextmanager
    def _naming_the_key(self) -> Iterator[None]:
        """What cannot be loaded is said with the setting that asked for it."""
        try:
            yield
        except CheckpointError as error:
            fix = "name another one in checkpoint.load, or set it to none to start anew"
            error.args = (f"checkpoint.load = {self.config.load}: {error}\n  nothing was changed; {fix}",)
            raise

    def _load(self, parts: Parts) -> Tree | None:
        if self.config.load == "none":
            return None
        if self.config.load == "latest":
            return self.load_latest(self._wanted(parts))
        if self._has_begun():
            return self.load_latest(parts)
        return self.load_from(self.config.load, self._wanted(parts))

    def _wanted(self, parts: Parts) -> Parts:
        return {"model": parts["model"]} if self.config.load_only_model else parts

    def _has_begun(self) -> bool:
        """A run that started from a foreign checkpoint and was restarted goes on with its own, not from
        the start.

        A path inside the run's own folder is another matter: it sets the run back, on purpose.
        """
        start = self.config.load
        names = from_first(self._recovered)
        path = os.path.abspath(os.path.expanduser(start))
        if not names or path.startswith(os.path.abspath(self.storage.root) + os.sep):
            return False
        if world()[0] == 0:
            logger.warning(
                "checkpoint.load: %s was the start of this run, which has checkpoints of its own by now; "
                "resuming those. To start again, give it another train.output_dir",
                start,
            )
        return True

    def load_latest(self, parts: Parts) -> Tree | None:
        """Resume this run's newest whole checkpoint; None when there is none at all."""
        names = from_first(self._recovered)
        if not names:
            return None
        loaded = load_first(self.storage, names, parts, self._policy(), explicit=False)
        self._say_changes(f"resumed {self.storage.root}/{loaded.name}", loaded.about)
        return loaded.values

    def load_from(self, path: str, parts: Parts) -> Tree:
        """Load a named checkpoint, or the newest of a named folder; anything else is an error."""
        weights_only = set(parts) == {"model"}
        root, names, explicit = from_first(lambda: require_start(path, weights_only=weights_only))
        loaded = load_first(open_storage(root), names, parts, self._policy(), explicit=explicit)
        self._say_changes(f"loaded {root}/{loaded.name}", loaded.about)
        return loaded.values

    def _write(
        self, order: SaveOrder, tensors: dict[str, torch.Tensor], staged: set[str] | None, began: float
    ) -> None:
        try:
            write_state(order, tensors, self._cache, self._group, staged)
            assert self.record is not None
            seconds = self.record.total_seconds = time.perf_counter() - began
            if staged is None:
                self.record.stall_seconds = seconds
            if world()[0] == 0:
                stall, where = self.record.stall_seconds, f"{self.storage.root}/{order.name}"
                logger.info("saved %s in %.1f s; training waited %.1f s for it", where, seconds, stall)
                # Never raises: the other ranks would not learn of an error here.
                for gone in retain(self.storage, self.config.keep_last, self.config.keep_every):
                    logger.info("%s/%s is no longer kept", self.storage.root, gone)
        except Exception as error:  # raised again by the loop's own thread
            self._failure = self._explained(error, order.name)
            if staged is not None and world()[0] == 0:  # now: the loop may not look for hours
                logger.error("the save in the background has failed: %s", self._failure)

    def _explained(self, error: Exception, name: str) -> Exception:
        """A full disk, with what there was to write and what is free, or a file that may not be so large;
        all else as it is."""
        text = str(error)
        key = "checkpoint.folder" if self.config.folder else "train.output_dir"
        if NOT_ENOUGH in text:
            return CheckpointError(f"{key}: {text}")
        if os.strerror(errno.EFBIG) in text:
            fix = "raise the limit of a file's size (ulimit -f), or name another checkpoint.folder"
            return CheckpointError(f"{key}: {text}; {fix}")
        if not any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT)):
            return error
        free = fewer = ""
        with contextlib.suppress(OSError):
            fewer = ", or lower checkpoint.keep_last" if len(self.storage.names()) > 1 else ""
            free = f", {size_text(shutil.disk_usage(self.storage.root).free)} are free"
        assert self.record is not None
        return CheckpointError(
            f"{key}: no space left in {self.storage.root} for {name} ({size_text(self.record.num_bytes)} "
            f"of this rank{free}); free some, or name another checkpoint.folder{fewer}"
        )

    def _settle(self, *, is_last: bool = False) -> None:
        """Account for the save that just ended; no other follows the last, so it must not fail."""
        failure, self._failure = self._failure, None
        if failure is None:
            self._failed_in_a_row = 0
            return
        self._shape = []
        self._failed_in_a_row += 1
        if is_last or self._failed_in_a_row > self.config.max_failed_saves:
            raise failure
        logger.error("a save failed (%d in a row); training goes on: %s", self._failed_in_a_row, failure)

    def _needed(self, tensors: dict[str, torch.Tensor]) -> set[str] | None:
        """The tensors this rank writes, as of the last plan; None when the state has another shape since."""
        shape = [
            (name, t.dtype, *((t.start, t.end) if isinstance(t, ShardedTensor) else t.shape))
            for name, t in tensors.items()
        ]
        same, self._shape = shape == self._shape, shape
        return self._cache.names() if same else None

    def _choose_name(self, step: int) -> str:
        self.before_save()
        if not self._tidied:
            self.storage.tidy()
            self._tidied = True
        return name_for(step, self.storage.names())

    def _recovered(self) -> list[str]:
        self.storage.recover()
        return [entry.name for entry in entries(self.storage)]

    def _policy(self) -> LoadPolicy:
        return LoadPolicy(verify=self.config.verify, threads=self.config.threads, meshes=self._meshes)

    def _say_changes(self, text: str, about: Tree) -> None:
        """Say at the start what is different from when the checkpoint was written."""
        if world()[0] != 0:
            return
        logger.info(text)
        before, now = about.get("layout"), dataclasses.asdict(self._meshes.degrees) if self._meshes else None
        if before and now and before != now:
            logger.info("resharded: %s", ", ".join(_differences(before, now)))
        for line in _differences(about.get("run") or {}, self._about):
            if line not in self.told:
                logger.info("changed since it was saved: %s", line)


def _differences(before: Tree, now: Tree, prefix: str = "") -> list[str]:
    """Keys whose values differ, dotted, with both values; keys that only one side has are passed over."""
    found = []
    for key in [key for key in now if key in before]:
        if isinstance(before[key], dict) and isinstance(now[key], dict):
            found += _differences(before[key], now[key], f"{prefix}{key}.")
        elif before[key] != now[key]:
            found.append(f"{prefix}{key} {before[key]!r} -> {now[key]!r}")
    return found


def _held_bytes(tensor: torch.Tensor) -> int:
    held = tensor.piece if isinstance(tensor, ShardedTensor) else tensor
    return held.numel() * held.element_size()
