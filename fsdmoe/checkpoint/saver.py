"""Saves of a run's state: a copy in host memory, then a background thread that writes it.

::

    step 500   |compute|copy to host|compute … compute|           the loop waits for the copy only
    background             |plan|write|fsync|rename|latest|delete old ones|

At most one save is in flight: the next one waits for it. The background part communicates over a gloo group
of its own, so it never mixes with the collectives of training. A save that fails leaves the earlier ones as
they were and is reported at the next save, or at :meth:`Saver.close`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.checkpoint.agree import from_first, together, world
from fsdmoe.checkpoint.api import about_parts, snapshot
from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.checkpoint.planner import PlanCache
from fsdmoe.checkpoint.session import describe
from fsdmoe.checkpoint.staging import Stager
from fsdmoe.checkpoint.storage import Storage
from fsdmoe.checkpoint.writer import SaveOrder
from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Meshes

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


class Saver:
    """One save at a time, in the background where that is possible. Every method is collective. What is
    written where is said by a subclass."""

    def __init__(
        self,
        config: CheckpointConfig,
        storage: Storage,
        *,
        meshes: Meshes | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.storage = storage
        self.record: SaveRecord | None = None
        self._meshes = meshes
        self._about = json.loads(json.dumps(dict(about or {}), default=str))
        self._cache = PlanCache()
        self._stager = Stager()
        self._is_asynchronous = config.asynchronous
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._failed_in_a_row = 0
        self._failed_names: list[str] = []
        """Not used again: a write that was given up may still end."""
        self._shape: list[tuple[Any, ...]] = []
        self._group: dist.ProcessGroup | None = None
        if config.asynchronous and world()[1] > 1:
            self._group = dist.new_group(backend="gloo")

    def _choose_name(self, step: int) -> str:
        """Of the folder to write; asked on the first rank."""
        raise NotImplementedError

    def _put(self, order: SaveOrder, tensors: dict[str, torch.Tensor], staged: set[str] | None) -> None:
        """Write it all; collective, in the background perhaps."""
        raise NotImplementedError

    def _saved(self, order: SaveOrder, record: SaveRecord) -> None:
        """All of it is written. Must not raise: the other ranks would not learn of an error here."""

    def _explained(self, error: Exception, name: str) -> Exception:
        """What a user is told of a save that failed."""
        return error

    def save(self, step: int, parts: Parts, *, in_background: bool = True) -> None:
        """Save now. Returns when the parts may change again; asynchronous saves finish later.

        ``in_background``: as far as ``checkpoint.asynchronous`` and the host's memory allow it.
        """
        asked = time.perf_counter()
        try:
            Saver.wait(self)  # a subclass may wait for more than its saves
        except Exception as error:  # once too often: the run ends, with what the storage takes by now
            self.save(step, parts, in_background=False)
            if in_background:
                raise
            logger.error("the save before the last has failed: %s", error)
            return
        began = time.perf_counter()
        tensors, values = together(lambda: snapshot(parts, self._meshes))
        about = describe({"step": step, "run": self._about, **about_parts(parts, self._meshes)})
        try:
            name = from_first(lambda: self._choose_name(step))
        except ConfigError:
            raise
        except Exception as error:  # on all ranks alike: the storage does not answer
            self.record = SaveRecord(step, time.perf_counter() - asked, 0)
            self._failure = error
            self._settle(is_last=not in_background)
            return
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
        num_bytes = sum(held_bytes(tensors[key]) for key in (staged if staged is not None else tensors))
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

    def is_saved(self) -> bool:
        """Whether the last save is whole, once it has ended."""
        self.join()
        return self._failure is None

    def close(self) -> None:
        """Finish what is in flight."""
        self.wait()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _write(
        self, order: SaveOrder, tensors: dict[str, torch.Tensor], staged: set[str] | None, began: float
    ) -> None:
        try:
            self._put(order, tensors, staged)
            assert self.record is not None
            seconds = self.record.total_seconds = time.perf_counter() - began
            if staged is None:
                self.record.stall_seconds = seconds
            self._saved(order, self.record)
        except Exception as error:  # raised again by the loop's own thread
            self._failure = self._explained(error, order.name)
            self._failed_names.append(order.name)
            if staged is not None and world()[0] == 0:  # now: the loop may not look for hours
                logger.error("the save in the background has failed: %s", self._failure)

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


def held_bytes(tensor: torch.Tensor) -> int:
    held = tensor.piece if isinstance(tensor, ShardedTensor) else tensor
    return held.numel() * held.element_size()
