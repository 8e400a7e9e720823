"""How large must the buffers of ``flex`` be? Routing of runs that train, as ranks would have received it.

Short runs of one process record where every token of every layer goes, one micro-batch of 4,096 tokens a
step. For each step, layer and number of EP ranks the rows and the (row, expert) pairs of the busiest rank are
then compared with an even share, as ``experts.flex.rows`` does: the larger of both is what the key would
have to be for that exchange to fit. Printed: the median, the 99th percentile and the largest, and the share
of steps that would have been run again with several values of the key. Without clones of experts, and with
two slots a rank for them.

    python benchmarks/flex_rows.py                 four runs, some ten minutes on one core
    python benchmarks/flex_rows.py --steps 20
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from timing import ROOT, child_environment
from torch import Tensor

from fsdmoe.experts.balance import count_choices
from fsdmoe.experts.dispatch import ClonePolicy
from fsdmoe.experts.dispatch.cloning import NO_CLONES
from fsdmoe.experts.dispatch.volume import ExpertLayout
from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.clone_plan import place_choices, plan_clones
from fsdmoe.kernels.permute import group_assignments
from fsdmoe.kernels.send_order import index_rows

RANKS, BOUNDS = (2, 4, 8), (1.25, 1.5, 2.0, 3.0)
SLOTS = (0, 2)
FEW, MANY = (8, 2), (64, 8)
NONE, LOSS, BIAS = (
    ["--experts.balance.sequence", "0"],
    ["--experts.balance.sequence", "0.01"],
    ["--experts.balance.sequence", "0", "--experts.balance.bias_rate", "0.001"],
)
RUNS = {
    "top 2 of 8, auxiliary loss 0.01": (FEW, LOSS),
    "top 8 of 64, auxiliary loss 0.01": (MANY, LOSS),
    "top 8 of 64, bias 0.001": (MANY, BIAS),
    "top 8 of 64, nothing balances": (MANY, NONE),
}
SETTINGS = """
[model]
preset = "tiny-qwen3"
vocab_size = 264
[data]
kind = "python-stdlib"
seq_len = 256
[precision]
param_dtype = "float32"
[optim]
lr = 2e-3
warmup_steps = 20
[train]
global_batch_size = 16
micro_batch_size = 16
eval_interval = 0
[checkpoint]
interval = -1
[observe]
tensorboard = false
progress = "off"
"""


def record(folder: Path, steps: int, num_experts: int, top_k: int, options: list[str]) -> list[Tensor]:
    """Train; the experts of every step's tokens, ``[T, L, K]``."""
    config = folder / "run.toml"
    config.write_text(SETTINGS)
    given = ["--config", str(config), "--experts.record", str(folder / "routing"), *options]
    given += ["--model.num_experts", str(num_experts), "--model.num_experts_per_tok", str(top_k)]
    given += ["--train.output_dir", str(folder / "run"), "--train.steps", str(steps)]
    command = [sys.executable, str(ROOT / "train.py"), *given]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [load_file(path)["ids"] for path in sorted((folder / "routing").glob("*.safetensors"))]


def needed_rows(ids_TK: Tensor, num_experts: int, ep: int, clones: ClonePolicy = NO_CLONES) -> float:
    """What ``experts.flex.rows`` must be at least for these tokens of all ranks."""
    num_tokens, top_k = ids_TK.shape
    with kernels("torch"):
        placed_TK = placed(ids_TK.long(), num_experts, ep, clones) if clones.slots else ids_TK.long()
        counts_C = index_rows(placed_TK, ep, num_experts // ep + clones.slots)[-1]
    pairs = int(counts_C[ep : 2 * ep].max()) / (num_tokens * top_k / ep)
    if clones.slots:
        return pairs  # buffers hold as many rows
    rows = int(counts_C[:ep].max()) / (num_tokens * ExpertLayout(num_experts, top_k, ep).rank_probability)
    return max(rows, pairs)


def placed(ids_TK: Tensor, num_experts: int, ep: int, clones: ClonePolicy) -> Tensor:
    """Ids with clones; every rank has the same number of tokens."""
    parts = ids_TK.tensor_split(ep)
    counts_PE = torch.stack([count_choices(part, num_experts).flatten().int() for part in parts])
    plan = plan_clones(counts_PE, clones.slots, clones.least_rows)
    found = [
        place_choices(part, group_assignments(part, num_experts), counts_PE, plan, rank)
        for rank, part in enumerate(parts)
    ]
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--settled", type=int, default=20, help="steps that are shown apart")
    arguments = parser.parse_args()
    stages = {f"to {arguments.settled}": slice(arguments.settled), "then": slice(arguments.settled, None)}
    again = " | ".join(f"again at {bound:g}" for bound in BOUNDS)
    print(
        f"| run | ep | clones | steps | median | 99 % | largest | {again} |\n|{' --- |' * (7 + len(BOUNDS))}"
    )
    for name, ((num_experts, top_k), options) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            steps = record(Path(folder), arguments.steps, num_experts, top_k, options)
        for ep, slots in itertools.product(RANKS, SLOTS):
            clones = ClonePolicy(slots)
            needed_SL = torch.tensor(
                [
                    [needed_rows(ids_TK, num_experts, ep, clones) for ids_TK in step.unbind(1)]
                    for step in steps
                ]
            )
            for stage, some in stages.items():
                quantiles = torch.quantile(needed_SL[some].flatten(), torch.tensor([0.5, 0.99, 1.0])).tolist()
                repeated = [(needed_SL[some].amax(1) > bound).float().mean().item() for bound in BOUNDS]
                cells = [f"{each:.2f}" for each in quantiles] + [f"{each:.0%}" for each in repeated]
                print(f"| {name} | {ep} | {slots} | {stage} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
