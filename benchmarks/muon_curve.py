"""How many steps does Muon need for the held-out loss that AdamW has after 1,500?

The mixture of 107 M parameters of ``convergence.py``, on the same rows. Each optimizer has a schedule of its
own: AdamW's ends after 1,500 steps, Muon's after 1,100. Each is tuned over learning rates with one seed;
its best rate is then trained with the other seeds.

    python benchmarks/muon_curve.py --parallel 8      about 5 minutes on one H200, under NVIDIA's MPS
    python benchmarks/muon_curve.py --report --chart docs/results/muon_curve.svg
    python benchmarks/muon_curve.py --tiny            a small model, to see that it works

Runs write to ``--folder`` and are not repeated when they are whole there. ``--report`` trains nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from convergence import MODEL, ROOT, TINY, Course, course, train

RATES = ("5e-4", "1e-3", "2e-3", "4e-3")
STEPS = {"adamw": 1500, "muon": 1100}
NAMES = {"adamw": "AdamW", "muon": "Muon"}


class Setting(NamedTuple):
    """One run."""

    optimizer: str
    rate: str
    seed: int

    def folder(self, args: argparse.Namespace) -> Path:
        return (args.folder / f"{self.optimizer}-{self.rate}-{self.seed}").absolute()


def steps_of(optimizer: str, args: argparse.Namespace) -> int:
    return 4 if args.tiny else STEPS[optimizer]


def evaluated_at(optimizer: str, args: argparse.Namespace) -> list[int]:
    """Steps after which the held-out loss is computed, for the curves."""
    return list(range(100, steps_of(optimizer, args), 100))


def options(setting: Setting, args: argparse.Namespace) -> list[str]:
    """The command line of a run, as train.py takes it."""
    keys = (TINY if args.tiny else MODEL) | {
        "optim.name": setting.optimizer, "optim.lr": setting.rate, "train.seed": str(setting.seed),
        "train.steps": str(steps_of(setting.optimizer, args)), "train.output_dir": str(setting.folder(args)),
        "train.eval_interval": "0", "checkpoint.interval": "-1", "observe.log_interval": "1",
        "observe.tensorboard": "False",
    }  # fmt: skip
    given = [f"--{name}={value}" for name, value in keys.items()]
    return ["--config", str(ROOT / "configs/quickstart.toml"), *given]


def held_out(setting: Setting, args: argparse.Namespace) -> float | None:
    """After the last step; None for a run that is not whole."""
    found = course(setting.folder(args))
    return found.held_out.get(steps_of(setting.optimizer, args)) if found else None


def fill(settings: list[Setting], args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Train what is not whole yet."""
    began = time.perf_counter()
    jobs = {}
    for setting in settings:
        if held_out(setting, args) is None:
            given = setting.folder(args), options(setting, args), evaluated_at(setting.optimizer, args)
            jobs[pool.submit(train, *given, float("inf"))] = setting
    for job in as_completed(jobs):
        name, rate, seed = jobs[job]
        print(f"{time.perf_counter() - began:.0f} s: {name} {rate}, seed {seed}: {job.result()}", flush=True)


def best_rate(optimizer: str, args: argparse.Namespace) -> str:
    """Of the runs with seed 0."""
    losses = {rate: held_out(Setting(optimizer, rate, 0), args) for rate in args.rates}
    known = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not known:
        raise SystemExit(f"expected runs of {optimizer} with seed 0 in {args.folder}, found none")
    return min(known, key=known.__getitem__)


def train_all(args: argparse.Namespace) -> None:
    with ProcessPoolExecutor(args.parallel, multiprocessing.get_context("spawn")) as pool:
        fill([Setting(name, rate, 0) for name in STEPS for rate in args.rates], args, pool)
        others = [
            Setting(name, best_rate(name, args), seed) for name in STEPS for seed in range(1, args.seeds)
        ]
        fill(others, args, pool)


def best_runs(args: argparse.Namespace) -> dict[str, list[Course]]:
    """By optimizer, those of its best rate, seed after seed."""
    runs: dict[str, list[Course]] = {}
    for name in STEPS:
        found = [course(Setting(name, best_rate(name, args), s).folder(args)) for s in range(args.seeds)]
        runs[name] = [one for one in found if one is not None]
    return runs


def report(args: argparse.Namespace) -> None:
    print("| optimizer | steps | held-out loss, seed 0, by rate | best rate | its seeds | mean |")
    print("| --- | --- | --- | --- | --- | --- |")
    means = {}
    for name in STEPS:
        by_rate = [
            f"{rate}: {loss:.4f}" for rate in args.rates if (loss := held_out(Setting(name, rate, 0), args))
        ]
        rate = best_rate(name, args)
        seeds = [loss for s in range(args.seeds) if (loss := held_out(Setting(name, rate, s), args))]
        means[name] = statistics.mean(seeds)
        each = ", ".join(f"{loss:.4f}" for loss in seeds)
        cells = (NAMES[name], steps_of(name, args), ", ".join(by_rate), rate, each, f"{means[name]:.4f}")
        print(f"| {' | '.join(map(str, cells))} |")
    apart = means["muon"] / means["adamw"] - 1
    counts = f"{steps_of('muon', args)} and {steps_of('adamw', args)}"
    print(f"\nMuon is {apart:+.2%} from AdamW, after {counts} steps")


def draw(args: argparse.Namespace) -> None:
    """Held-out losses of the best rates over steps, each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for (name, runs), shade in zip(best_runs(args).items(), ("C0", "C1"), strict=True):
        for number, run in enumerate(runs):
            label = f"{NAMES[name]}, {steps_of(name, args)} steps" if number == 0 else None
            axes.plot(*zip(*sorted(run.held_out.items())), color=shade, linewidth=1, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss")
    axes.set_yscale("log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.chart)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=RATES, help="learning rates that both are tuned over")
    parser.add_argument("--seeds", type=int, default=3, help="at the best rate, from 0 on")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time on the one device")
    parser.add_argument("--folder", type=Path, default=Path("runs/muon_curve"))
    parser.add_argument("--report", action="store_true", help="train nothing, tell of all that is there")
    parser.add_argument("--chart", type=Path, help="an SVG or PNG; needs matplotlib")
    parser.add_argument("--tiny", action="store_true", help="a small model in fp32, 4 steps")
    args = parser.parse_args()
    if not args.report:
        train_all(args)
    report(args)
    if args.chart:
        draw(args)


if __name__ == "__main__":
    main()
