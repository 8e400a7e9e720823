"""Goodput of a run on many GPUs, simulated with measured times: how much of the time makes progress.

::

    python -m benchmarks.goodput                     measures a restart on this machine, then simulates
    python -m benchmarks.goodput --no-measure --restart 20 --first-step 40          with times of your own

Failures come at random (a Poisson process) at a rate in proportion to the number of GPUs: that of Llama 3's
training, 419 unexpected interruptions of 16,384 GPUs in 54 days. Each costs the time to detect it, to start
again, to load and to make the first step, and the steps since the last state that is left: a checkpoint on
disk, or the copy in a neighbour's memory, which has every step but the one that was going on. A share of
failures takes the neighbour as well; these go back to the disk.

Detection, restart and first step are measured: a run of two ranks loses one by SIGKILL and is started again.
A copy of the state to host memory and a load go at the rates of docs/results/checkpoint.md (one H200).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdmoe.core import events
from fsdmoe.run.lock import LOCK

ROOT = Path(__file__).parent.parent
HOUR = 3600.0
GPUS_OF_RATE = 16_384
BYTES_A_PARAMETER = 12
RUN = {
    "config": "configs/quickstart.toml", "train.steps": 100_000, "checkpoint.interval": 2,
    "observe.tensorboard": "false", "model.preset": "tiny-qwen3", "model.vocab_size": 264,
    "data.max_bytes": 200_000, "data.seq_len": 32, "train.global_batch_size": 4, "train.micro_batch_size": 2,
    "train.eval_interval": -1,
}  # fmt: skip
"""The small run that is measured."""


@dataclass(frozen=True)
class Times:
    """Seconds where nothing else is said."""

    params: float = 671e9
    """Parameters of the model."""
    step: float = 10.0
    interval: float = 600.0
    """Between two saves to disk."""
    detect: float = 5.0
    """From a failure to the end of all ranks."""
    restart: float = 25.0
    """Until the ranks have met again, the model is built and its state loaded, in a small run."""
    first_step: float = 15.0
    """Until the first step is done."""
    host_rate: float = 51.0
    """GB/s of one GPU's state to host memory (measured: 18.4 GB in 0.36 s)."""
    load_rate: float = 4.3
    """GB/s of one rank's load from a file system (measured, memory of the host)."""
    disk_rate: float = 500.0
    """GB/s that the shared file system gives all ranks together (not measured)."""
    peer_rate: float = 10.0
    """GB/s of one rank's state from a neighbour's memory (not measured: a tenth of a fast network)."""
    hours_between: float = 54 * 24 / 419
    """Mean time between failures of 16,384 GPUs."""
    pairs_lost: float = 0.01
    """Share of failures that take a rank and the neighbour with its copy."""

    def bytes_of(self, num_gpus: int) -> float:
        """GB of one GPU's state."""
        return self.params * BYTES_A_PARAMETER / num_gpus / 1e9

    def copy(self, num_gpus: int) -> float:
        """That training waits for a copy of the state to host memory."""
        return self.bytes_of(num_gpus) / self.host_rate

    def load(self, num_gpus: int) -> float:
        """A checkpoint from disk."""
        whole = self.params * BYTES_A_PARAMETER / 1e9
        return max(self.bytes_of(num_gpus) / self.load_rate, whole / self.disk_rate)


@dataclass(frozen=True)
class Result:
    goodput: float
    failures: int
    lost_seconds: float
    """Steps that were taken again, a failure."""


def simulate(times: Times, num_gpus: int, *, in_memory: bool, hours: float = 1000.0, seed: int = 0) -> Result:
    """One run of ``hours``."""
    chance = random.Random(seed)
    rate = num_gpus / GPUS_OF_RATE / (times.hours_between * HOUR)
    copy = times.copy(num_gpus)
    share = times.interval / (times.interval + copy)  # of training that is progress
    if in_memory:
        share *= times.step / (times.step + copy)
    end = hours * HOUR
    now = progress = lost = 0.0
    failures = 0
    while True:
        until = min(chance.expovariate(rate), end - now)
        now += until
        progress += until * share
        if now >= end:
            break
        failures += 1
        is_on_disk = not in_memory or chance.random() < times.pairs_lost
        behind = progress % times.interval if is_on_disk else min(progress, chance.uniform(0, times.step))
        progress -= behind
        lost += behind
        load = times.load(num_gpus) if is_on_disk else times.bytes_of(num_gpus) / times.peer_rate
        now += times.detect + times.restart + load + times.first_step
    return Result(progress / now, failures, lost / failures if failures else 0.0)


def mean_result(times: Times, num_gpus: int, *, in_memory: bool, runs: int = 20) -> Result:
    """Over runs of different chance."""
    found = [simulate(times, num_gpus, in_memory=in_memory, seed=seed) for seed in range(runs)]
    return Result(
        sum(each.goodput for each in found) / runs,
        sum(each.failures for each in found) // runs,
        sum(each.lost_seconds for each in found) / runs,
    )


def measured() -> dict[str, float]:
    """Seconds of detection, restart and first step of a small run here, whose second rank is killed."""
    with tempfile.TemporaryDirectory(prefix="fsdmoe-goodput-") as temporary:
        folder = Path(temporary) / "run"
        first = _start(folder)
        _wait_for(folder, "save", first)
        killed = time.time()
        os.kill(json.loads((folder / LOCK).read_text())["pid"], signal.SIGKILL)
        first.wait()
        ended = time.time()
        second = _start(folder)
        restarted = _wait_for(folder, "restart", second)
        ready = _wait_for(folder, "ready", second, number=2)
        second.send_signal(signal.SIGTERM)
        second.wait()
    return {"detect": ended - killed, "restart": restarted - ended, "first_step": ready - restarted}


def _start(folder: Path) -> subprocess.Popen[Any]:
    options = [word for name, value in RUN.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "fsdmoe", "train", "--nproc-per-node", "2", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [*command, "--train.output_dir", str(folder)], cwd=ROOT, env=environment, stdout=quiet, stderr=quiet
    )


def _wait_for(folder: Path, event: str, process: subprocess.Popen[Any], number: int = 1) -> float:
    """When the ``number``-th such event happened."""
    while True:
        found = [row["time"] for row in events.read(folder) if row["event"] == event]
        if len(found) >= number:
            return found[number - 1]
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode} before its {event}")
        time.sleep(0.05)


def table(times: Times, sizes: Sequence[int]) -> list[str]:
    """Goodput by size, in Markdown."""
    titles = ("GPUs", "failures a day", "checkpoints on disk", "steps lost a failure", "copies in memory")
    lines = [f"| {' | '.join(titles)} |", "| --- | --- | --- | --- | --- |"]
    for size in sizes:
        disk, memory = (mean_result(times, size, in_memory=is_in) for is_in in (False, True))
        daily = size / GPUS_OF_RATE / times.hours_between * 24
        steps = disk.lost_seconds / times.step
        lines.append(f"| {size:,} | {daily:.1f} | {disk.goodput:.3f} | {steps:.0f} | {memory.goodput:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--no-measure", action="store_true", help="take all times from options")
    for name, value in vars(Times()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    options = vars(parser.parse_args())
    given = {name: options[name] for name in vars(Times())}
    times = Times(**given | ({} if options["no_measure"] else measured()))
    print(", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in vars(times).items()))
    print()
    print("\n".join(table(times, options["sizes"])))


if __name__ == "__main__":
    main()
