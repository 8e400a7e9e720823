"""Kill a training run again and again, damage what it left, and see that nothing is lost.

::

    python -m benchmarks.kill_test --kills 50
    python -m benchmarks.kill_test --kills 1000 --folder /tmp/kills        goes on where it was interrupted

Ranks are forked from a process that has imported all that they need; else a life would be imports mostly.
Every life of the run resumes the newest whole checkpoint and trains on until its end:

=============  =============================================================================================
kind           how a life ends
=============  =============================================================================================
node           all ranks are killed (SIGKILL) at a random moment
rank           one rank is; the others find out by themselves
save           one rank is at a point of a save: before the data, in the middle of a file, before the
               manifest, before the rename, before the pointer, while an old checkpoint is deleted
slow disk      as node, and each write takes long
full disk      half of a file fits
read-only      nothing can be written
truncated      as node, and then a file of the newest checkpoint loses its end
flipped        as node, and then a bit of it flips
second run     as node, after another run has tried to start in the same folder, which must be refused
=============  =============================================================================================

After each end all visible checkpoints are verified byte by byte, but for one that was damaged. In the end an
uninterrupted run is compared with everything that the lives did: each step that any of them took must have
read the same documents and given the same loss, bit for bit, and each life must have begun at the newest
whole checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdmoe.checkpoint.catalog import Entry, entries
from fsdmoe.checkpoint.format import MANIFEST
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.checkpoint.session import open_verified
from fsdmoe.config import Config, build_config
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.run.lock import RunLock
from fsdmoe.testing import RankFailure, run_ranks
from fsdmoe.testing.ranks import PRELOAD
from fsdmoe.train import Run

POINTS = ("before data", "mid file", "before manifest", "before rename", "before pointer", "while deleting")
KINDS = ("node", "rank", "slow disk", "full disk", "read-only", "truncated", "flipped", "second run")
"""Those outside of saves, each as often as any other."""
INTERVAL = 3
SLOW_SECONDS = 0.05
JOURNAL = "journal.jsonl"
"""Every step of every life."""
DAMAGED = "damaged.jsonl"
"""The checkpoints that were, before they are."""


@dataclass(frozen=True)
class Kill:
    """How a life ends: at a point of its n-th save, or after some seconds of training."""

    point: str | None = None
    save: int = 1
    rank: int = 0
    seconds: float | None = None
    kind: str = "save"

    def __str__(self) -> str:
        text = f"{self.point} of save {self.save}" if self.point else f"{self.kind}"
        return text if self.seconds is None else f"{text} after {self.seconds:.2f} s"

    def is_timed_on(self, rank: int) -> bool:
        """Whether the clock ends this rank."""
        return self.kind != "rank" or rank == self.rank


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FatalStorage(LocalStorage):
    """A file system on which one rank dies at the chosen point."""

    def __init__(self, root: str, kill: Kill) -> None:
        super().__init__(root)
        self._kill, self._saves = kill, []  # type: tuple[Kill, list[str]]

    def _is_due(self, name: str, point: str) -> bool:
        if name not in self._saves:
            self._saves.append(name)
        return self._kill.point == point and len(self._saves) == self._kill.save

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[Any]:
        if file.startswith("data-") and self._is_due(name, "before data"):
            die()
        if file == MANIFEST and self._is_due(name, "before manifest"):
            die()
        if self._kill.kind == "read-only" and self._is_due(name, self._kill.kind):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with super().create(name, file) as handle:
            if self._kill.kind == "slow disk":
                time.sleep(SLOW_SECONDS)
            if self._kill.kind == "full disk" and self._is_due(name, self._kill.kind):
                yield _Full(handle)
                return
            yield _Dying(handle) if file.startswith("data-") and self._is_due(name, "mid file") else handle

    def commit(self, name: str) -> None:
        if self._is_due(name, "before rename"):
            die()
        super().commit(name)

    def point_at(self, name: str) -> None:
        if self._is_due(name, "before pointer"):
            die()
        super().point_at(name)

    def delete(self, name: str) -> None:
        if self._kill.point == "while deleting" and len(self._saves) >= self._kill.save:
            victim = Path(self.root) / name
            victim.rename(Path(self.root) / f".deleting-{name}")
            next((Path(self.root) / f".deleting-{name}").iterdir()).unlink()
            die()
        super().delete(name)


class _Dying:
    """A file whose writer dies after half of what it was given is on the disk."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def write(self, data: memoryview | bytes) -> None:
        self._handle.write(memoryview(data)[: len(data) // 2])
        self._handle.flush()
        die()


class _Full:
    """A file on a disk that is full after half of what is written."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def write(self, data: memoryview | bytes) -> None:
        self._handle.write(memoryview(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def config_of(folder: str, num_ranks: int) -> Config:
    problems: list[str] = []
    settings: dict[str, Any] = {
        "model": {"preset": "tiny-qwen3", "vocab_size": 264},
        "precision": {"param_dtype": "float32"},
        "data": {"kind": "python-stdlib", "max_bytes": 200_000, "seq_len": 32},
        "optim": {"lr": 1e-2, "warmup_steps": 2, "schedule": "constant"},
        "observe": {"tensorboard": False, "progress": "off"},
        "checkpoint": {"interval": INTERVAL, "keep_last": 2},
        "mesh": {"ep": num_ranks},
        "train": {"steps": 100_000, "global_batch_size": 8, "micro_batch_size": 2, "eval_interval": -1,
                  "output_dir": folder},
    }  # fmt: skip
    config = build_config(settings, {}, num_ranks, problems)
    assert config is not None, problems
    return config


def live(folder: str, kill: Kill | None, last_step: int) -> None:
    """One life: resume, train, write down every step in a journal, die or reach ``last_step``."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # cards of a thousand starts are no result
    config = config_of(folder, dist.get_world_size())
    rank, journal = dist.get_rank(), Path(folder) / JOURNAL
    if rank == 0:
        RunLock(Path(folder)).take()  # that of the life before is left, and its holder gone
    run = Run(config, build_meshes(config.mesh))
    if kill is not None and kill.point is not None and rank == kill.rank:
        run.checkpoints.storage = FatalStorage(run.checkpoints.storage.root, kill)
    if kill is not None and kill.kind == "second run" and rank == 0:
        _refused_second_run(Path(folder))
    if kill is not None and kill.seconds is not None and kill.is_timed_on(rank):
        timer = threading.Timer(kill.seconds, die)
        timer.daemon = True
        timer.start()
    if rank == 0:
        _note(journal, {"resumed": run.progress["step"]})
    while run.progress["step"] < last_step:
        record = run.train_step()
        pieces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, [list(piece) for piece in run.data.consumed_documents()])
        if rank == 0:
            read = sorted(piece for part in pieces for piece in part)
            digest = hashlib.sha256(json.dumps(read).encode()).hexdigest()
            _note(journal, {"step": record.step, "loss": record.loss.hex(), "documents": digest})
        run.checkpoints.maybe_save(record.step, run.state)
    run.checkpoints.close()
    run.close("done")


def _refused_second_run(folder: Path) -> None:
    """Another process tries to hold the folder, and must not get it."""
    child = os.fork()
    if child == 0:
        try:
            RunLock(folder).take()
        except ConfigError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, "a second run was allowed in the same folder"


def _note(journal: Path, line: dict[str, Any]) -> None:
    with journal.open("a") as handle:
        handle.write(json.dumps(line) + "\n")


def plan_kills(count: int, num_ranks: int, seed: int) -> list[Kill]:
    """Three of five inside a save. Each round of 40 has every point of a save four times and every other kind
    twice, in an order of its own, so that a plan of more kills begins with the same ones."""
    kills: list[Kill] = []
    while len(kills) < count:
        chance = random.Random(f"{seed}/{len(kills)}")
        points = [_in_save(point, chance, num_ranks) for point in POINTS * 4]
        others = [_outside_saves(kind, chance, num_ranks) for kind in KINDS * 2]
        kills += chance.sample(points + others, len(points) + len(others))
    return kills[:count]


def _in_save(point: str, chance: random.Random, num_ranks: int) -> Kill:
    by_any = point in ("before data", "mid file")
    rank = chance.randrange(num_ranks) if by_any else 0
    return Kill(point, save=chance.randint(2, 3), rank=rank)


def _outside_saves(kind: str, chance: random.Random, num_ranks: int) -> Kill:
    at_save = kind in ("slow disk", "full disk", "read-only")
    return Kill(
        kind if at_save else None,
        save=chance.randint(1, 2),
        rank=chance.randrange(num_ranks),
        seconds=None if kind in ("full disk", "read-only") else chance.uniform(0.02, 1.5),
        kind=kind,
    )


@dataclass
class Outcome:
    kills: int = 0
    steps: int = 0
    """Steps taken by all lives together, those that had to be taken again included."""
    repeated: int = 0
    worst_loss: int = 0
    """Most steps that one kill cost, where no checkpoint was damaged after it."""


def run_kills(folder: Path, kills: list[Kill], num_ranks: int, say: Any = print) -> Outcome:
    """Live and die through all kills, then compare with an uninterrupted run. What an interrupted call has
    done in the same folder is not done again."""
    lives = folder / "lives"
    lives.mkdir(parents=True, exist_ok=True)
    report = folder / "report.jsonl"
    done = _lines(report)
    found = whole_ones(lives)  # not the last line's: a life may have been interrupted after it
    newest = found[0].step if found else 0
    for number, kill in enumerate(kills[len(done) :], len(done)):
        line = _end_one_life(lives, kill, num_ranks, newest)
        newest = line["newest"]
        done.append(line)
        _note(report, line)
        say(f"{number + 1:4d}. {kill!s:40s} at step {line['reached']:5d}; newest whole one: {newest}")
    last = newest + INTERVAL + 1
    run_ranks(live, num_ranks, str(lives), None, last, timeout=600, fresh=True)
    shutil.rmtree(folder / "whole", ignore_errors=True)  # an interrupted one is not uninterrupted
    run_ranks(live, num_ranks, str(folder / "whole"), None, last, timeout=36_000, fresh=True)
    outcome = Outcome(len(done), sum(line["steps"] for line in done))
    outcome.worst_loss = max(line["reached"] - line["newest"] for line in done if not line["is_damaged"])
    _compare(_lines(lives / JOURNAL), _lines(folder / "whole" / JOURNAL), last, outcome)
    return outcome


def whole_ones(lives: Path) -> list[Entry]:
    """The checkpoints but for the damaged ones, the newest first; each must be whole, byte by byte."""
    storage = LocalStorage(lives / "checkpoints")
    damaged = [line["name"] for line in _lines(lives / DAMAGED)]
    found = [entry for entry in entries(storage) if entry.name not in damaged]
    for entry in found:
        open_verified(storage, entry.name, "full")
    return found


def _end_one_life(lives: Path, kill: Kill, num_ranks: int, newest: int) -> dict[str, Any]:
    """One life from its start to what it leaves; a line of the report."""
    before = len(_lines(lives / JOURNAL))
    with contextlib.suppress(RankFailure):
        run_ranks(live, num_ranks, str(lives), kill, 10**9, timeout=600, fresh=True)
        raise AssertionError(f"{kill}: the run was not killed")
    lines = _lines(lives / JOURNAL)[before:]
    assert not lines or lines[0].get("resumed") == newest, f"{kill}: began at {lines[0]}, newest was {newest}"
    found = whole_ones(lives)
    is_damaged = (
        kill.kind in ("truncated", "flipped") and len(found) > 1
    )  # with no whole one a run is refused
    if is_damaged:
        gone = found.pop(0).name
        _note(lives / DAMAGED, {"name": gone})
        damage(lives / "checkpoints" / gone, kill)
    steps = [line["step"] for line in lines if "step" in line]
    newest = found[0].step if found else 0
    reached = max(steps, default=newest)
    facts = {"steps": len(steps), "reached": reached, "newest": newest, "is_damaged": is_damaged}
    return {**asdict(kill), **facts}


def damage(checkpoint: Path, kill: Kill) -> None:
    """Cut off the end of the largest file, or flip one bit in it."""
    file = max(checkpoint.glob("data-*"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    with file.open("r+b") as handle:
        if kill.kind == "truncated":
            handle.truncate(size * 2 // 3)
            return
        at = random.Random(str(kill)).randrange(size)
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 1]))


def _compare(lives: list[dict[str, Any]], whole: list[dict[str, Any]], last: int, outcome: Outcome) -> None:
    truth = {line["step"]: line for line in whole if "step" in line}
    assert sorted(truth) == list(range(1, last + 1))
    taken: dict[int, int] = {}
    for line in lives:
        if "step" in line:
            taken[line["step"]] = taken.get(line["step"], 0) + 1
            if line["step"] in truth:
                assert line == truth[line["step"]], (
                    f"step {line['step']} is not that of the uninterrupted run"
                )
    assert set(truth) <= set(taken), "a step was never taken"
    outcome.repeated = sum(count - 1 for count in taken.values())


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines; half of one, whose writer was killed, is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def table(kills: list[Kill]) -> list[str]:
    """How many of each kind, in Markdown."""
    kinds = [kill.point if kill.kind == "save" else kill.kind for kill in kills]
    rows = [f"| {kind} | {kinds.count(kind)} |" for kind in (*POINTS, *KINDS) if kind in kinds]
    return ["| how a life ended | lives |", "| --- | --- |", *rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep all here, and go on where a call was interrupted")
    options = parser.parse_args()
    kills = plan_kills(options.kills, options.ranks, options.seed)
    PRELOAD.append("fsdmoe.train")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="fsdmoe-kills-") as temporary:
        outcome = run_kills(options.folder or Path(temporary), kills, options.ranks, say)
    print("\n".join(table(kills)))
    print(
        f"\n{outcome.kills} lives on {options.ranks} ranks: each began at the newest whole checkpoint, and "
        f"all checkpoints were verified byte by byte after each. {outcome.steps} steps were taken, "
        f"{outcome.repeated} of them again, at most {outcome.worst_loss} lost by one kill (interval "
        f"{INTERVAL}; twice as many where a save failed) where no checkpoint was damaged after it. Each step "
        "read the documents and gave the loss of the uninterrupted run, bit for bit."
    )


if __name__ == "__main__":
    main()
