"""What quantisation-aware training gives back of the loss that rounding costs, on the quick-start model.

For every seed the quick start is trained, then trained further from its weights, at a lower learning rate so
that curves stay together: once plainly, and once in each format of ``precision.qat``, on the same data. Three
held-out losses are compared: of the plain run; of its weights, rounded (``--evaluate-only`` with
``precision.qat``); and of the run that was rounded all along. The share that training gives back is
(rounded - trained) / (rounded - plain), of means over the seeds. It must be ``--limit`` or more.

    python benchmarks/qat.py --seeds 3 --jobs 3                                3 minutes on one H200
    python benchmarks/qat.py --seeds 3 --modules '["*.experts", "*_proj"]'     all projections
    python benchmarks/qat.py --tiny --formats int4                             a model of two layers
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = ("--model.hidden_size", "64", "--model.moe_intermediate_size", "64", "--model.num_hidden_layers", "2",
        "--data.seq_len", "64", "--train.global_batch_size", "8",
        "--train.micro_batch_size", "8")  # fmt: skip


def run(folder: Path, *arguments: str) -> float:
    """The held-out loss that ``train.py`` tells at its end."""
    command = [
        sys.executable,
        "train.py",
        "--config",
        "configs/quickstart.toml",
        "--train.eval_interval",
        "0",
    ]
    command += ["--train.eval_batches", "16", "--train.output_dir", str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    if "--evaluate-only" in arguments:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("held-out loss")]
        return float(line.split()[2].rstrip(","))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (held_out,) = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return held_out


def losses(
    seed: int, formats: list[str], modules: str, lr: float, common: tuple[str, ...]
) -> dict[str, float]:
    """By what was done: begun, plain, FORMAT rounded, FORMAT trained."""
    found = {}
    common = (*common, "--train.seed", str(seed))
    with tempfile.TemporaryDirectory() as name:
        begun = Path(name) / "begun"
        found["begun"] = run(begun, *common)
        further = (*common, "--optim.lr", str(lr), "--checkpoint.load", str(begun / "checkpoints"),
                   "--checkpoint.load_only_model", "true")  # fmt: skip
        plain = Path(name) / "plain"
        found["plain"] = run(plain, *further)
        for kind in formats:
            qat = ("--precision.qat", kind, "--precision.qat_modules", modules)
            found[f"{kind} rounded"] = run(plain, *common, *qat, "--evaluate-only")
            found[f"{kind} trained"] = run(Path(name) / kind, *further, *qat)
    told = ", ".join(f"{what} {loss:.5f}" for what, loss in found.items())
    print(f"seed {seed}: {told}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run at a time")
    parser.add_argument("--formats", nargs="+", default=["int4", "mxfp4"])
    parser.add_argument("--modules", default='["*.experts"]', help="precision.qat_modules of all runs")
    parser.add_argument("--lr", type=float, default=2e-4, help="of the steps that are compared")
    parser.add_argument("--limit", type=float, default=0.5, help="share that training must give back")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers")
    options = parser.parse_args()
    common = ("--train.steps", str(options.steps), *(TINY if options.tiny else ()))
    with ThreadPoolExecutor(options.jobs) as pool:
        every = list(
            pool.map(
                lambda seed: losses(seed, options.formats, options.modules, options.lr, common),
                range(options.seeds),
            )
        )
    means = {what: statistics.mean(each[what] for each in every) for what in every[0]}
    is_enough = True
    print(f"\n{'held-out loss':<14}{'plain':>10}{'rounded':>10}{'trained':>10}{'given back':>12}")
    for kind in options.formats:
        plain, rounded, trained = means["plain"], means[f"{kind} rounded"], means[f"{kind} trained"]
        share = (rounded - trained) / (rounded - plain)
        is_enough &= share >= options.limit
        print(f"{kind:<14}{plain:>10.5f}{rounded:>10.5f}{trained:>10.5f}{share:>12.0%}")
    print(f"at least {options.limit:.0%} is given back: {'yes' if is_enough else 'NO'}")
    return 0 if is_enough else 1


if __name__ == "__main__":
    sys.exit(main())
