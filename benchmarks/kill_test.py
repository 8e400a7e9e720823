"""Kill a training run again and again with SIGKILL, many times inside a save, and see that nothing is lost.

::

    python -m benchmarks.kill_test --kills 50 --ranks 2

Every life of the run resumes the newest checkpoint and trains on until it is killed: at a random moment, or
at a chosen point of a save (before the data, in the middle of a file, before the manifest, before the rename,
before the pointer, while an old checkpoint is deleted). After each death all visible checkpoints are verified
byte by byte. In the end an uninterrupted run is compared with everything that the lives did: each step that
any of them took must have read the same documents and given the same loss, bit for bit, and each life must
have begun at the newest whole checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdmoe.checkpoint.catalog import entries
from fsdmoe.checkpoint.format import MANIFEST
from fsdmoe.checkpoint.session import open_verified
from fsdmoe.checkpoint.storage import LocalStorage
from fsdmoe.config import Config, build_config
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import RankFailure, run_ranks
from fsdmoe.train import Run

POINTS = ("before data", "mid file", "before manifest", "before rename", "before pointer", "while deleting")
INTERVAL = 3


@dataclass(frozen=True)
class Kill:
    """How a life ends: at a point of its n-th save, or after some seconds of training."""

    point: str | None = None
    save: int = 1
    rank: int = 0
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.point} of save {self.save}" if self.point else f"after {self.seconds:.2f} s"


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
        with super().create(name, file) as handle:
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
    config = config_of(folder, dist.get_world_size())
    run = Run(config, build_meshes(config.mesh))
    rank, journal = dist.get_rank(), Path(folder) / "journal.jsonl"
    if kill is not None and kill.point is not None and rank == kill.rank:
        run.checkpoints.storage = FatalStorage(run.checkpoints.storage.root, kill)
    if kill is not None and kill.seconds is not None:
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


def _note(journal: Path, line: dict[str, Any]) -> None:
    with journal.open("a") as handle:
        handle.write(json.dumps(line) + "\n")


def plan_kills(count: int, in_saves: int, num_ranks: int, seed: int) -> list[Kill]:
    """``in_saves`` kills spread over the points of a save, the others at random moments, shuffled."""
    chance = random.Random(seed)
    kills = []
    for number in range(count):
        if number < in_saves:
            point = POINTS[number % len(POINTS)]
            by_any = point in ("before data", "mid file")
            rank = chance.randrange(num_ranks) if by_any else 0
            kills.append(Kill(point, save=chance.randint(2, 3), rank=rank))
        else:
            kills.append(Kill(seconds=chance.uniform(0.02, 1.5)))
    chance.shuffle(kills)
    return kills


@dataclass
class Outcome:
    kills: int = 0
    steps: int = 0
    """Steps taken by all lives together, those that had to be taken again included."""
    repeated: int = 0
    worst_loss: int = 0
    """Most steps that one kill cost."""


def run_kills(folder: Path, kills: list[Kill], num_ranks: int, say: Any = print) -> Outcome:
    """Live and die through all kills, then compare with an uninterrupted run."""
    outcome, root = Outcome(), folder / "lives" / "checkpoints"
    newest = 0
    for number, kill in enumerate(kills):
        before = _journal(folder / "lives")
        with contextlib.suppress(RankFailure):
            run_ranks(live, num_ranks, str(folder / "lives"), kill, 10**9, timeout=600, fresh=True)
            raise AssertionError(f"{kill}: the run was not killed")
        lines = _journal(folder / "lives")[len(before) :]
        assert not lines or lines[0].get("resumed") == newest, (
            f"{kill}: began at {lines[0]}, newest was {newest}"
        )
        found = entries(LocalStorage(root))
        for entry in found:
            open_verified(LocalStorage(root), entry.name, "full")
        reached = max([line["step"] for line in lines if "step" in line], default=newest)
        newest = found[0].step if found else 0
        outcome.kills += 1
        outcome.steps += sum("step" in line for line in lines)
        outcome.worst_loss = max(outcome.worst_loss, reached - newest)
        say(f"{number + 1:3d}. killed {kill!s:32s} at step {reached:4d}; newest whole one: {newest}")
    last = newest + INTERVAL + 1
    run_ranks(live, num_ranks, str(folder / "lives"), None, last, timeout=600, fresh=True)
    run_ranks(live, num_ranks, str(folder / "whole"), None, last, timeout=3600, fresh=True)
    _compare(_journal(folder / "lives"), _journal(folder / "whole"), last, outcome)
    return outcome


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


def _journal(folder: Path) -> list[dict[str, Any]]:
    path = folder / "journal.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--in-saves", type=int, default=30, help="how many of them inside a save")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills = plan_kills(options.kills, options.in_saves, options.ranks, options.seed)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fsdmoe-kills-") as folder:
        outcome = run_kills(Path(folder), kills, options.ranks)
    inside = sum(kill.point is not None for kill in kills)
    seconds = time.perf_counter() - began
    print(
        f"{outcome.kills} kills ({inside} inside a save) on {options.ranks} ranks in {seconds:.0f} s: every "
        f"life began at the newest whole checkpoint, all checkpoints verified, {outcome.steps} steps taken, "
        f"{outcome.repeated} of them again, at most {outcome.worst_loss} lost by one kill (interval "
        f"{INTERVAL}); every step read the documents and gave the loss of the uninterrupted run, bit for bit"
    )


if __name__ == "__main__":
    main()
