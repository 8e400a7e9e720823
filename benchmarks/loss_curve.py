"""The quick-start model trained with fused kernels and with plain torch: the loss must be the same curve.

Runs ``train.py`` three times with the same seed and data: ``train.kernels`` auto and torch in bf16, and torch
in fp32. The last says what rounding to bf16 alone does to the curve, the noise that the kernels may not
exceed: the mean difference of the two bf16 curves must stay below twice that of plain bf16 and fp32.

    python benchmarks/loss_curve.py --json curves.json --chart docs/results/loss_curve.svg   on a GPU
    python benchmarks/loss_curve.py --tiny                                             to see that it works

On a CPU both choices are plain torch, so the curves are the same to the last bit. ``--draw curves.json``
only draws.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import require_gpu

from fsdmoe.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent
RUNS = {
    "fused kernels, bf16": ("auto", "bfloat16"),
    "plain torch, bf16": ("torch", "bfloat16"),
    "plain torch, fp32": ("torch", "float32"),
}
TINY = ("--model.hidden_size", "64", "--model.num_hidden_layers", "1", "--data.seq_len", "64",
        "--train.global_batch_size", "4", "--train.micro_batch_size", "4")  # fmt: skip
Curves = dict[str, list[float]]


def train(kernels: str, dtype: str, steps: int, extra: tuple[str, ...]) -> list[float]:
    """The loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "--config", "configs/quickstart.toml"]
        command += ["--train.kernels", kernels, "--precision.param_dtype", dtype, "--train.steps", str(steps)]
        command += ["--train.output_dir", folder, "--train.eval_interval", "-1"]
        command += ["--checkpoint.interval=-1", "--observe.log_interval", "1", *extra]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        rows = read_metrics(Path(folder) / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]


def differences(one: list[float], other: list[float]) -> list[float]:
    return [abs(a - b) / b for a, b in zip(one, other, strict=True)]


def report(curves: Curves) -> bool:
    """Print how far apart the curves are; whether the kernels stay within the noise."""
    fused, plain, wide = curves.values()
    kernels, noise = differences(fused, plain), differences(plain, wide)
    print(f"{len(fused)} steps, last losses: " + ", ".join(f"{n} {c[-1]:.4f}" for n, c in curves.items()))
    for name, values in (("kernels against torch, bf16", kernels), ("torch, bf16 against fp32", noise)):
        print(f"{name}: mean relative difference {statistics.mean(values):.2e}, largest {max(values):.2e}")
    within = statistics.mean(kernels) <= 2 * statistics.mean(noise)
    print("within the noise of bf16: " + ("yes" if within else "NO"))
    return within


def draw(curves: Curves, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 5.5), height_ratios=(2, 1), sharex=True)
    for (name, losses), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        upper.plot(range(1, len(losses) + 1), losses, style, label=f"{name} (last {losses[-1]:.4f})")
    upper.set_ylabel("training loss")
    upper.legend()
    fused, plain, wide = curves.values()
    steps = range(1, len(fused) + 1)
    lower.semilogy(steps, differences(fused, plain), label="kernels against torch, bf16")
    lower.semilogy(steps, differences(plain, wide), label="torch, bf16 against fp32", color="#8d99ae")
    lower.set_xlabel("step")
    lower.set_ylabel("relative difference")
    lower.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="a smaller model, 4 steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path, help="an SVG or PNG; needs matplotlib")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="take the curves from an earlier --json")
    args = parser.parse_args()
    if not (args.tiny or args.draw):
        require_gpu("try --tiny")
    curves: Curves = {}
    if args.draw:
        curves = json.loads(args.draw.read_text())
    else:
        for name, (kernels, dtype) in RUNS.items():
            curves[name] = train(kernels, dtype, 4 if args.tiny else args.steps, TINY if args.tiny else ())
            print(f"{name}: done", flush=True)
    within = report(curves)
    if args.json:
        args.json.write_text(json.dumps(curves))
    if args.chart:
        draw(curves, args.chart)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
