"""The checkpoints of a run: when to save, what to keep, what to resume from.

How a save goes is in :mod:`fsdmoe.checkpoint.saver`. With ``checkpoint.in_memory`` there are also copies in
the memory of two hosts (:mod:`fsdmoe.checkpoint.memory_copies`): a run resumes whichever is newer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch

from fsdmoe.checkpoint import course
from fsdmoe.checkpoint.agree import from_first, world
from fsdmoe.checkpoint.api import Loaded, LoadPolicy, load_first
from fsdmoe.checkpoint.catalog import entries, name_for, require, require_start, retain, to_be_deleted
from fsdmoe.checkpoint.config import RUN_FOLDER, CheckpointConfig
from fsdmoe.checkpoint.course import Course
from fsdmoe.checkpoint.errors import CheckpointError, listed
from fsdmoe.checkpoint.limited_storage import Limits
from fsdmoe.checkpoint.memory_copies import MemoryCopies
from fsdmoe.checkpoint.saver import Parts, Saver, SaveRecord
from fsdmoe.checkpoint.session import write_state
from fsdmoe.checkpoint.start_place import Place, place_of
from fsdmoe.checkpoint.storage import StrPath, open_storage
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.checkpoint.writer import NOT_ENOUGH, SaveOrder
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import size_text
from fsdmoe.mesh import Meshes

logger = logging.getLogger(__name__)


_BASE_ELSEWHERE = (
    "expected a checkpoint without the weights that are frozen as codes here, got one with them: this run's "
    "own checkpoints leave them out, so once resumed it would go on with those of model.hf; write that "
    "checkpoint to a folder with to-hf and name the folder in model.hf"
)


class Checkpointer(Saver):
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
            config: The ``checkpoint`` section. ``interval = -1`` is for a program that only looks at one.
            folder: Used where ``config.folder`` is empty.
            meshes: Needed for models that are split over mesh axes (DTensors) and not sharded.
            about: Kept with the tensors for readers, such as the run's configuration.
        """
        self._limits = Limits(config.retries, config.hang_seconds)
        storage = open_storage(config.folder or folder, self._limits)
        super().__init__(config, storage, meshes=meshes, about=about)
        self._own_folder = folder
        self._run = _run_folder(folder)
        self._place = self._place_of_start()
        self._only_model = config.load_only_model
        self._copies = MemoryCopies(config, folder, meshes, about) if config.in_memory else None
        self._tidied = False
        self._damaged: frozenset[str] = frozenset()
        self._resumed = ""
        """The checkpoint of this run that was loaded whole."""
        self._course = Course()
        self._is_repeated = False
        """The launcher has started this run again, which has something of its own to go on with by now."""
        if self._saves and self._begins_a_course():
            self._find_own_course()
        self.before_save: Callable[[], None] = lambda: None
        """Called on the first rank before each save; its error is every rank's, and nothing is saved."""
        self.told: Container[str] = ()
        """Changes that need not be told again when a checkpoint is loaded, as ``train.steps 2 -> 4``."""
        self.loaded = ""
        """The checkpoint that was loaded, as ``runs/a/checkpoints/step_00000100``."""

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
        if self._copies is not None and not is_last:
            self._copies.maybe_save(step, parts)
        if not is_last and not self.is_due(step):
            return False
        self.save(step, parts() if callable(parts) else parts, in_background=not is_last)
        return True

    def will_load(self) -> bool:
        """Whether ``load`` is going to find weights, so that no others need be read before. A
        ``checkpoint.load`` that names nothing is refused here already, before a model takes memory."""
        if self._place == "none":
            return False
        names = from_first(self._recovered)
        if not names and self._place != "latest":
            with self._naming_the_key():
                names = from_first(lambda: require(self.config.load, self._limits)[1])
        if self._copies is not None and not self._begins_a_course():
            return bool(names) or self._copies.are_there()
        return bool(names)

    def load(self, parts: Parts) -> Tree | None:
        """Do what ``checkpoint.load`` says: the stored plain values, or None for a run from scratch.

        A run that will save takes its host memory here too (see ``prepare``).
        """
        loaded = None
        if self._begins_a_course() and self._saves:
            from_first(self._warn_of_deletion)
        if self._copies is not None and not self._begins_a_course():
            with self._naming_the_key():
                loaded = self._copies.load(parts, self._policy(), saved=from_first(self._newest_step))
        if loaded is not None:
            self._say_changes("resumed", f"{loaded.name} of the copies in memory", loaded.about)
        values = self.load_only(parts, is_optional=True) if loaded is None else loaded.values
        if loaded is None and not self._is_repeated:
            self._course = Course(**from_first(self._begin_course))
        if self.config.interval > 0:
            self.prepare(parts)
        if self._copies is not None:
            self._copies.begin(parts, loaded=None if loaded is None else loaded.name)
        return values

    def _warn_of_deletion(self) -> None:
        """A new beginning in the folder of what was before takes the places of its checkpoints."""
        old = to_be_deleted(self.storage, self.config.keep_every)
        if old:
            key = "checkpoint.folder" if self.config.folder else "train.output_dir"
            what = "load_only_model" if self._place in ("latest", "own") else f"load = {self.config.load}"
            whose = "of an earlier run" if self._place == "none" else "of what came before"
            logger.warning(
                "checkpoint.%s: %s holds checkpoints %s, which are deleted as this run saves its own "
                "(checkpoint.keep_last = %d):%s\n  to keep them, give this run another %s",
                what,
                self.storage.root,
                whose,
                self.config.keep_last,
                listed(old, 5),
                key,
            )

    @property
    def _saves(self) -> bool:
        return self.config.interval >= 0

    def _begins_a_course(self) -> bool:
        """Whether ``load`` leaves behind what the run has done so far."""
        is_own = self._place in ("latest", "own")
        return self._place in ("none", "set_back") or (is_own and self._only_model)

    def _find_own_course(self) -> None:
        """Go on with what an earlier start of the same launch has saved, as ``latest`` does."""
        begun = from_first(lambda: course.noted(self._run, self._words))
        if begun is None:
            return
        found = Course(**begun)
        has_copies = self._copies is not None and self._copies.are_there()
        has_saved = from_first(lambda: any(e.serial > found.newest for e in entries(self.storage)))
        if not (has_saved or has_copies):
            return
        self._course = found
        self._is_repeated = True
        self._place = "latest"
        self._only_model = False
        if world()[0] == 0:
            what = "load_only_model" if self.config.load_only_model else f"load = {self.config.load}"
            logger.warning(
                "checkpoint.%s began this run at the first start of its launch; restarted, it goes on with "
                "its own checkpoints. For a new beginning under the same --rdzv-id, remove %s/%s",
                what,
                self._run,
                course.COURSE,
            )

    @property
    def _words(self) -> list[Any]:
        return [self.config.load, self.config.load_only_model]

    def _begin_course(self) -> Tree:
        """On the first rank: the course of this start, which it notes where ``load`` would begin it again."""
        begun = Course.after(entries(self.storage), self._resumed)
        if self._begins_a_course() and self._saves:
            course.note(self._run, begun, self._words)
        return dataclasses.asdict(begun)

    def end_course(self) -> None:
        """The run is finished: the same command begins another one."""
        if world()[0] == 0:
            course.remove_note(self._run)

    def _place_of_start(self) -> Place:
        """What ``load`` is to this run; of a path, as the first rank finds it."""
        run = self._run

        def found() -> Place:
            return place_of(self.config.load, self.storage.root, run)

        if self.config.load in ("latest", "none"):  # a word, which needs no ranks to agree on folders
            return found()
        place: Place = from_first(found)
        return place

    def _newest_step(self) -> int:
        """Of the checkpoints of this run that can be read; -1 without one."""
        begun = max(0, self._course.newest)
        return next((entry.step for entry in entries(self.storage) if entry.serial > begun), -1)

    def load_only(self, parts: Parts, *, is_optional: bool) -> Tree | None:
        """As :meth:`load`, for a program that saves nothing; finding nothing is an error unless
        ``is_optional``."""
        with self._naming_the_key():
            loaded = self._load(parts)
        if loaded is None and not is_optional:
            raise ConfigError(
                f"checkpoint.load: expected a checkpoint, got none in {self.storage.root}; name the folder "
                "of a run that has one (--resume FOLDER), or train first"
            )
        return loaded

    @contextlib.contextmanager
    def _naming_the_key(self) -> Iterator[None]:
        """What cannot be loaded is said with the setting that asked for it."""
        try:
            yield
        except CheckpointError as error:
            fix = "name another one in checkpoint.load, or set it to none to start anew"
            if self._is_repeated:
                fix = f"to start anew, remove {self._run}/{course.COURSE}"
            first, newline, rest = str(error).partition("\n")
            has_fix = "; " in first
            if not has_fix:  # in the first line, which is what people read
                colon = ":" * first.endswith(":")
                first = f"{first.removesuffix(':')}; {fix}{colon}"
            text = f"{first}{newline}{rest}\n  nothing was changed{f'; {fix}' * has_fix}"
            error.args = (f"checkpoint.load = {self.config.load}: {text}",)
            raise

    def _load(self, parts: Parts) -> Tree | None:
        wanted = {"model": parts["model"]} if self._only_model else parts
        if self._place == "none":
            return None
        if self._place == "latest":
            return self.load_latest(wanted)
        if self._has_begun():
            return self.load_latest(wanted if self._place == "own" else parts)
        return self.load_from(self.config.load, wanted)

    def _has_begun(self) -> bool:
        """A run that started from a foreign checkpoint and was restarted goes on with its own, not from
        the start.

        A path inside the run's own folder is another matter: it sets the run back, on purpose.
        """
        names = from_first(self._recovered)
        if not names or self._place == "set_back":
            return False
        if world()[0] == 0 and self._place == "foreign":
            logger.warning(
                "checkpoint.load: this run has checkpoints of its own by now; resuming those, not %s. To "
                "start from that again, give the run another train.output_dir",
                self.config.load,
            )
        return True

    def go_back(self, parts: Parts) -> Tree | None:
        """Load this run's newest checkpoint in the middle of it: of those that this start saved, then the one
        that it resumed and earlier ones; None when there is none. What was done since is dropped, with its
        copies in memory."""
        self.wait()
        if not from_first(self._recovered):
            return None
        if self._copies is not None:
            self._copies.clear()
        return self.load_latest(parts)

    def load_latest(self, parts: Parts) -> Tree | None:
        """Resume this run's newest whole checkpoint; None when there is none at all."""
        names = from_first(self._recovered)
        if not names:
            return None
        loaded = load_first(self.storage, names, parts, self._policy(), explicit=False)
        self._damaged = frozenset(loaded.damaged)
        weights_only = set(parts) == {"model"}
        self._resumed = "" if weights_only else loaded.name
        if weights_only:
            self._refuse_base(loaded)
        self._say_changes("resumed", f"{self.storage.root}/{loaded.name}", loaded.about)
        return loaded.values

    def load_from(self, path: str, parts: Parts) -> Tree:
        """Load a named checkpoint, or the newest of a named folder; anything else is an error."""
        weights_only = set(parts) == {"model"}
        root, names, explicit = from_first(
            lambda: require_start(path, weights_only=weights_only, limits=self._limits)
        )
        loaded = load_first(open_storage(root, self._limits), names, parts, self._policy(), explicit=explicit)
        if not weights_only and self._place in ("set_back", "own"):
            self._resumed = loaded.name
        self._refuse_base(loaded)
        self._say_changes("loaded", f"{root}/{loaded.name}", loaded.about)
        return loaded.values

    def _refuse_base(self, loaded: Loaded) -> None:
        """A run that saves would go on without the weights that it keeps as codes."""
        if loaded.filled_codes and self._saves:
            raise CheckpointError(_BASE_ELSEWHERE)

    def wait(self) -> None:
        super().wait()
        if self._copies is not None:
            self._copies.wait()

    def join(self) -> None:
        super().join()
        if self._copies is not None:
            self._copies.join()

    def close(self) -> None:
        """Finish what is in flight. The copies in memory are removed: the run has ended in order, and has
        saved its end."""
        super().close()
        if self._copies is not None:
            self._copies.close()
            self._copies.remove()

    @property
    def card(self) -> dict[str, str]:
        """What the start card says of copies in memory, if there are any."""
        return {} if self._copies is None else {"copies": self._copies.text}

    def _put(self, order: SaveOrder, tensors: dict[str, torch.Tensor], staged: set[str] | None) -> None:
        write_state(order, tensors, self._cache, self._group, staged)

    def _saved(self, order: SaveOrder, record: SaveRecord) -> None:
        if world()[0] == 0:
            where = f"{self.storage.root}/{order.name}"
            text = "saved %s in %.1f s; training waited %.1f s for it"
            logger.info(text, where, record.total_seconds, record.stall_seconds)
            self._damaged -= {order.name}
            keep = self.config.keep_last, self.config.keep_every
            for gone in retain(self.storage, *keep, self._damaged):
                logger.info("%s/%s is no longer kept", self.storage.root, gone)

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

    def _choose_name(self, step: int) -> str:
        self.before_save()
        if not self._tidied:
            self.storage.tidy()
            if self._copies is None:
                MemoryCopies.drop_id(self._own_folder)
            self._tidied = True
        return name_for(step, [*self.storage.names(), *self._failed_names])

    def _recovered(self) -> list[str]:
        self.storage.recover()
        return [entry.name for entry in entries(self.storage) if self._course.has(entry)]

    def _policy(self) -> LoadPolicy:
        return LoadPolicy(verify=self.config.verify, threads=self.config.threads, meshes=self._meshes)

    def _say_changes(self, how: str, name: str, about: Tree) -> None:
        """Say at the start what was loaded, and what is different from when it was written."""
        self.loaded = name
        if world()[0] != 0:
            return
        logger.info("%s %s", how, name)
        before, now = about.get("layout"), dataclasses.asdict(self._meshes.degrees) if self._meshes else None
        if before and now and before != now:
            logger.info("resharded: %s", ", ".join(_differences(before, now)))
        for line in _differences(about.get("run") or {}, self._about):
            if line not in self.told:
                logger.info("changed since it was saved: %s", line)


def _run_folder(folder: StrPath) -> str:
    """Of the folder of a run, or that of its checkpoints inside."""
    parent, _, name = os.fspath(folder).rstrip("/").rpartition("/")
    return parent or "." if name == RUN_FOLDER else os.fspath(folder)


def _differences(before: Tree, now: Tree, prefix: str = "") -> list[str]:
    """Keys whose values differ, dotted, with both values; keys that only one side has are passed over."""
    found = []
    for key in [key for key in now if key in before]:
        if isinstance(before[key], dict) and isinstance(now[key], dict):
            found += _differences(before[key], now[key], f"{prefix}{key}.")
        elif before[key] != now[key]:
            found.append(f"{prefix}{key} {before[key]!r} -> {now[key]!r}")
    return found
