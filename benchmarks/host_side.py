"""What looking after a run costs a step, and what binding and fixed garbage collection do to its spread.

::

    python benchmarks/host_side.py                        on a GPU; --tiny shows on a CPU that it works

A MoE of 8 layers and width 1,536, 32,768 tokens a step. One run takes its steps in turns, so that a card
that throttles does so in all of them:

=========  =================================================================================================
turn       what is on
=========  =================================================================================================
plain      nothing: Python collects garbage when it likes, the rank runs on any core
watched    step times and checksums every 100 steps, hang watch and spikes in each, and a row to
           metrics.jsonl, TensorBoard and Prometheus every 10 steps
fixed      garbage collection every 20 steps, and nothing else
bound      the same, bound to the cores next to the GPU
=========  =================================================================================================
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch

from fsdmoe.config import Config, build_config
from fsdmoe.health.config import HealthConfig
from fsdmoe.health.duties import GarbageDuty, Health
from fsdmoe.health.host import bind_cores
from fsdmoe.mesh import build_meshes
from fsdmoe.train import Run

TURNS = ("plain", "watched", "fixed", "bound")
WATCHED = HealthConfig(step_times=100, hang_seconds=3600.0, checksums=100, on_spike="rollback")
GC_INTERVAL = 20
LARGE = {
    "hidden_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768,
}  # fmt: skip
"""Large enough that the GPU is the limit and not the host, as in the runs that are looked after."""


def config_of(folder: str, *, is_tiny: bool) -> Config:
    problems: list[str] = []
    size = {"preset": "tiny-qwen3"} if is_tiny else {"preset": "quickstart"} | LARGE
    settings = {
        "model": size | {"vocab_size": 264},
        "data": {"kind": "python-stdlib", "max_bytes": 2_000_000, "seq_len": 32 if is_tiny else 2048},
        "observe": {"progress": "off", "prometheus": "127.0.0.1:0"},
        "checkpoint": {"interval": -1, "load": "none"},
        "train": {"steps": 1_000_000, "global_batch_size": 16, "micro_batch_size": 16, "eval_interval": -1,
                  "output_dir": folder},
    }  # fmt: skip
    config = build_config(settings, {}, 1, problems)
    assert config is not None, problems
    return config


@contextmanager
def turn_of(name: str, run: Run, health: Health) -> Iterator[None]:
    """What is on in a turn, and off after it; intervals go on in the next turn of the same name."""
    duties = list(run.duties)
    cores = os.sched_getaffinity(0)
    garbage: GarbageDuty | None = None
    if name == "watched":
        run.duties = duties + health.duties
    if name in ("fixed", "bound"):
        garbage = GarbageDuty(GC_INTERVAL)
        run.duties = [*duties, garbage]
    if name == "bound":
        bind_cores(run.meshes.device)
    try:
        yield
    finally:
        run.duties = duties
        if garbage is not None:
            garbage.close()
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
        gc.collect()


def step_seconds(run: Run, name: str, count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        record = run.train_step()
        if name == "watched":
            run.observer.log_step(record)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    times: dict[str, list[list[float]]] = {name: [] for name in TURNS}
    # rows go to the terminal alone, as in a run; the table is all that is printed
    with tempfile.TemporaryDirectory(prefix="fsdmoe-host-") as temporary, redirect_stdout(sys.stderr):
        config = config_of(temporary, is_tiny=options.tiny)
        run = Run(config, build_meshes(config.mesh))
        folder = Path(temporary)
        health = Health(WATCHED, run.model, run.meshes, folder=folder, tell=lambda text: None)
        step_seconds(run, "plain", 10)
        for number in range(options.turns):
            order = TURNS[number % len(TURNS) :] + TURNS[: number % len(TURNS)]
            for name in order:
                with turn_of(name, run, health):
                    step_seconds(run, name, 2)
                    times[name].append(step_seconds(run, name, options.steps))
        health.close()
        run.close("finished")
    print("\n".join(table(times)))


def table(times: dict[str, list[list[float]]]) -> list[str]:
    """By turn: mean and median step, p99 over median, and the ratio to the plain turn next to it: of medians
    with its spread, and of means, which hold what is done in few steps."""
    lines = ["| turn | mean ms | median ms | p99 / median | ratio to plain, medians | from, to | means |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    plain = [statistics.median(turn) for turn in times["plain"]]
    plain_mean = [statistics.mean(turn) for turn in times["plain"]]
    for name, turns in times.items():
        every = sorted(seconds for turn in turns for seconds in turn)
        middle = statistics.median(every)
        p99 = every[min(len(every) - 1, round(0.99 * len(every)))]
        ratios = [statistics.median(turn) / base for turn, base in zip(turns, plain, strict=True)]
        of_means = [statistics.mean(turn) / base for turn, base in zip(turns, plain_mean, strict=True)]
        lines.append(
            f"| {name} | {statistics.mean(every) * 1e3:.2f} | {middle * 1e3:.2f} | {p99 / middle:.3f} "
            f"| {statistics.median(ratios):.4f} | {min(ratios):.3f}, {max(ratios):.3f} "
            f"| {statistics.median(of_means):.4f} |"
        )
    return lines


if __name__ == "__main__":
    main()
