"""Elastic runs whose launchers are killed at random moments::

    python -m tests.support.elastic_kills --kills 20 --seed 1
    python -m tests.support.elastic_kills --kills 20 --seed 1 --in-memory

Two launchers of one rank each train a tiny model with ``mesh.ep = 2``. One of them is killed (SIGKILL) at a
random moment, and the other goes on alone, with ``ep = 1``. All losses are compared with those of one process
that was never interrupted. With ``--in-memory`` a whole node is lost: the launcher, its rank and what it had
in memory. The run has no checkpoint, and must go on from the copies that the other node has.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fsdmoe.checkpoint.config import RUN_FOLDER
from fsdmoe.checkpoint.node_memory import run_folder
from fsdmoe.core import events
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import NO_GPU
from tests.support.scripts import IMPORTS_ROOT, ROOT

TOML = """
[model]
preset = "tiny-qwen3"
vocab_size = 264
[precision]
param_dtype = "float32"
[data]
kind = "python-stdlib"
max_bytes = 100_000
seq_len = 32
[experts.balance]
micro_batch = 0.01
[optim]
lr = 1e-4
warmup_steps = 2
[observe]
tensorboard = false
progress = "off"
log_interval = 1
[checkpoint]
interval = 5
[mesh]
ep = 2
elastic = true
[train]
global_batch_size = 8
micro_batch_size = 2
eval_interval = -1
"""


def write_config(folder: Path, steps: int, name: str = "run", *, in_memory: bool = False) -> Path:
    """A configuration whose run is in the folder, under the same name."""
    path = folder / f"{name}.toml"
    text = TOML.replace("interval = 5", "interval = 0\nin_memory = 1") if in_memory else TOML
    path.write_text(f'{text}steps = {steps}\noutput_dir = "{folder / name}"\n')
    return path


def losses(run: Path) -> dict[int, float]:
    """Of the steps so far, by step."""
    if not (run / "metrics.jsonl").exists():
        return {}
    return {row["step"]: row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row}


def uninterrupted(folder: Path, steps: int) -> dict[int, float]:
    """The losses of one process."""
    config = write_config(folder, steps, "uninterrupted")
    done = subprocess.run(
        [sys.executable, "-m", "fsdmoe", "train", "--config", str(config), "--checkpoint.interval", "-1"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses(folder / "uninterrupted")


def environment(**others: str) -> dict[str, str]:
    """Of programs that are started here."""
    return os.environ | NO_GPU | IMPORTS_ROOT | {"OMP_NUM_THREADS": "1"} | others


def differences(found: dict[int, float], expected: dict[int, float]) -> float:
    """The largest of any step."""
    assert found.keys() == expected.keys(), (sorted(found), len(expected))
    return max(abs(found[step] - loss) for step, loss in expected.items())


class Recovery(NamedTuple):
    """Seconds from a kill to the next step."""

    total: float
    waits: float
    """Until a new rank is started: detection, heartbeats and the last call of the rendezvous."""
    start_cpu: float
    """CPU time of the new rank up to that step, which does not depend on how busy the machine is."""

    def __str__(self) -> str:
        parts = f"waits {self.waits:.1f} s, start {self.start_cpu:.1f} s of CPU"
        return f"next step {self.total:.1f} s later ({parts})"


def children(pid: int) -> set[int]:
    """The processes that a process has started, and that still run."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(word) for word in path.read_text().split()} if path.exists() else set()


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ElasticRun:
    """A store and launchers of one rank, which are processes of this one; all are ended on exit."""

    def __init__(self, config: Path) -> None:
        self.run = config.with_suffix("")
        self._config, self._log = config, config.with_suffix(".log")
        self._store = self._start("fsdmoe.launch.store", "--port", "0", stdout=subprocess.PIPE)
        assert self._store.stdout is not None
        self._port = self._store.stdout.readline().split()[-1].decode()
        self.launchers = [self.launch(), self.launch()]

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.launchers, self._store):
            process.terminate()
        for process in (*self.launchers, self._store):
            process.wait()

    def launch(self) -> subprocess.Popen[bytes]:
        """One more launcher."""
        meeting = (
            "--rdzv-endpoint",
            f"localhost:{self._port}",
            "--rdzv-id",
            "kills",
            "--rdzv-conf",
            "is_host=0",
        )
        given = ("--nnodes", "1:2", "--nproc-per-node", "1", *meeting, "--config", str(self._config))
        return self._start("fsdmoe", "train", *given)

    def _start(self, module: str, *words: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=ROOT, env=environment(), stdout=stdout or log, stderr=log,
            )  # fmt: skip

    @property
    def log(self) -> str:
        """What the launchers and ranks printed last."""
        return self._log.read_text()[-4000:]

    @property
    def last_step(self) -> int:
        return max(losses(self.run), default=0)

    @property
    def starts(self) -> list[str]:
        """How many ranks each start had."""
        text = self._log.read_text()
        return [line.partition(" x CPU")[0].split()[-1] for line in text.splitlines() if " x CPU" in line]

    def wait_for(self, what: str, is_true: object, seconds: float = 120.0) -> None:
        """Poll, also for a launcher that has ended before its time."""
        deadline = time.monotonic() + seconds
        while not is_true():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.log}"
            time.sleep(0.05)

    def lose_node(self, victim: int) -> Recovery:
        """Kill a launcher and its ranks with SIGKILL, all at once, and remove what its node had in memory;
        how the other one goes on."""
        launcher = self.launchers[victim].pid
        ranks = children(launcher)
        for pid in ranks:  # else they might do something between the two
            os.kill(pid, signal.SIGSTOP)
        memory = list(run_folder(str(self.run / RUN_FOLDER)).glob(f"*/node-{launcher}"))
        for place in memory:
            shutil.rmtree(place)
        return self.kill(victim, ranks)

    @property
    def resumed_at(self) -> int:
        """The step that the last start went on from."""
        starts = [row for row in events.read(self.run) if row["event"] in ("start", "restart")]
        return int(starts[-1]["step"])

    def kill(self, victim: int, ranks: Iterable[int] = ()) -> Recovery:
        """Kill a launcher with SIGKILL, and ``ranks``; how the other one goes on."""
        number = len(self.starts)
        survivor = self.launchers[1 - victim]
        before = children(survivor.pid)
        self.launchers[victim].send_signal(signal.SIGKILL)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        self.launchers.pop(victim).wait()
        self.wait_for("a new rank", lambda: children(survivor.pid) - before)
        (rank,) = children(survivor.pid) - before
        waited = time.monotonic() - began
        self.wait_for("a restart", lambda: len(self.starts) > number)
        resumed = self.last_step
        self.wait_for("a step", lambda: self.last_step > resumed)
        return Recovery(time.monotonic() - began, waited, cpu_seconds(rank))


class Killed(NamedTuple):
    """A run one of whose launchers was killed."""

    victim: int
    step: int
    """The last one that was finished."""
    resumed: int
    """The one that the run went on from."""
    recovery: Recovery

    def __str__(self) -> str:
        moment = f"launcher {self.victim}, after step {self.step}, resumed at step {self.resumed}"
        return f"{moment}; {self.recovery}"


def kill_once(config: Path, chance: random.Random, last: int, *, in_memory: bool = False) -> Killed:
    """A run one of whose launchers is killed, or with ``in_memory`` a whole node."""
    target, later, victim = chance.randint(0, last), chance.random(), chance.randrange(2)
    with ElasticRun(config) as run:
        run.wait_for("two ranks", lambda: run.starts[-1:] == ["2"])
        run.wait_for(f"step {target}", lambda: run.last_step >= target)
        time.sleep(later)
        step = run.last_step
        recovery = run.lose_node(victim) if in_memory else run.kill(victim)
        resumed = run.resumed_at
        assert run.launchers[0].wait(300) == 0, run.log
        assert run.starts[-1] == "1", run.log
        assert not list(run_folder(str(run.run / RUN_FOLDER)).glob("*")), "left in memory"
    return Killed(victim, step, resumed, recovery)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=25, help="of a run")
    options.add_argument("--in-memory", action="store_true", help="lose nodes of runs with copies in memory")
    given = options.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = uninterrupted(folder, given.steps)
        for number in range(1, given.kills + 1):
            config = write_config(folder, given.steps, f"run{number}", in_memory=given.in_memory)
            killed = kill_once(config, chance, given.steps - 10, in_memory=given.in_memory)
            apart = differences(losses(config.with_suffix("")), expected)
            print(f"kill {number}: {killed}; losses {apart:.1e} apart", flush=True)
            assert apart < 1e-5
            assert not given.in_memory or killed.resumed >= killed.step - 1, "a finished step was lost"
    return 0


if __name__ == "__main__":
    sys.exit(main())
