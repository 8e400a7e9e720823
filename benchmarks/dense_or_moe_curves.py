"""Held-out loss over minutes of training, of a dense model and a MoE: the curves of ``dense_or_moe.py``.

The clock is that of training alone; it stands still while a run is built and evaluated. How many steps fit
into the minutes is measured once routers have spread their tokens, in the last of the first 80 steps, which
are part of the run; its learning rate falls to its end accordingly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from inks import INK, style_of

from fsdmoe import train as program
from fsdmoe.data import Batch, DataConfig, build_data

MODELS = ("dense", "MoE")
SETTLING_STEPS = 80
EVALUATED_STEPS = 8
"""Global batches of held-out rows in an evaluation."""
COLOURS = {"dense": "#b8863b", "MoE": "#2a7f9e"}


@dataclass
class Curve:
    """One run: held-out loss by minutes of training."""

    model: str
    optimizer: str
    seed: int
    minutes: float
    points: list[tuple[float, float]] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0

    @property
    def key(self) -> tuple[str, str, int, float]:
        return self.model, self.optimizer, self.seed, self.minutes

    def loss_after(self, minutes: float) -> float:
        """At the evaluation nearest to that time."""
        return min(self.points, key=lambda point: abs(point[0] - minutes))[1]


Built = Callable[[str, Any, argparse.Namespace], AbstractContextManager[program.Run]]


def add_curves(built: Built, size: Callable[..., Any], args: argparse.Namespace) -> list[Curve]:
    """Train what the JSON does not hold, and write it there after every run; all that it holds."""
    began = time.perf_counter()
    told = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else []
    curves = [Curve(**each) for each in told]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for model in MODELS if args.only is None else (args.only,):
            curve = Curve(model, args.optimizer, seed, args.curves)
            is_late = time.perf_counter() - began + 75 * args.curves > args.budget
            if curve.key in {each.key for each in curves} or is_late:
                continue
            fill(curve, built(model, size(args.tokens[0], seed, args.optimizer), args), args)
            if args.stop_after < args.curves:
                continue
            curves.append(curve)
            args.json.write_text(json.dumps([asdict(each) for each in curves]), encoding="utf-8")
            print(
                f"{model}, {args.optimizer}, seed {seed}: {curve.steps:,} steps, {curve.tokens / 1e6:.1f} M "
                f"tokens in {args.curves:g} minutes, held-out loss {curve.points[-1][1]:.4f}",
                flush=True,
            )
    return curves


def fill(curve: Curve, building: AbstractContextManager[program.Run], args: argparse.Namespace) -> None:
    """Train one run; it is gone with this function, before the next is built."""
    with building as run:
        batches = held_out_batches(run, args.corpus, 1 if args.tiny else EVALUATED_STEPS)
        settling = 4 if args.tiny else SETTLING_STEPS
        train(run, curve, batches, args.points, settling=settling, stop_after=args.stop_after)


def held_out_batches(run: program.Run, corpus: Path, num_steps: int) -> list[Batch]:
    """The same rows for every run, drawn from projects that nothing is trained on."""
    config = run.config
    of_files: DataConfig = replace(
        config.data, path=str(corpus / "held_out.bin"), shuffle=True, cursors=None, holdout=0.0
    )
    rows = config.train.micro_batch_size
    stream = build_data(of_files, dp_rank=0, dp_size=1, micro_batch_size=rows, global_batch_size=rows, seed=0)
    batches = [batch for _ in range(num_steps) for batch in stream.next_step()]
    stream.close()
    return batches


def train(
    run: program.Run,
    curve: Curve,
    batches: list[Batch],
    num_points: int,
    *,
    settling: int,
    stop_after: float = float("inf"),
) -> None:
    """Until the time is over, or ``stop_after`` minutes, with so many evaluations, evenly spread."""
    first = [timed_step(run) for _ in range(settling)]
    settled = statistics.median(spent for spent, _ in first[-max(1, settling // 4) :])
    # Those that compiled, and captured graphs, count as any other.
    seconds = sum(min(spent, 2 * settled) for spent, _ in first)
    curve.steps = max(num_points, settling + round((curve.minutes * 60 - seconds) / settled))
    run.config = replace(run.config, train=replace(run.config.train, steps=curve.steps))
    losses = [loss for _, loss in first]
    stops = [max(settling, curve.steps * number // num_points) for number in range(1, num_points + 1)]
    for stop in stops:
        while run.progress["step"] < stop:
            spent, loss = timed_step(run)
            seconds += spent
            losses.append(loss)
        held_out = run.feed.held_out_loss(run.decoder, batches)
        curve.points.append((seconds / 60, held_out))
        print(
            f"{curve.model}, step {run.progress['step']:,} of {curve.steps:,}, {seconds:.0f} s: held-out "
            f"loss {held_out:.4f}, training loss of the last 20 steps {statistics.fmean(losses[-20:]):.4f}",
            flush=True,
        )
        if seconds >= 60 * stop_after:
            break
    curve.tokens = run.progress["tokens"]


def timed_step(run: program.Run) -> tuple[float, float]:
    """Seconds until the next one may begin, since a step waits for the device when it reads its loss; and the
    loss."""
    began = time.perf_counter()
    record = run.train_step()
    return time.perf_counter() - began, record.loss


def report(curves: list[Curve]) -> bool:
    """Print the held-out losses at half time and at the end; whether the MoE's are lower everywhere."""
    pairs = [
        (dense, moe) for dense in curves for moe in curves
        if dense.model == "dense" and moe.model == "MoE" and dense.key[1:] == moe.key[1:]
    ]  # fmt: skip
    print("| optimizer | seed | minutes | dense | MoE | difference | dense, tokens | MoE, tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    is_lower = bool(pairs)
    for dense, moe in pairs:
        for minutes in (dense.minutes / 2, dense.minutes):
            one, other = dense.loss_after(minutes), moe.loss_after(minutes)
            share = minutes / dense.minutes / 1e6
            print(
                f"| {dense.optimizer} | {dense.seed} | {minutes:g} | {one:.4f} | {other:.4f} "
                f"| {other - one:+.4f} | {dense.tokens * share:.1f} M | {moe.tokens * share:.1f} M |"
            )
            is_lower = is_lower and other < one
    print(f"the MoE's loss is lower everywhere: {'yes' if is_lower else 'NO'}", flush=True)
    return is_lower


def draw(curves: list[Curve], folder: Path) -> None:
    """Curves of all runs, in light and dark; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    optimizers = list(dict.fromkeys(curve.optimizer for curve in curves))
    for mode in INK:
        with plt.rc_context(style_of(mode, "dense_or_moe")):  # type: ignore[arg-type]
            figure, all_axes = plt.subplots(
                1, len(optimizers), figsize=(6.4, 3.2), layout="constrained", sharey=True, squeeze=False
            )
            for axes, optimizer in zip(all_axes[0], optimizers, strict=True):
                for curve in curves:
                    if curve.optimizer == optimizer:
                        minutes, losses = zip(*curve.points, strict=True)
                        name = curve.model if curve.seed == 0 else None
                        axes.plot(minutes, losses, color=COLOURS[curve.model], linewidth=1.2, label=name)
                axes.set(xlabel=f"minutes of training, {optimizer}")
                axes.legend(frameon=False, labelcolor="linecolor")
            all_axes[0][0].set_ylabel("held-out loss")
            figure.suptitle("Dense or MoE with the same active FLOPs, one GPU", fontsize=10)
            figure.savefig(folder / f"dense_or_moe_{mode}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
