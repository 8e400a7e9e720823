"""One run at a time in a run's folder: ``run.lock``, which its first rank holds from start to end.

The file says who holds it. It is linked into place with its content, which is atomic on shared file systems
too. Whoever finds one there tells from it whether the holder is gone::

    on this machine      its process has ended, or the machine was started anew: gone; else it runs
    in another           the kernel released its flock: gone; else it runs
    container here
    elsewhere            Slurm requeued the same job, or torchrun restarted the same rendezvous: gone;
                         else nobody can tell from here

A lock whose holder is gone is taken over. One whose holder may live is a ``ConfigError``, unless the user
asks for it (``--take-over``); one whose holder runs is never taken. A holder that was wrongly believed to be
gone finds that out before its next save (:meth:`RunLock.require`) and stops: it neither writes nor deletes.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import fcntl
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fsdmoe.checkpoint import Checkpointer
from fsdmoe.checkpoint.agree import from_first
from fsdmoe.config import Config
from fsdmoe.config.command_line import CommandLine
from fsdmoe.core import failures
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.lifecycle import Ending

logger = logging.getLogger(__name__)

LOCK = "run.lock"
_TRIES, _POLL_SECONDS = 40, 0.05


class HolderState(enum.Enum):
    """What can be known of the run that holds a lock."""

    RUNS = enum.auto()
    GONE = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock. What the system does not say is empty."""

    token: str
    """Of this start alone."""
    host: str
    pid: int
    started: str
    """When the lock was taken, for people."""
    began: str = ""
    """When the process began, by the kernel's clock: a pid is given out again."""
    space: str = ""
    """Where the pid means something."""
    boot: str = ""
    """Which start of the machine's kernel it is."""
    machine: str = ""
    launch: str = ""
    """torchrun's id of the rendezvous, which all of its restarts share."""
    job: str = ""
    """Slurm's, which a requeued job keeps."""
    requeued: int = 0
    """How often it was."""

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Holder:
        count = environment.get("SLURM_RESTART_COUNT", "0")
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
            began=failures.began(os.getpid()),
            space=failures.process_space(),
            boot=_line_of("/proc/sys/kernel/random/boot_id"),
            machine=_line_of("/etc/machine-id"),
            launch=failures.launch_id(environment),
            job=environment.get("SLURM_JOB_ID", ""),
            requeued=int(count) if count.isdecimal() else 0,
        )

    @classmethod
    def from_text(cls, text: str) -> Holder | None:
        """None where it is not one of ours, or half of one."""
        try:
            found = json.loads(text)
            known = {field.name: found[field.name] for field in fields(cls)}
        except (ValueError, KeyError, TypeError):
            return None
        kinds = {"pid": int, "requeued": int}
        return cls(**known) if all(isinstance(v, kinds.get(k, str)) for k, v in known.items()) else None

    def __str__(self) -> str:
        named = [f"host {self.host}", f"pid {self.pid}"]
        named += [f"Slurm job {self.job}"] * bool(self.job)
        named += [f"torchrun id {self.launch}"] * bool(self.launch)
        return f"the run of {', '.join(named)}, which began at {self.started}"


class RunLock:
    """The lock of one folder, named in a configuration by ``key``. Used by a run's first rank alone."""

    def __init__(self, folder: Path, key: str = "train.output_dir", *, notes: Path | None = None) -> None:
        """``notes``: the run's folder, where it is noted that a lock was taken over."""
        self.path = folder / LOCK
        self._key = key
        self._notes = notes or folder
        self._me: Holder | None = None
        self._handle: int | None = None
        """Of the file, with its flock; the kernel closes it with the process."""

    def take(self, *, take_over: bool = False) -> None:
        """Hold the folder from here on.

        Raises:
            ConfigError: Another run holds it, or may.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        me = Holder.of_this_process()
        fresh = self.path.with_name(f".{LOCK}-{me.token}")
        self._write(fresh, me)
        try:
            for _ in range(_TRIES):
                if self._link(fresh, me) or self._replace(fresh, me, take_over):
                    self._me = me
                    return
                time.sleep(_POLL_SECONDS)
        finally:
            fresh.unlink(missing_ok=True)
            if self._me is None:
                self._close()
        raise ConfigError(
            f"{self._key}: other runs start in {self.path.parent} at the same moment; start one of them. If "
            f"there are none, remove {self.path.parent}/.{LOCK}-*"
        )

    def holder(self) -> Holder | None:
        """The run that holds the folder, or may; none where there is no lock, or its holder has ended."""
        held = self._read()
        if held is None or self._judge(held, Holder.of_this_process())[0] is HolderState.GONE:
            return None
        return held

    def require(self) -> None:
        """Refuse to go on where another run has taken the folder over."""
        held = self._read()
        if self._me is not None and held is not None and held != self._me:
            raise ConfigError(
                f"{self._key}: this run no longer holds {self.path.parent}, which {held}, has taken over; it "
                "stops here and leaves the folder to that one. To have both, start this one with another "
                f"{self._key}"
            )

    def release(self) -> None:
        """Let another run take the folder. Safe to call twice, and where it is not held."""
        if self._me is not None and self._read() == self._me:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._me = None
        self._close()

    def _write(self, path: Path, me: Holder) -> None:
        """A new file, whose flock this process has from now on."""
        self._handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):  # a file system without it: pids are left to go by
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._handle, (json.dumps(asdict(me), indent=1) + "\n").encode())
        os.fsync(self._handle)

    def _link(self, fresh: Path, me: Holder) -> bool:
        """Put the file in place; whether there was none."""
        try:
            os.link(fresh, self.path)
        except FileExistsError:
            return self._read() == me  # the answer of a file server was lost, and it was asked again
        except OSError:  # no hard links on this file system: others may find it empty for a moment
            if not _create(self.path):
                return False
            fresh.replace(self.path)
        return True

    def _replace(self, fresh: Path, me: Holder, take_over: bool) -> bool:
        """Take over what is in its place, if that may be; whether it was."""
        held = self._read()
        if held is None and not self.path.exists():
            return False  # released meanwhile
        state, why = self._judge(held, me)
        if state is HolderState.RUNS or (state is HolderState.UNKNOWN and not take_over):
            raise ConfigError(self._refusal(held, state))
        # Several may have come to this verdict: one of them at a time, and only while the same lock is there.
        ticket = self.path.with_name(f".{LOCK}-after-{held.token if held else 'unknown'}")
        if not _create(ticket):
            return False
        try:
            if self._read() != held:
                return False
            fresh.replace(self.path)
        finally:
            ticket.unlink()
        line = f"{self._key}: took over the lock of {held or 'an unknown run'}: {why}"
        logger.warning("%s", line)
        failures.keep(line, self._notes)  # the only word of a run that was killed whole
        return True

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _read(self) -> Holder | None:
        try:
            return Holder.from_text(self.path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return None

    def _judge(self, held: Holder | None, me: Holder) -> tuple[HolderState, str]:
        """What is known of a lock's holder, and why it is taken over if it is."""
        if held is None:
            return HolderState.UNKNOWN, "--take-over"
        is_same_host = held.host == me.host
        if (held.space, held.boot) == (me.space, me.boot):
            if failures.is_alive(held.pid) and failures.began(held.pid) == held.began:
                return HolderState.RUNS, ""
            return HolderState.GONE, f"its process {held.pid} has ended"
        if (
            is_same_host
            and held.boot == me.boot
            and (state := self._flock_state()) is not HolderState.UNKNOWN
        ):
            return state, "its container has ended"
        if is_same_host and held.machine == me.machine != "" and "" != held.boot != me.boot != "":
            return HolderState.GONE, f"{held.host} was started anew since"
        if held.job == me.job != "" and held.requeued < me.requeued:
            return HolderState.GONE, f"Slurm has requeued job {me.job} since"
        if held.launch == me.launch != "":
            return HolderState.GONE, f"torchrun has restarted {me.launch}"
        return HolderState.UNKNOWN, "--take-over"

    def _flock_state(self) -> HolderState:
        """Whether a process of this kernel, in whatever container, still has the file's flock."""
        try:
            with self.path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return HolderState.RUNS
        except OSError:  # a file system without it
            return HolderState.UNKNOWN
        return HolderState.GONE

    def _refusal(self, held: Holder | None, state: HolderState) -> str:
        folder = self.path.parent
        other = f"give this run another {self._key}"
        who = f"{held} holds" if held else f"{LOCK} is there and cannot be read, so that a run may hold"
        begin = f"{self._key}: expected a folder that no other run uses, but {who} {folder}"
        if state is HolderState.RUNS:
            copied = f"where {folder} is a copy of its folder, remove {self.path}"
            return f"{begin}, and is running; {other}, or stop that one first; {copied}"
        look = f" (look for process {held.pid} on {held.host})" if held else ""
        if held is not None and held.job:
            look = f" (`squeue -j {held.job}` lists it if it does)"
        return (
            f"{begin}; whether it still runs cannot be told from here{look}. If it does, {other}; if it has "
            f"ended, start once with --take-over, or remove {self.path}"
        )


class RunLocks:
    """The locks of all folders that a run writes its state to."""

    def __init__(self, config: Config) -> None:
        output = Path(config.train.output_dir).expanduser().resolve()
        folders = {output: "train.output_dir"}
        apart = config.checkpoint.folder.removeprefix("file://")
        if apart and "://" not in apart and config.checkpoint.interval >= 0:  # an object store has no locks
            folders.setdefault(Path(apart).expanduser().resolve(), "checkpoint.folder")
        self._locks = [RunLock(folder, key, notes=output) for folder, key in folders.items()]

    def take(self, *, take_over: bool) -> None:
        """Hold all of them, on the first rank; its error is every rank's. Collective."""

        def take_each() -> None:
            for lock in self._locks:
                lock.take(take_over=take_over)

        from_first(take_each)

    def guard(self, checkpoints: Checkpointer, ending: Ending, leave: Callable[[], None]) -> None:
        """Save only while they are held, and hold them until no save is in flight. Once another run has taken
        one over, nothing more is written there: ``leave``."""

        def require() -> None:
            try:
                self.require()
            except ConfigError:
                ending.folder = None
                leave()
                raise

        checkpoints.before_save = require
        ending.last.callback(checkpoints.join)

    def require(self) -> None:
        """Refuse to go on where another run has taken one over; for the first rank."""
        for lock in self._locks:
            lock.require()

    def release(self) -> None:
        """Let other runs take them."""
        for lock in self._locks:
            lock.release()


def hold_folders(command: CommandLine, ending: Ending) -> RunLocks:
    """The locks of a run's folders, held until ``ending`` has closed all else; one that only evaluates takes
    none. Collective.

    Raises:
        ConfigError: Another run holds one of them, or may; on all ranks.
    """
    locks = RunLocks(command.config)
    ending.last.callback(locks.release)
    if not command.evaluate_only:
        try:
            locks.take(take_over=command.take_over)
        except ConfigError:
            ending.folder = None  # its errors.txt is that of the run that holds it
            raise
    return locks


def _create(path: Path) -> bool:
    """An empty file; whether there was none."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def _line_of(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
