"""A 100 M-parameter MoE trained in bf16 and in cheaper ways: how far is the held-out loss from bf16's?

Every setting trains with the same seeds, and so on the same rows from the same weights, as the first one: 3
layers, 88 experts of which a token takes 2, 32,768 tokens a step, on the sources of the Python packages that
are installed, of which there are more than a run reads: rows that come again are learned by heart, and noise
helps on all others. The differences to bf16 are taken seed by seed and then averaged, since two seeds lie
further apart than what is asked about.

Two runs that differ by a rounding part, too: ``other rounding`` is bf16 in micro-batches of half the rows,
whose distance from bf16 is what nothing at all costs. Rows are short to keep that small. In longer ones a
model learns to copy from its context, suddenly, and rounding decides when: what is compared then is a delay
(rows of 1,024: 5 % apart at that time, 2 % in the end of 700 steps; rows of 256: 1.6 % and 0.1 %).

    python benchmarks/convergence.py --seeds 3 --parallel 4   bf16, its noise, fp8_blockwise, 8-bit moments
    python benchmarks/convergence.py --seeds 3 --settings 'fp8 head' 'fp8 codes'   head, and kept activations
    python benchmarks/convergence.py --settings mxfp8 nvfp4   one seed of recipes that are emulated
    python benchmarks/convergence.py --optim.lr=2e-3          with another key of train.py
    python benchmarks/convergence.py --tiny                   a small model, to see that it works

Runs write to ``--folder`` and are not repeated when they are whole there, so that a table may be filled in
several calls; ``--report`` trains nothing, ``--chart`` draws all that there is. ``--seconds`` ends a call in
time: runs are evaluated at ``--evaluate`` on their way, so that those which were ended are still compared, at
the last step of which both of a pair know the held-out loss. Workers stay: text is tokenised once, and a
worker imports and compiles once. Several of them share a GPU better under NVIDIA's MPS.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import statistics
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from fsdmoe.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent
QUANTIZED = {"precision.quantized_weights": "True"}  # as graphs need
EMULATED = {"precision.emulate": "True", "train.graphs": "none"}  # graphs go with kernels only
SETTINGS: dict[str, dict[str, str]] = {
    "bf16": {},
    "other rounding": {"train.micro_batch_size": "half"},
    "fp8_blockwise": {"precision.recipe": "fp8_blockwise", **QUANTIZED},
    "8-bit moments": {"optim.moment_dtype": "float8"},
    "bf16 moments": {"optim.moment_dtype": "bfloat16"},
    "fp8 head": {"precision.recipe": "fp8_blockwise", "precision.head": "fp8", **QUANTIZED},
    "fp8 codes": {"precision.recipe": "fp8_blockwise", "memory.keep": "codes", **QUANTIZED},
    "fp8_rowwise": {"precision.recipe": "fp8_rowwise", **EMULATED},
    "fp8_tensorwise": {"precision.recipe": "fp8_tensorwise", **EMULATED},
    "mxfp8": {"precision.recipe": "mxfp8", **EMULATED},
    "nvfp4": {"precision.recipe": "nvfp4", **EMULATED},
}
MODEL = {
    "precision.param_dtype": "bfloat16", "model.hidden_size": "512", "model.num_hidden_layers": "3",
    "model.num_attention_heads": "8", "model.num_key_value_heads": "4", "model.head_dim": "64",
    "model.num_experts": "88", "model.num_experts_per_tok": "2", "model.moe_intermediate_size": "256",
    "data.seq_len": "256", "train.global_batch_size": "128", "train.micro_batch_size": "128",
    "optim.lr": "1e-3", "optim.warmup_steps": "100", "optim.min_lr_ratio": "0", "train.eval_batches": "64",
    "train.graphs": "step", "data.cursors": "1024",
    "data.kind": "text", "data.path": sysconfig.get_path("purelib"), "data.glob": "*.py",
    "data.max_bytes": "80_000_000", "data.holdout": "0.03", "data.on_error": "skip",
}  # fmt: skip
TINY = {
    "precision.param_dtype": "float32", "model.hidden_size": "128", "model.num_hidden_layers": "1",
    "model.moe_intermediate_size": "128", "data.seq_len": "64", "train.global_batch_size": "4",
    "train.micro_batch_size": "4", "train.eval_batches": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Course:
    """One run, as far as it came."""

    losses: list[float]
    held_out: dict[int, float]
    """By the step after which it was evaluated."""


def course(folder: Path) -> Course | None:
    """What a run left in its folder; None where it left nothing."""
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    return Course(losses, held_out) if losses else None


def options(folder: Path, setting: str, seed: int, args: argparse.Namespace) -> list[str]:
    """The command line of a run, as train.py takes it."""
    keys = {
        "train.output_dir": str(folder), "train.steps": str(args.steps), "train.seed": str(seed),
        "train.eval_interval": "0", "checkpoint.interval": "-1", "observe.log_interval": "1",
        "observe.tensorboard": "False",
    }  # fmt: skip
    keys |= (TINY if args.tiny else MODEL) | args.others | SETTINGS[setting]
    if keys["train.micro_batch_size"] == "half":
        keys["train.micro_batch_size"] = str(int(keys["train.global_batch_size"]) // 2)
    if args.tiny:  # on a CPU, which has no kernels of any recipe, and no graphs
        keys |= {"precision.emulate": "True"} if "precision.recipe" in keys else {}
        keys.pop("train.graphs", None)
    given = [f"--{name}={value}" for name, value in keys.items()]
    return ["--config", str(ROOT / "configs/quickstart.toml"), *given]


def train(folder: Path, given: list[str], evaluate: list[int], deadline: float) -> str:
    """One run in a worker, as train.py does it, until it is done or it is too late; what took how long."""
    began = time.perf_counter()
    if time.time() > deadline:
        return "not begun: too late"
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    from fsdmoe import train as program  # after the worker has begun, so that its time is counted
    from fsdmoe.config import load_config

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that was ended: it begins anew
    with (folder / "console.txt").open("w") as console, contextlib.redirect_stdout(console):
        config = load_config(given).config
        program.choose_kernels(config.train.kernels)
        run = program.Run(config, program.start_meshes(config))
        ready = time.perf_counter()
        run.observer.log_step(run.train_step())
        compiled = time.perf_counter()
        steps = run.progress["step"]
        while steps < config.train.steps and time.time() < deadline:
            run.observer.log_step(run.train_step())
            steps = run.progress["step"]
            if steps in (*evaluate, config.train.steps):
                run.observer.log_eval(steps, run.evaluate())
        run.checkpoints.close()
        run.close("finished" if steps == config.train.steps else "ended early")
    ended = time.perf_counter()
    del run
    gc.collect()
    program.torch.cuda.empty_cache()
    return (
        f"imports, data and model {ready - began:.1f} s, first step {compiled - ready:.1f} s, "
        f"{steps - 1} steps and evaluation {ended - compiled:.1f} s "
        f"({1e3 * (ended - compiled) / max(1, steps - 1):.1f} ms a step)"
    )


def place(args: argparse.Namespace, setting: str, seed: int) -> Path:
    return args.folder / f"{setting.replace(', ', '-').replace(' ', '-')}-{seed}"


def found(args: argparse.Namespace) -> dict[str, dict[int, Course]]:
    """All runs in the folder, of the first setting first."""
    runs: dict[str, dict[int, Course]] = {}
    for setting in SETTINGS:
        for seed in range(args.seeds):
            if one := course(place(args, setting, seed)):
                runs.setdefault(setting, {})[seed] = one
    return runs


def report(runs: dict[str, dict[int, Course]]) -> None:
    """How far each setting is from bf16; of runs that were ended, up to the last step that all of it have."""
    base = runs["bf16"]
    print("| setting | held-out loss of each seed | after step | to bf16, seed by seed | mean "
          "| 100 training losses up to step | to bf16, seed by seed | mean |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting, by_seed in runs.items():
        seeds = [seed for seed in by_seed if seed in base]
        end = min(len(one.losses) for seed in seeds for one in (by_seed[seed], base[seed]))
        tails = [tail(by_seed[seed], end) / tail(base[seed], end) - 1 for seed in seeds]
        both = [by_seed[seed].held_out.keys() & base[seed].held_out.keys() for seed in seeds]
        step = max(set.intersection(*both), default=0)
        each = [(by_seed[seed].held_out[step], base[seed].held_out[step]) for seed in seeds if step]
        apart = told([mine / theirs - 1 for mine, theirs in each])
        held_out = ", ".join(f"{mine:.4f}" for mine, _ in each)
        print(f"| {setting} | {held_out} | {step or ''} | {apart} | {end} | {told(tails)} |")


def told(apart: list[float]) -> str:
    """Each difference, and their mean."""
    each = ", ".join(f"{a:+.2%}" for a in apart)
    return f"{each} | {statistics.mean(apart):+.2%}" if apart else " | "


def tail(one: Course, end: int) -> float:
    return statistics.mean(one.losses[max(0, end - 100) : end])


def draw(runs: dict[str, dict[int, Course]], path: Path, window: int = 25, every: int = 5) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6), height_ratios=(2, 1), sharex=True)
    longest = max(len(one.losses) for by_seed in runs.values() for one in by_seed.values())
    steps = range(window, longest + 1, every)
    for setting, by_seed in runs.items():
        if 0 in by_seed:
            line = smooth(by_seed[0].losses, window)[::every]
            shade = upper.plot(steps[: len(line)], line, linewidth=0.8, label=setting)[0].get_color()
            for seed in by_seed.keys() & runs["bf16"].keys():
                pairs = zip(by_seed[seed].losses, runs["bf16"][seed].losses, strict=False)
                mine, theirs = (smooth(losses, window) for losses in map(list, zip(*pairs, strict=True)))
                apart = [100 * (a / b - 1) for a, b in zip(mine, theirs, strict=True)][::every]
                lower.plot(steps[: len(apart)], apart, linewidth=0.8, color=shade)
    upper.set_ylabel(f"training loss, mean of {window} steps")
    upper.legend(title="seed 0")
    lower.set_ylabel("to bf16, %, each seed")
    lower.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)


def smooth(losses: list[float], window: int) -> list[float]:
    return [statistics.mean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS)[:4])
    parser.add_argument("--seeds", type=int, default=1, help="so many, from 0 on")
    parser.add_argument("--once", nargs="+", choices=SETTINGS, default=[], help="settings with one seed")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time on the one device")
    parser.add_argument("--evaluate", type=int, nargs="*", default=[], help="after these steps as well")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end all runs after so long")
    parser.add_argument("--folder", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--report", action="store_true", help="train nothing, tell of all that is there")
    parser.add_argument("--chart", type=Path, help="an SVG or PNG; needs matplotlib")
    parser.add_argument("--tiny", action="store_true", help="a small model in fp32, 4 steps")
    args, others = parser.parse_known_args()
    args.others = dict(other.removeprefix("--").split("=", 1) for other in others)
    args.steps = 4 if args.tiny else args.steps
    if not args.report:
        fill(args)
    runs = found(args)
    if "bf16" not in runs:
        sys.exit(f"expected runs of bf16, which all others are compared with, in {args.folder}; found none")
    report(runs)
    if args.chart:
        draw(runs, args.chart)


def fill(args: argparse.Namespace) -> None:
    """Train what is not whole yet, seed after seed."""
    settings = dict.fromkeys(("bf16", *args.settings))
    once = dict.fromkeys(args.once)
    began, deadline = time.perf_counter(), time.time() + args.seconds
    with ProcessPoolExecutor(args.parallel, multiprocessing.get_context("spawn")) as pool:
        jobs = {}
        for seed in range(args.seeds):
            for setting in settings | (once if seed == 0 else {}):
                folder = place(args, setting, seed).absolute()
                done = course(folder)
                if done is None or args.steps not in done.held_out:
                    given = folder, options(folder, setting, seed, args), args.evaluate, deadline
                    jobs[pool.submit(train, *given)] = f"{setting}, seed {seed}"
        for job in as_completed(jobs):
            print(f"{time.perf_counter() - began:.0f} s: {jobs[job]}: {job.result()}", flush=True)


if __name__ == "__main__":
    main()
