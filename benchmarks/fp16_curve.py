"""The quick-start model trained in float16 and in bfloat16: float16 must follow, with its loss scale.

Runs ``train.py`` with the same seed and data in each type, which differ in ``precision.param_dtype`` alone,
and does so for every seed. Rounding alone makes two curves of one seed part by percents, in bfloat16 as in
float16, so what is compared is a mean: the relative difference of paired steps, over the last ``--last``
steps, and that of the held-out loss in the end; each with its mean over the seeds and its spread between
them (the standard deviation). float16 follows if the former is at most ``--limit``. A skipped step would move
the whole curve by one, so their number is printed too.

    python benchmarks/fp16_curve.py --against bfloat16 float32 --seeds 3 --json fp16.json
    python benchmarks/fp16_curve.py --ranks 2 --against float32     where a CPU has no bfloat16
    python benchmarks/fp16_curve.py --tiny --steps 20               a model of one layer
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdmoe.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent
TINY = ("--model.hidden_size", "64", "--model.num_hidden_layers", "1", "--data.seq_len", "64",
        "--train.global_batch_size", "4", "--train.micro_batch_size", "2")  # fmt: skip
Curve = dict[str, Any]


def train(dtype: str, seed: int, steps: int, ranks: int, extra: tuple[str, ...]) -> Curve:
    """The loss of every step, and the held-out loss after the last."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(launcher if ranks > 1 else []), "train.py"]
        command += ["--config", "configs/quickstart.toml"]
        command += ["--precision.param_dtype", dtype, "--train.seed", str(seed), "--train.steps", str(steps)]
        command += ["--train.output_dir", folder, "--train.eval_interval", "0"]
        command += ["--train.eval_batches", "16", "--checkpoint.interval=-1"]
        command += ["--observe.log_interval", "1", *extra]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        rows = list(read_metrics(Path(folder) / "metrics.jsonl"))
    trained = [row for row in rows if "lr" in row]
    (held_out,) = [row["eval_loss"] for row in rows if "eval_loss" in row]
    scale = f"; loss scale {trained[-1]['loss_scale']:g} at the end" if "loss_scale" in trained[-1] else ""
    print(f"seed {seed}, {dtype}: {len(trained)} steps, {trained[-1]['skipped']} skipped{scale}; losses: "
          f"last {trained[-1]['loss']:.4f}, held-out {held_out:.4f}", flush=True)  # fmt: skip
    return {"losses": [row["loss"] for row in trained], "held_out": held_out}


def mean_difference(one: Curve, other: Curve, last: int) -> float:
    """Of paired steps, relative and signed."""
    pairs = zip(one["losses"][-last:], other["losses"][-last:], strict=True)
    return statistics.mean((a - b) / b for a, b in pairs)


def tell(differences: list[float]) -> str:
    """The mean over seeds, the spread between them, and each."""
    spread = f" ± {statistics.stdev(differences):.2%}" if len(differences) > 1 else ""
    return f"{statistics.mean(differences):+.2%}{spread} ({', '.join(f'{d:+.2%}' for d in differences)})"


def report(curves: dict[str, list[Curve]], *, against: str, last: int, limit: float) -> bool:
    """Print how far apart the curves of every two types are; whether float16 follows."""
    last = min(last, len(curves["float16"][0]["losses"]))
    means = {}
    for one, other in itertools.combinations(curves, 2):
        pairs = list(zip(curves[one], curves[other], strict=True))
        found = [mean_difference(a, b, last) for a, b in pairs]
        means[one, other] = statistics.mean(found)
        print(f"{one} against {other}, mean over seeds ± spread between them (of each):")
        print(f"    last {last} steps   {tell(found)}")
        print(f"    held-out loss    {tell([a['held_out'] / b['held_out'] - 1 for a, b in pairs])}")
    follows = abs(means["float16", against]) <= limit
    print(f"float16 follows {against} within {limit:.0%}: " + ("yes" if follows else "NO"))
    return follows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each type, with seeds from 0 on")
    parser.add_argument("--jobs", type=int, default=1, help="runs beside each other")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--against", choices=("bfloat16", "float32"), nargs="+", default=["bfloat16"],
                        help="judged by the first")  # fmt: skip
    parser.add_argument("--last", type=int, default=100, help="steps that are compared")
    parser.add_argument("--limit", type=float, default=0.01)
    parser.add_argument("--tiny", action="store_true", help="a model of one layer")
    parser.add_argument("--json", type=Path, help="write all curves there")
    args = parser.parse_args()
    extra = TINY if args.tiny else ()
    with ThreadPoolExecutor(args.jobs) as pool:
        started = {
            dtype: [pool.submit(train, dtype, s, args.steps, args.ranks, extra) for s in range(args.seeds)]
            for dtype in ("float16", *args.against)
        }
        curves = {dtype: [run.result() for run in runs] for dtype, runs in started.items()}
    if args.json:
        args.json.write_text(json.dumps(curves))
    return 0 if report(curves, against=args.against[0], last=args.last, limit=args.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
