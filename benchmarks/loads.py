"""How unevenly does routing load ranks? Recorded while models train, by three routers.

One process trains a small model and records where every token goes in a few steps after each stage (4,096
tokens a step). Printed for each number of EP ranks, in even shares: what the busiest rank of a layer gets
(median, 99th percentile, largest, over layers and steps), its mean, which the time of a step follows, and
what one rank gets over all layers at most, which its memory follows. The last two are what
``python -m fsdmoe.plan --loads`` takes.

    python benchmarks/loads.py                                   nine runs of 2,005 steps: hours on a CPU
    python benchmarks/loads.py --experts 64 --stages 50 500
    python benchmarks/loads.py --keep runs/loads                 and keep the recordings, for replay and plans
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from flex_rows import BIAS, LOSS, NONE, SETTINGS
from timing import ROOT, child_environment

from fsdmoe.experts.routing_file import Recording
from fsdmoe.plan.loads import skew_of

ROUTERS = {"auxiliary loss 0.01": LOSS, "bias 0.001": BIAS, "nothing balances": NONE}
TOP_K = 8
RANKS = (8, 16, 32, 64)
RECORDED = 5
"""Steps after each stage."""


def train(folder: Path, steps: int, num_experts: int, options: list[str], record: Path | None) -> None:
    """Go on to so many steps, from where the run in ``folder`` is."""
    config = folder / "run.toml"
    config.write_text(SETTINGS.replace("interval = -1", "interval = 0"))  # saved at the end
    given = ["--config", str(config), *options, "--train.output_dir", str(folder / "run")]
    given += ["--model.num_experts", str(num_experts), "--model.num_experts_per_tok", str(TOP_K)]
    given += ["--train.steps", str(steps), "--optim.schedule", "constant"]
    given += [] if record is None else ["--experts.record", str(record)]
    command = [sys.executable, str(ROOT / "train.py"), *given]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def row(loads_SLE: torch.Tensor, ep: int) -> list[str]:
    by_rank_SLP = loads_SLE.double().unflatten(2, (ep, -1)).sum(3)
    busiest_SL = ep * by_rank_SLP.amax(2) / by_rank_SLP.sum(2)
    quantiles = torch.quantile(busiest_SL.flatten(), torch.tensor([0.5, 0.99, 1.0]).double()).tolist()
    return [f"{each:.2f}" for each in (*quantiles, *skew_of(loads_SLE, ep))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--stages", type=int, nargs="+", default=[50, 500, 2000], help="steps, ascending")
    parser.add_argument("--keep", type=Path, help="folder for the recordings")
    arguments = parser.parse_args()
    print("| router | experts | step | ep | median | 99 % | largest | mean | one rank |\n|" + " --- |" * 9)
    for name, options in ROUTERS.items():
        for num_experts in arguments.experts:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                for stage in arguments.stages:
                    kept = arguments.keep or folder
                    recorded = kept / f"{name.split()[0]}-{num_experts}-{stage}"
                    train(folder, stage, num_experts, options, None)
                    train(folder, stage + RECORDED, num_experts, options, recorded)
                    loads_SLE = Recording.open(recorded).loads()
                    for ep in (each for each in RANKS if num_experts % each == 0):
                        cells = " | ".join(row(loads_SLE, ep))
                        print(f"| {name} | {num_experts} | {stage} | {ep} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
