"""This tree against another one (a commit before, unpacked next to it), in one run on one GPU.

Each tree's own benchmarks build the work: a process a tree, and a second one of the other tree, which shows
how far a tree is from itself. The processes stay up and take turns, in an order that is turned round every
round; nothing else runs meanwhile. Where the host's time counts they share one core, since cores differ more
than trees do. Printed are medians over the rounds, and the median of the rounds' own ratios; of the
lowest times too, since other programs only add to a time. The work:

    layer    moe_layer.py, first shape (--shape): forward and backward of one MoE layer
    step     train_step.py with 5 layers (three processes have to fit): a whole step
    step32   the same with main weights and gradients in fp32
    ep8      fsdp_step.py at ep 8, 2 x 4096 tokens: a whole step of one rank of an emulated world
    host     the same on a model bound by the host: microseconds a unit, forward and backward
    emulated emulated_run.py with 16 layers of Qwen3-30B-A3B in 3 chunks: a whole step of one rank of a node

Layers and whole steps are launched from Python and, on a GPU, replayed as CUDA graphs too.

    git archive COMMIT | tar x --one-top-level=/tmp/before
    python benchmarks/two_trees.py /tmp/before
    python benchmarks/two_trees.py /tmp/before --works step32 --layers 3 --pair     without the second process
    python benchmarks/two_trees.py /tmp/before --tiny --works step host      on a CPU, to see that it works
"""

from __future__ import annotations

import argparse
import functools
import gc
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
WORKS = ("layer", "step", "step32", "ep8", "host", "emulated")

Run = Callable[[], float]
"""Runs for a while and tells milliseconds a call."""


class Process:
    """One tree's process: builds its work, then runs it whenever it is asked to."""

    def __init__(self, tree: Path, work: str, args: argparse.Namespace) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--serve", work]
        command += [f"--{name}={getattr(args, name)}" for name in ("layers", "shape", "seconds")]
        command += ["--tiny"] if args.tiny else []
        # the tree's own package and benchmarks, not those beside this file
        path = [str(tree), str(tree / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTHONSAFEPATH": "1",
            "PYTHONHASHSEED": "0",
        }
        self.peak_gib = 0.0
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> dict[str, Any]:
        """The next line that is an answer; whatever the work prints itself is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"a process ended with {self._process.wait()}; its errors stand above")

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def run(self) -> float:
        self.say("go")
        answer = self.hear()
        self.peak_gib = float(answer.get("peak_gib", 0.0))
        return float(answer["ms"])

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(work: str, args: argparse.Namespace) -> None:
    """The life of a process: one answer a line read. The name of a run builds it, in place of the one
    before; then it runs whenever it is asked to."""
    import torch

    if work == "host":
        torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    run: Run | None = None
    for line in sys.stdin:
        if (word := line.strip()) != "go":
            run = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            run = _WORKS[work][word](args)
            run()
            if work == "host":  # only now: building it is faster on all cores
                os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            print(json.dumps({"built": word}), flush=True)
            continue
        assert run is not None
        answer = {"ms": run()}
        if torch.cuda.is_available():
            answer["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps(answer), flush=True)


def layer_run(args: argparse.Namespace, graphs: bool = False) -> Run:
    apart = importlib.util.find_spec("moe_layer_contenders") is not None
    source: Any = importlib.import_module("moe_layer_contenders" if apart else "moe_layer")
    import moe_layer
    from timing import gpu_milliseconds

    data = source.Data(source.SHAPES[args.shape], False)
    layer = source.FsdmoeLayer(data)
    step: Any = moe_layer.captured(layer, data) if graphs else lambda: moe_layer.step(layer, data)
    return lambda: gpu_milliseconds(step, 60)


def step_run(args: argparse.Namespace, graphs: bool = False, contender: str = "fsdmoe") -> Run:
    import train_step

    size = {"layers": args.layers, "batch": 4, "length": 4096}
    given = argparse.Namespace(tiny=args.tiny, dtype=None, graphs=graphs, world=0, **size)
    problem = train_step.problem_of(given)
    step, feed = train_step.build(contender, problem), train_step.Feed(problem)
    for _ in range(4):  # the fourth is captured
        step(*feed())
    return lambda: statistics.median(train_step.timed(step, feed, args.seconds)) * 1e3


def ep8_run(args: argparse.Namespace) -> Run:
    import dataclasses

    import fsdp_step

    shape = fsdp_step.TINY if args.tiny else dataclasses.replace(fsdp_step.Shape(), num_layers=8, batch=2)
    contender = _emulated(shape)
    return lambda: fsdp_step.time_steps(contender, 5)[1]


def host_run(args: argparse.Namespace) -> Run:
    """Microseconds, in spite of the name: of the host, a unit, forward and backward."""
    import fsdp_step

    shape = fsdp_step.TINY if args.tiny else fsdp_step.HOST
    contender = _emulated(shape)
    return lambda: fsdp_step.time_steps(contender, 10)[0] * 1e3 / (shape.num_layers + 2)


def emulated_run(args: argparse.Namespace) -> Run:
    """As ``emulated_run.py`` runs it; two processes of 48 layers would not fit."""
    sys.argv = ["emulated_run.py", "--fabric", "node", "--chunks", "3", "--layers", "16"]
    sys.argv += ["--tiny"] if args.tiny else []
    import emulated_run
    from fabric_group import emulated_fabric

    given = emulated_run.parse()
    fabric = emulated_run.FABRICS_BY_NAME["node"]
    case = emulated_run.Case(fabric, (("chunks", 3),))
    config = emulated_run.config_of(given, case, fabric.world)
    context = emulated_fabric(fabric, fabric.world)
    step: Any = emulated_run.Step(config, context.__enter__())
    if hasattr(step, "route"):
        step.route(case, given.even_passes, [])
    else:  # an older tree
        step.even_out(given.even_passes, [])
    for _ in range(given.warm_up):
        step()

    def run() -> float:
        assert context  # which ends once nobody holds it
        return statistics.median(emulated_run._timed(step) for _ in range(given.steps))

    return run


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


_wide_step = functools.partial(step_run, contender="fsdmoe, fp32 main")
_WORKS: dict[str, dict[str, Callable[[argparse.Namespace], Run]]] = {
    "layer": {"layer": layer_run, "layer graph": functools.partial(layer_run, graphs=True)},
    "step": {"step": step_run, "step graph": functools.partial(step_run, graphs=True)},
    "step32": {"step32": _wide_step, "step32 graph": functools.partial(_wide_step, graphs=True)},
    "ep8": {"ep8": ep8_run},
    "host": {"host": host_run},
    "emulated": {"emulated": emulated_run},
}


def compare(before: Path, work: str, args: argparse.Namespace) -> dict[str, Any]:
    """By the name of a run: its times in every process, and what follows from them."""
    trees = {"before": before} | ({} if args.pair else {"before again": before}) | {"this": THIS}
    processes = {name: Process(tree, work, args) for name, tree in trees.items()}
    found = {}
    for run in _WORKS[work]:
        if not (args.tiny and run.endswith(" graph")):
            found[run] = take_turns(run, processes, args.rounds)
    for process in processes.values():
        process.end()
    return found


def take_turns(run: str, processes: dict[str, Process], rounds: int) -> dict[str, Any]:
    for process in processes.values():
        process.say(run)
    for process in processes.values():
        process.hear()
    times: dict[str, list[float]] = {name: [] for name in processes}
    for turn in range(rounds + 1):
        for name in list(processes) if turn % 2 else list(reversed(processes)):
            time = processes[name].run()
            if turn:  # the first round warms up
                times[name].append(time)
    peaks = {name: process.peak_gib for name, process in processes.items()}
    return summarise(run, times, peaks)


def summarise(run: str, times: dict[str, list[float]], peaks: dict[str, float]) -> dict[str, Any]:
    medians = {name: statistics.median(found) for name, found in times.items()}
    again = times.get("before again", times["before"])
    rounds = list(zip(times["before"], again, times["this"], strict=True))
    spread = abs(statistics.median(second / once for once, second, _ in rounds) - 1)
    ratio = statistics.median(2 * this / (once + second) for once, second, this in rounds)
    lowest = min(times["this"]) / min(times["before"] + again)
    print(f"{run:12}" + "".join(f"  {name} {value:9.3f}" for name, value in medians.items()), end="")
    apart = f", before apart from itself {spread:.4f}" if "before again" in times else ""
    print(f"   this / before {ratio:.4f} (lowest {lowest:.4f}){apart}", end="")
    print(f"; peak GiB {peaks['before']:.2f} -> {peaks['this']:.2f}", flush=True)
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
    parser.add_argument("--layers", type=int, default=5, help="of a whole step")
    parser.add_argument("--shape", type=int, default=0, help="of the layer, by its index in moe_layer.py")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long steps run each time")
    parser.add_argument("--pair", action="store_true", help="one process of the other tree, not two")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=WORKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args)
        return
    before = args.before.resolve()
    found = {work: compare(before, work, args) for work in args.works}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
