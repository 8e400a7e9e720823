"""A whole training step on one GPU beside its peers: Qwen3-30B-A3B shapes, 8 layers, 4 x 4096 tokens, AdamW.

Weights, gradients and moments are bf16 for everybody (see ``train_step_contenders``). Each contender runs in
a process of its own, so that memory is its own and a failure costs one row; processes take turns, and the
order is turned round every round. A process warms up until the card's clock has settled, then steps for
``--seconds``; a contender's figure is the median over its rounds. All must give the same losses in their
first three steps: the same weights, gradients and updates, within the dtype's noise. A peer that can be run
in several ways takes part in each, and ratios refer to the fastest.

    python benchmarks/train_step.py --json step.json                  about 7 minutes on one H200
    python benchmarks/train_step.py --contenders fsdmoe --profile     where fsdmoe's time goes
    python benchmarks/train_step.py --contenders fsdmoe 'fsdmoe wrapped' --rounds 1 --seconds 3
                                                                      a wrapped model beside our own decoder
    python benchmarks/train_step.py --contenders 'fsdmoe, fp32 main' 'fsdmoe fp8, fp32 main' --together
                                                                      in one process: seconds each
    python benchmarks/train_step.py --tiny                            on a CPU in fp32, to see that it works

Peers take part where they are installed; naming one that is not is an error. torchtitan 0.2.2 wants an older
huggingface_hub than transformers: install it without its dependencies, or in an environment of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from fsdp_world import emulated_world
from timing import require_gpu, wait
from train_step_contenders import NAMES, Problem, Step, build, choose

from fsdmoe.models import preset_config, training_flops_per_token

DEFAULT = NAMES[:6]
CHECKED_STEPS = 3
MAX_SPREAD = {"float32": 2e-5, "bfloat16": 1e-2}
"""How far losses may differ, relatively."""
MIN_SPEED, MAX_MEMORY = 1.2, 0.8
MIN_WRAPPED_SPEED, MAX_WRAPPED_MEMORY = 0.95, 1.05
PROFILED_STEPS = 5
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def problem_of(args: argparse.Namespace) -> Problem:
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    if args.tiny:
        config = preset_config("tiny-qwen3")
        return Problem(config, 2, 16, args.dtype or "float32", device, backend="eager", world=args.world)
    config = preset_config("qwen3-30b-a3b", num_hidden_layers=args.layers)
    dtype = args.dtype or "bfloat16"
    return Problem(
        config, args.batch, args.length, dtype, device, "inductor", graphs=args.graphs, world=args.world
    )


@dataclass
class Outcome:
    """What one process found."""

    contender: str
    losses: list[float] = field(default_factory=list)
    ms: float = 0.0
    num_steps: int = 0
    peak_gib: float = 0.0
    reserved_gib: float = 0.0
    setup_s: float = 0.0
    error: str = ""


class Feed:
    """Random tokens, new ones every step, the same for everybody."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.generator = problem, torch.Generator().manual_seed(1)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.problem
        stream = torch.randint(0, p.config.vocab_size, (p.batch, p.length + 1), generator=self.generator)
        stream = stream.to(p.device)
        return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def timed(step: Step, feed: Feed, seconds: float) -> list[float]:
    """Seconds of each step, waited for one by one, until ``seconds`` have passed; at least two."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        batch = feed()
        wait(feed.problem.device)
        began = time.perf_counter()
        step(*batch)
        wait(feed.problem.device)
        times.append(time.perf_counter() - began)
    return times


def run_worker(args: argparse.Namespace) -> None:
    """One contender in this process; what it found goes to ``--worker-out``."""
    outcome = run_here(args.worker, args)
    Path(args.worker_out).write_text(json.dumps(asdict(outcome)))


def run_here(name: str, args: argparse.Namespace) -> Outcome:
    with emulated_world(args.world) if args.world else contextlib.nullcontext():
        return _run_here(name, args)


def _run_here(name: str, args: argparse.Namespace) -> Outcome:
    problem, began = problem_of(args), time.perf_counter()
    step, feed = build(name, problem), Feed(problem)
    outcome = Outcome(name)
    outcome.losses = [step(*feed()).item() for _ in range(CHECKED_STEPS)]
    outcome.setup_s = time.perf_counter() - began
    timed(step, feed, args.seconds / 2)
    if problem.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = timed(step, feed, args.seconds)
    outcome.ms, outcome.num_steps = statistics.median(times) * 1e3, len(times)
    if problem.device.type == "cuda":
        outcome.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        outcome.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
    if args.profile:
        profile(step, feed)
    return outcome


def profile(step: Step, feed: Feed) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = feed.problem.device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    batch = feed()
    with torch.profiler.profile(activities=activities) as profiler:
        step(*batch)
        wait(feed.problem.device)
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=45, max_name_column_width=70))
    kernels = [e for e in profiler.key_averages() if e.device_type != torch.autograd.DeviceType.CPU]
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total)[:30]:
        print(f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:5} x  {event.key[:110]}")
    busy, launches = sum(e.self_device_time_total for e in kernels) / 1e3, sum(e.count for e in kernels)
    host, whole = host_milliseconds(step, feed)
    print(f"a step {whole:.1f} ms; the host is done after {host:.1f} ms; "
          f"device busy {busy:.1f} ms in {launches} kernels")  # fmt: skip


def host_milliseconds(step: Step, feed: Feed) -> tuple[float, float]:
    """Until a step has been enqueued (any wait inside of it included), and until it is done; medians."""
    enqueued, done = [], []
    for _ in range(PROFILED_STEPS):
        batch = feed()
        wait(feed.problem.device)
        began = time.perf_counter()
        step(*batch)
        enqueued.append(time.perf_counter() - began)
        wait(feed.problem.device)
        done.append(time.perf_counter() - began)
    return statistics.median(enqueued) * 1e3, statistics.median(done) * 1e3


def run_together(name: str, args: argparse.Namespace) -> Outcome:
    """In this process, which gives all memory back before the next."""
    try:
        return run_here(name, args)
    except Exception as problem:  # a row of the result, as where it has a process of its own
        return Outcome(name, error=f"{type(problem).__name__}: {problem}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB of every stream that something was captured on
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def run_alone(name: str, args: argparse.Namespace) -> Outcome:
    """A process of its own; whatever goes wrong in it is one row of the result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcome.json"
        command = [sys.executable, __file__, "--worker", name, "--worker-out", str(out)]
        command += ["--seconds", str(args.seconds), "--layers", str(args.layers), "--batch", str(args.batch)]
        command += [
            "--length",
            str(args.length),
            "--world",
            str(args.world),
            *(["--dtype", args.dtype] if args.dtype else []),
        ]
        command += [f"--{flag}" for flag in ("tiny", "profile", "graphs") if getattr(args, flag)]
        environment = os.environ | ALLOCATOR
        try:
            process = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=args.limit
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, error=f"took longer than {args.limit:.0f} s")
        if args.profile:
            print(process.stdout)
        if not out.exists():
            lines = (process.stderr.strip() or "no output").splitlines()
            return Outcome(name, error=" | ".join(lines[-3:]))
        return Outcome(**json.loads(out.read_text()))


def measure(args: argparse.Namespace) -> dict[str, list[Outcome]]:
    began = time.perf_counter()
    found: dict[str, list[Outcome]] = {name: [] for name in args.contenders}
    for turn in range(args.rounds):
        order = args.contenders if turn % 2 == 0 else list(reversed(args.contenders))
        for name in order:
            is_late = turn > 0 and time.perf_counter() - began > args.budget
            if is_late or (found[name] and found[name][0].error):
                continue
            outcome = run_together(name, args) if args.together else run_alone(name, args)
            found[name].append(outcome)
            shown = outcome.error or (
                f"{outcome.ms:9.1f} ms, {outcome.num_steps} steps, {outcome.setup_s:.0f} s before, "
                f"losses {', '.join(f'{loss:.5f}' for loss in outcome.losses)}"
            )
            print(f"  round {turn + 1}  {name:24} {shown}", flush=True)
    return found


@dataclass
class Row:
    contender: str
    tokens_per_s: float
    tflops: float
    ms: float
    peak_gib: float
    reserved_gib: float
    """What the allocator held, graphs' own memory included, which the peak does not count."""
    loss_gap: float
    """The largest relative difference of its first losses to fsdmoe's."""
    rounds: int


def summarise(found: dict[str, list[Outcome]], problem: Problem) -> list[Row]:
    flops = training_flops_per_token(problem.config, problem.length)
    good = {name: [o for o in outcomes if not o.error] for name, outcomes in found.items()}
    expected = next((o[0].losses for o in good.values() if o), [])
    rows = []
    for name, outcomes in good.items():
        if not outcomes:
            continue
        ms = statistics.median(o.ms for o in outcomes)
        rate = problem.batch * problem.length / ms * 1e3
        gap = max(abs(a - b) / b for a, b in zip(outcomes[0].losses, expected, strict=True))
        peak = max(o.peak_gib for o in outcomes)
        held = max(o.reserved_gib for o in outcomes)
        rows.append(Row(name, rate, rate * flops / 1e12, ms, peak, held, gap, len(outcomes)))
    return rows


def report(rows: list[Row], problem: Problem) -> bool:
    """Print the table; whether all losses agree."""
    peers = [r for r in rows if not r.contender.startswith("fsdmoe")]
    best = max(peers, key=lambda r: r.tokens_per_s, default=None)
    base = best or (rows[0] if rows else None)
    print(f"\n{'':30}{'ms':>8}{'tokens/s':>10}{'TFLOP/s':>9}{'peak GiB':>10}{'reserved':>10}"
          f"{'x best peer' if best else 'x the first':>13}{'loss gap':>10}")  # fmt: skip
    for r in rows:
        ratio = r.tokens_per_s / base.tokens_per_s if base else float("nan")
        print(
            f"{r.contender:30}{r.ms:8.1f}{r.tokens_per_s:10.0f}{r.tflops:9.1f}{r.peak_gib:10.2f}"
            f"{r.reserved_gib:10.2f}{ratio:13.3f}{r.loss_gap:10.1e}"
        )
    if any(r.peak_gib for r in rows):  # on a CPU, times say nothing
        _print_ratios({r.contender: r for r in rows}, best)
    limit = MAX_SPREAD[problem.dtype]
    apart = [r.contender for r in rows if not r.loss_gap <= limit]
    print(f"losses of the first {CHECKED_STEPS} steps agree within {limit}: "
          + ("yes" if not apart else "NO: " + ", ".join(apart)))  # fmt: skip
    return not apart


def _print_ratios(by_name: dict[str, Row], best: Row | None) -> None:
    ours = by_name.get("fsdmoe")
    wrapped = by_name.get("fsdmoe wrapped")
    if ours and best:
        print(f"\nfsdmoe: {ours.tokens_per_s / best.tokens_per_s:.3f} x the tokens/s of {best.contender} "
              f"(wanted {MIN_SPEED}) at {ours.peak_gib / best.peak_gib:.3f} of its peak memory "
              f"(wanted {MAX_MEMORY})")  # fmt: skip
    if wrapped and "transformers" in by_name:
        ratio = wrapped.tokens_per_s / by_name["transformers"].tokens_per_s
        print(f"fsdmoe wrapped: {ratio:.3f} x the same model unwrapped (wanted 1.3)")
    if wrapped and ours:
        ratio = wrapped.tokens_per_s / ours.tokens_per_s
        print(f"fsdmoe wrapped: {ratio:.3f} x the tokens/s of fsdmoe's own decoder "
              f"(wanted {MIN_WRAPPED_SPEED}) at {wrapped.peak_gib / ours.peak_gib:.3f} of its peak "
              f"memory (wanted {MAX_WRAPPED_MEMORY})")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", nargs="+", choices=NAMES, metavar="NAME", help="of: "
                        f"{', '.join(NAMES)}; if left out the first {len(DEFAULT)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a process is timed for")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no round but the "
                        "first starts a process")  # fmt: skip
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that one process may take")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", choices=tuple(MAX_SPREAD), help="bfloat16, with --tiny float32")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--together", action="store_true", help="all contenders in one process, one after "
                        "the other: less to start, and kernels are compiled once")  # fmt: skip
    parser.add_argument("--graphs", action="store_true", help="fsdmoe's steps as CUDA graphs")
    parser.add_argument(
        "--world", type=int, default=0, help="fsdmoe as one rank of an emulated world of so many"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.together and args.profile:
        parser.error("--profile slows down every later launch of its process: leave out --together")
    if args.tiny:
        args.seconds = min(args.seconds, 0.2)
    return args


def main() -> int:
    args = parse()
    if args.worker:
        run_worker(args)
        return 0
    if not args.tiny:
        require_gpu("try --tiny")
    args.contenders = choose(args.contenders, DEFAULT)
    if args.together:
        os.environ.update(ALLOCATOR)  # read when the first tensor is made on the device
    problem = problem_of(args)
    where = torch.cuda.get_device_name() if problem.device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {problem.dtype}: {problem.config.num_hidden_layers} layers, "
          f"{problem.batch} x {problem.length} tokens")  # fmt: skip
    found = measure(args)
    rows = summarise(found, problem)
    agree = report(rows, problem)
    failed = [name for name, outcomes in found.items() if outcomes and outcomes[0].error]
    if args.json:
        figures = {"device": where, "torch": torch.__version__, "dtype": problem.dtype,
                   "rows": [asdict(r) for r in rows],
                   "outcomes": [asdict(o) for outcomes in found.values() for o in outcomes]}  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=1))
    return 0 if agree and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
