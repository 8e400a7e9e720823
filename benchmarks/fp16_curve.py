"""The quick-start model trained in float16 and in bfloat16: float16 must follow, with its loss scale.

Runs ``train.py`` twice with the same seed and data, which differ in ``precision.param_dtype`` alone, and
prints how far apart the two losses are: of single steps, where the rounding of bfloat16 alone makes noise
(``loss_curve.py`` says how much), and of means over ``--window`` steps, by which it judges: at most
``--limit``. A skipped step would move the whole curve by one, so their number is printed too.

    python benchmarks/fp16_curve.py --json fp16.json                300 steps, on a GPU or a CPU
    python benchmarks/fp16_curve.py --against bfloat16 float32      and how far those two are apart
    python benchmarks/fp16_curve.py --ranks 2 --against float32     where a CPU has no bfloat16
    python benchmarks/fp16_curve.py --tiny                          a model of one layer
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fsdmoe.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent
TINY = ("--model.hidden_size", "64", "--model.num_hidden_layers", "1", "--data.seq_len", "64",
        "--train.global_batch_size", "4", "--train.micro_batch_size", "2")  # fmt: skip


def train(dtype: str, steps: int, ranks: int, extra: tuple[str, ...]) -> list[dict[str, Any]]:
    """The row of every step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "train.py", "--config", "configs/quickstart.toml"]
        command += ["--precision.param_dtype", dtype, "--train.steps", str(steps)]
        command += ["--train.output_dir", folder, "--train.eval_interval", "-1"]
        command += ["--checkpoint.interval=-1", "--observe.log_interval", "1", *extra]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return [row for row in read_metrics(Path(folder) / "metrics.jsonl") if "lr" in row]


def windows(losses: list[float], size: int) -> list[float]:
    """Means over every ``size`` neighbouring steps."""
    return [statistics.mean(losses[end - size : end]) for end in range(size, len(losses) + 1)]


def differences(one: list[float], other: list[float]) -> list[float]:
    return [abs(a - b) / b for a, b in zip(one, other, strict=True)]


def report(half: list[float], other: list[float], *, against: str, window: int, limit: float) -> bool:
    """Print how far apart the curves are; whether float16 follows."""
    steps = differences(half, other)
    smooth = differences(windows(half, window), windows(other, window))
    print(f"{len(half)} steps, last losses: float16 {half[-1]:.4f}, {against} {other[-1]:.4f}")
    print(f"single steps: mean relative difference {statistics.mean(steps):.2%}, largest {max(steps):.2%}")
    print(f"means of {window} steps: largest relative difference {max(smooth):.2%}")
    follows = max(smooth) <= limit
    print(f"float16 follows {against} within {limit:.0%}: " + ("yes" if follows else "NO"))
    return follows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--against", choices=("bfloat16", "float32"), nargs="+", default=["bfloat16"],
                        help="judged by the first")  # fmt: skip
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--limit", type=float, default=0.01)
    parser.add_argument("--tiny", action="store_true", help="a model of one layer")
    parser.add_argument("--json", type=Path, help="write both curves there")
    args = parser.parse_args()
    curves = {}
    for dtype in ("float16", *args.against):
        rows = train(dtype, args.steps, args.ranks, TINY if args.tiny else ())
        curves[dtype] = [row["loss"] for row in rows]
        scale = f"; loss scale {rows[-1]['loss_scale']:g} at the end" if "loss_scale" in rows[-1] else ""
        print(f"{dtype}: {len(rows)} steps, {rows[-1]['skipped']} skipped{scale}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(curves))
    for one, other in itertools.combinations(curves, 2):
        apart = differences(windows(curves[one], args.window), windows(curves[other], args.window))
        mean = statistics.mean(curves[one]) / statistics.mean(curves[other]) - 1
        print(f"{one} and {other}, means of {args.window} steps: at most {max(apart):.2%} apart, "
              f"of all steps: {mean:+.2%}")  # fmt: skip
    first = args.against[0]
    follows = report(curves["float16"], curves[first], against=first, window=args.window, limit=args.limit)
    return 0 if follows else 1


if __name__ == "__main__":
    sys.exit(main())
