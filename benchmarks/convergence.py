"""A 100 M-parameter MoE trained in bf16 and in cheaper ways: how far is the held-out loss from bf16's?

Every setting trains with the same seeds, and so on the same rows from the same weights, as the first one: 4
layers, 64 experts of which a token takes 2, 32,768 tokens a step, on the sources of the Python packages that
are installed, of which there are more than a run reads: rows that come again are learned by heart, and noise
helps on all others. The differences to bf16 are taken seed by seed and then averaged, since two seeds lie
further apart than what is asked about; the spread of bf16 between seeds is printed beside.

    python benchmarks/convergence.py --seeds 3 --parallel 3       bf16, fp8_blockwise and 8-bit moments
    python benchmarks/convergence.py --settings mxfp8 nvfp4       one seed of recipes that torch emulates
    python benchmarks/convergence.py --tiny                       a small model, to see that it works

Runs write to ``--folder`` and are not repeated when they are whole there, so that a table may be filled in
several calls; ``--chart`` draws all that it holds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fsdmoe.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent
EMULATED = ("--precision.emulate", "True")
SETTINGS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "fp8_blockwise": ("--precision.recipe", "fp8_blockwise"),
    "8-bit moments": ("--optim.moment_dtype", "float8"),
    "bf16 moments": ("--optim.moment_dtype", "bfloat16"),
    "fp8_fast": ("--precision.recipe", "fp8_fast"),
    "fp8_rowwise": ("--precision.recipe", "fp8_rowwise", *EMULATED),
    "fp8_tensorwise": ("--precision.recipe", "fp8_tensorwise", *EMULATED),
    "mxfp8": ("--precision.recipe", "mxfp8", *EMULATED),
    "nvfp4": ("--precision.recipe", "nvfp4", *EMULATED),
}
MODEL = (
    "--precision.param_dtype", "bfloat16", "--model.hidden_size", "512", "--model.num_hidden_layers", "4",
    "--model.num_attention_heads", "8", "--model.num_key_value_heads", "4", "--model.head_dim", "64",
    "--model.num_experts", "64", "--model.num_experts_per_tok", "2", "--model.moe_intermediate_size", "256",
    "--data.seq_len", "1024", "--train.global_batch_size", "32", "--train.micro_batch_size", "32",
    "--optim.lr", "1e-3", "--optim.warmup_steps", "100", "--train.eval_batches", "32",
    "--train.graphs", "step",
    "--data.kind", "text", "--data.path", sysconfig.get_path("purelib"), "--data.glob", "*.py",
    "--data.max_bytes", "80_000_000", "--data.holdout", "0.03", "--data.on_error", "skip",
)  # fmt: skip
TINY = (
    "--precision.param_dtype", "float32", "--model.hidden_size", "128", "--model.num_hidden_layers", "1",
    "--model.moe_intermediate_size", "128", "--data.seq_len", "64", "--train.global_batch_size", "4",
    "--train.micro_batch_size", "4", "--train.eval_batches", "1",
)  # fmt: skip


@dataclass(frozen=True)
class Course:
    """One whole run."""

    losses: list[float]
    held_out: float


def course(folder: Path, steps: int) -> Course | None:
    """What a run left in its folder; None where it did not end."""
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row and row["step"] == steps]
    return Course(losses, held_out[-1]) if len(losses) == steps and held_out else None


def train(folder: Path, setting: str, seed: int, args: argparse.Namespace) -> None:
    if course(folder, args.steps):
        return
    command = [sys.executable, "train.py", "--config", "configs/quickstart.toml", "--train.seed", str(seed)]
    command += [
        "--train.output_dir",
        str(folder),
        "--train.steps",
        str(args.steps),
        "--train.eval_interval",
        "0",
    ]
    command += ["--checkpoint.interval=-1", "--observe.log_interval", "1"]
    command += [*(TINY if args.tiny else MODEL), *SETTINGS[setting]]
    if args.tiny and "--precision.recipe" in command:  # a CPU has no kernels for any
        command += EMULATED
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    print(f"{setting}, seed {seed}: done", flush=True)


def place(args: argparse.Namespace, setting: str, seed: int) -> Path:
    return args.folder / f"{setting.replace(', ', '-').replace(' ', '-')}-{seed}"


def found(args: argparse.Namespace) -> dict[str, dict[int, Course]]:
    """All whole runs in the folder, of the first setting first."""
    runs: dict[str, dict[int, Course]] = {}
    for setting in SETTINGS:
        for seed in range(args.seeds):
            if whole := course(place(args, setting, seed), args.steps):
                runs.setdefault(setting, {})[seed] = whole
    return runs


def report(runs: dict[str, dict[int, Course]]) -> None:
    base = runs["bf16"]
    print("| setting | seeds | held-out loss | to bf16, seed by seed | mean | last 100 training losses |")
    print("| --- | --- | --- | --- | --- | --- |")
    for setting, by_seed in runs.items():
        pairs = [(by_seed[seed], base[seed]) for seed in by_seed if seed in base]
        apart = [mine.held_out / theirs.held_out - 1 for mine, theirs in pairs]
        tails = [tail(mine) / tail(theirs) - 1 for mine, theirs in pairs]
        held_out = statistics.mean(one.held_out for one in by_seed.values())
        print(f"| {setting} | {len(by_seed)} | {held_out:.4f} | {', '.join(f'{a:+.2%}' for a in apart)} "
              f"| {statistics.mean(apart):+.3%} | {statistics.mean(tails):+.3%} |")  # fmt: skip
    if len(base) > 1:
        losses = [one.held_out for one in base.values()]
        print(f"bf16's seeds lie {max(losses) / min(losses) - 1:.2%} apart")


def tail(one: Course) -> float:
    return statistics.mean(one.losses[-100:])


def draw(runs: dict[str, dict[int, Course]], path: Path, window: int = 25) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6), height_ratios=(2, 1), sharex=True)
    base = smooth(runs["bf16"][0].losses, window)
    steps = range(window, window + len(base))
    for setting, by_seed in runs.items():
        if 0 in by_seed:
            line = smooth(by_seed[0].losses, window)
            upper.plot(steps, line, linewidth=0.8, label=f"{setting} ({tail(by_seed[0]):.4f})")
            lower.plot(steps, [100 * (a / b - 1) for a, b in zip(line, base, strict=True)], linewidth=0.8)
    upper.set_ylabel(f"training loss, mean of {window} steps")
    upper.legend(title="seed 0 (mean of its last 100 losses)")
    lower.set_ylabel("to bf16, %")
    lower.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)


def smooth(losses: list[float], window: int) -> list[float]:
    return [statistics.mean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS)[:3])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time on the one device")
    parser.add_argument("--folder", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--chart", type=Path, help="an SVG or PNG; needs matplotlib")
    parser.add_argument("--tiny", action="store_true", help="a small model in fp32, 4 steps")
    args = parser.parse_args()
    args.steps = 4 if args.tiny else args.steps
    settings = dict.fromkeys(("bf16", *args.settings))
    with ThreadPoolExecutor(args.parallel) as pool:
        jobs = [
            pool.submit(train, place(args, setting, seed).absolute(), setting, seed, args)
            for seed in range(args.seeds)
            for setting in settings
        ]
        for job in jobs:
            job.result()
    runs = found(args)
    report(runs)
    if args.chart:
        draw(runs, args.chart)


if __name__ == "__main__":
    main()
