"""Does balancing fix a badly skewed router? Runs without it, with the bias, and with the auxiliary loss.

One MoE layer learns a mixture of linear maps (a token's cluster decides its map) from a router that starts
out sending nearly every token to the same two experts. Printed for each run: the busiest expert's load over
the mean at the start, the first step below 1.3, the lowest and the last 50 steps' mean; then a plot. A minute
or two on one core.

    python benchmarks/balance.py --plot docs/results/balance.svg
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from fsdmoe.experts.bias import update_biases
from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.router import Router, RouterSpec, RoutingContext

WIDTH, EXPERTS, TOP_K, CLUSTERS, SEQUENCES, LENGTH = 32, 16, 2, 64, 16, 128
GOAL, SKEWED = 1.3, 2.0
METHODS = {
    "none": BalanceConfig(),
    "bias": BalanceConfig(bias_rate=0.01),
    "auxiliary loss": BalanceConfig(sequence=0.1),
}


class Task:
    """Tokens in clusters around a common mean, each cluster with its own linear map to learn."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.mean_D = self._normal(WIDTH)
        self.centres_CD = self._normal(CLUSTERS, WIDTH)
        self.maps_CDD = self._normal(CLUSTERS, WIDTH, WIDTH) / WIDTH**0.5

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def batch(self) -> tuple[Tensor, Tensor]:
        cluster_T = torch.randint(CLUSTERS, (SEQUENCES * LENGTH,), generator=self.generator)
        x_TD = self.mean_D + self.centres_CD[cluster_T] + 0.5 * self._normal(len(cluster_T), WIDTH)
        return x_TD, torch.einsum("td,tfd->tf", x_TD, self.maps_CDD[cluster_T])


def build_layer(task: Task, balance: BalanceConfig, seed: int) -> MoE:
    torch.manual_seed(seed)
    spec = RouterSpec(num_experts=EXPERTS, top_k=TOP_K, score="sigmoid", norm_topk=True)
    gate = Router(spec, WIDTH, ExpertsConfig(balance=balance))
    experts = GroupedExperts(EXPERTS, WIDTH, 2 * WIDTH)
    experts.reset_parameters(std=WIDTH**-0.5)
    with torch.no_grad():  # the skew: every token has the mean in it, and the mean points at two experts
        gate.weight[:TOP_K] += 2.0 * task.mean_D / task.mean_D.square().sum()
    return MoE(gate, experts)


def train(method: str, seed: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Max/mean expert load and task loss of every step."""
    balance = METHODS[method]
    task = Task(seed)
    layer = build_layer(task, balance, seed)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    context = RoutingContext.for_rows(SEQUENCES, LENGTH)
    ratios, losses = [], []
    for _ in range(num_steps):
        x_TD, target_TD = task.batch()
        y_TD, aux = layer(x_TD, context)
        loss = (y_TD - target_TD).square().mean()
        (loss + aux.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if balance.bias_rate:
            update_biases([(layer.gate, aux.load_E)], rate=balance.bias_rate)
        ratios.append((aux.load_E.max() / aux.load_E.mean()).item())
        losses.append(loss.item())
    return ratios, losses


def holds(method: str, ratios: list[float]) -> bool:
    """What each method must show: skew that never ends, or balance that is reached and kept."""
    return min(ratios) > SKEWED if method == "none" else _last(ratios) < GOAL


def _last(ratios: list[float]) -> float:
    return sum(ratios[-50:]) / len(ratios[-50:])


def report(method: str, seed: int, ratios: list[float], losses: list[float]) -> str:
    below = next((str(step) for step, ratio in enumerate(ratios) if ratio < GOAL), "never")
    verdict = "as it should" if holds(method, ratios) else "NOT as it should"
    return (
        f"{method:15s} seed {seed}: max/mean load {ratios[0]:.2f} at first, "
        f"below {GOAL} at step {below:>5s}, lowest {min(ratios):.2f}, last 50 steps {_last(ratios):.2f}; "
        f"task loss {losses[0]:.3f} -> {losses[-1]:.3f}; {verdict}"
    )


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib  # only the plot needs it

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fsdmoe"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    colours = {"none": "#7f7f7f", "bias": "#d95f02", "auxiliary loss": "#1b6ca8"}
    for method, runs in curves.items():
        for index, ratios in enumerate(runs):
            axes.plot(ratios, color=colours[method], linewidth=1, label=method if index == 0 else None)
    axes.axhline(GOAL, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(f"{GOAL}", (0, GOAL), xytext=(-12, 3), textcoords="offset points", fontsize=8)
    axes.set(xlabel="step", ylabel="busiest expert's load / mean", ylim=(0.9, None))
    num_seeds = len(next(iter(curves.values())))
    axes.set_title(f"{EXPERTS} experts, top {TOP_K}, skewed start, {num_seeds} seeds", fontsize=10)
    axes.legend(title="balancing", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="where to write the curves (.svg or .png)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, good = time.monotonic(), True
    curves: dict[str, list[list[float]]] = {method: [] for method in METHODS}
    for method in METHODS:
        for seed in range(arguments.seeds):
            ratios, losses = train(method, seed, arguments.steps)
            curves[method].append(ratios)
            good &= holds(method, ratios)
            print(report(method, seed, ratios, losses), flush=True)
    print(f"{time.monotonic() - start:.0f} s")
    if arguments.plot:
        plot(curves, arguments.plot)
        print(f"curves in {arguments.plot}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
