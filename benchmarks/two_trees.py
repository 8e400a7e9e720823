"""This tree against another one (a commit before, unpacked beside it), in one run on one GPU.

Each tree's own benchmarks build the work: a process a tree, and a second one of the other tree, which shows
how far a tree is from itself. The processes stay up and take turns, in an order that is turned round every
round; nothing else runs meanwhile. Where the host's time counts they share one core, since cores differ more
than trees do. Printed are medians over the rounds, and the median of the rounds' own ratios; of the
lowest times too, since other programs only add to a time. The work:

    layer    moe_layer.py, first shape: forward and backward of one MoE layer
    step     train_step.py with 5 layers (three processes have to fit): a whole step
    ep8      fsdp_step.py at ep 8, 2 x 4096 tokens: a whole step of one rank of an emulated world
    host     the same on a model bound by the host: microseconds a unit, forward and backward

    git archive COMMIT | tar x --one-top-level=/tmp/before
    python benchmarks/two_trees.py /tmp/before
    python benchmarks/two_trees.py /tmp/before --tiny --works step host      on a CPU, to see that it works
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

THIS = Path(__file__).resolve().parent.parent
WORKS = ("layer", "step", "ep8", "host")

Run = Callable[[], float]
"""Runs for a while and tells milliseconds a call."""


class Process:
    """One tree's process: builds its work, then runs it whenever it is asked to."""

    def __init__(self, tree: Path, work: str, tiny: bool) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--serve", work]
        command += ["--tiny"] if tiny else []
        # the tree's own package and benchmarks, not those beside this file
        path = [str(tree), str(tree / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTHONSAFEPATH": "1",
            "PYTHONHASHSEED": "0",
        }
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> dict[str, float]:
        """The next line that is an answer; whatever the work prints itself is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise SystemExit(f"a process ended with {self._process.wait()}; its errors stand above")

    def run(self) -> float:
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        return self.hear()["ms"]

    def end(self) -> dict[str, float]:
        """What it took of the device."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = self.hear()
        self._process.wait()
        return found


def serve(work: str, tiny: bool) -> None:
    """The life of a process: one answer when it is ready, one a line read, one at the end."""
    import torch

    if work == "host":
        torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    run = {"layer": layer_run, "step": step_run, "ep8": ep8_run, "host": host_run}[work](tiny)
    run()
    if work == "host":  # only now: building it is faster on all cores
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(json.dumps({"ready": 1}), flush=True)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in sys.stdin:
        print(json.dumps({"ms": run()}), flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(json.dumps({"peak_gib": peak}), flush=True)


def layer_run(tiny: bool) -> Run:
    apart = importlib.util.find_spec("moe_layer_contenders") is not None
    source: Any = importlib.import_module("moe_layer_contenders" if apart else "moe_layer")
    import moe_layer
    from timing import gpu_milliseconds

    data = source.Data(source.SHAPES[0], False)
    layer = source.FsdmoeLayer(data)
    return lambda: gpu_milliseconds(lambda: moe_layer.step(layer, data), 60)


def step_run(tiny: bool) -> Run:
    import train_step

    given = argparse.Namespace(tiny=tiny, dtype=None, layers=5, batch=4, length=4096)
    problem = train_step.problem_of(given)
    step, feed = train_step.build("fsdmoe", problem), train_step.Feed(problem)
    return lambda: statistics.median(train_step.timed(step, feed, 1.5)) * 1e3


def ep8_run(tiny: bool) -> Run:
    import dataclasses

    import fsdp_step

    shape = fsdp_step.TINY if tiny else dataclasses.replace(fsdp_step.Shape(), num_layers=8, batch=2)
    contender = _emulated(shape)
    return lambda: fsdp_step.time_steps(contender, 5)[1]


def host_run(tiny: bool) -> Run:
    """Microseconds, in spite of the name: of the host, a unit, forward and backward."""
    import fsdp_step

    shape = fsdp_step.TINY if tiny else fsdp_step.HOST
    contender = _emulated(shape)
    return lambda: fsdp_step.time_steps(contender, 10)[0] * 1e3 / (shape.num_layers + 2)


def _emulated(shape: Any) -> Any:
    import fsdp_step
    from fsdp_world import emulated_meshes, emulated_world

    world = emulated_world(fsdp_step.WORLD)
    world.__enter__()
    meshes = emulated_meshes(fsdp_step.WORLD, 8, fsdp_step.DEVICE.type)
    settings = argparse.Namespace(reduce_dtype="float32", recompute=False)
    contender: Any = fsdp_step.build_fsdmoe(shape, 8, meshes, settings)
    contender.world = world  # which ends once nobody holds it
    return contender


def compare(before: Path, work: str, rounds: int, tiny: bool) -> dict[str, Any]:
    trees = {"before": before, "before again": before, "this": THIS}
    processes = {name: Process(tree, work, tiny) for name, tree in trees.items()}
    for process in processes.values():
        process.hear()
    times: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(rounds + 1):
        for name in list(trees) if turn % 2 else list(reversed(trees)):
            time = processes[name].run()
            if turn:  # the first round warms up
                times[name].append(time)
    peaks = {name: process.end()["peak_gib"] for name, process in processes.items()}
    medians = {name: statistics.median(found) for name, found in times.items()}
    rounds_of = list(zip(times["before"], times["before again"], times["this"], strict=True))
    spread = abs(statistics.median(again / once for once, again, _ in rounds_of) - 1)
    ratio = statistics.median(2 * this / (once + again) for once, again, this in rounds_of)
    print(f"{work:6}" + "".join(f"  {name} {value:9.3f}" for name, value in medians.items()), end="")
    lowest = min(times["this"]) / min(times["before"] + times["before again"])
    print(f"   this / before {ratio:.4f} (lowest {lowest:.4f}), before apart from itself {spread:.4f}; "
          f"peak GiB {peaks['before']:.2f} -> {peaks['this']:.2f}", flush=True)  # fmt: skip
    return {
        "times": times,
        "medians": medians,
        "ratio": ratio,
        "lowest": lowest,
        "spread": spread,
        "peaks": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the folder of the other tree")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=WORKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.tiny)
        return
    before = args.before.resolve()
    found = {work: compare(before, work, args.rounds, args.tiny) for work in args.works}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
