"""``train.deterministic``: are runs equal to the last bit, also when resumed, and what does that cost?

A MoE of 8 layers on packed rows of 2,048 tokens, in bf16 and in fp8, without graphs. For each: 50 steps twice
and 25 steps resumed from a checkpoint, with ``train.deterministic``; weights and moments of all three must
have the same bits. Two runs without the key say what is lost without it, and what a step takes then.

    python benchmarks/deterministic.py            about 80 s on one H200
    python benchmarks/deterministic.py --tiny     on a CPU, to see that it works
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import require_gpu

from fsdmoe import train as program
from fsdmoe.config import load_config, start_meshes
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.kernels.backend import use_fixed_order
from fsdmoe.mesh import Meshes

ROOT = Path(__file__).parent.parent
LARGE = {
    "model.hidden_size": "1024", "model.num_hidden_layers": "8", "model.num_attention_heads": "8",
    "model.num_key_value_heads": "4", "model.head_dim": "128", "model.num_experts": "16",
    "model.num_experts_per_tok": "4", "model.moe_intermediate_size": "512", "data.seq_len": "2048",
    "train.global_batch_size": "16", "train.micro_batch_size": "8", "optim.warmup_steps": "5",
}  # fmt: skip
TINY = {
    "precision.param_dtype": "float32",
    "model.hidden_size": "128", "model.num_hidden_layers": "1", "model.moe_intermediate_size": "128",
    "data.seq_len": "64", "train.global_batch_size": "4", "train.micro_batch_size": "2",
}  # fmt: skip
PRECISIONS = {
    "bf16": {"precision.param_dtype": "bfloat16"},
    "fp8": {
        "precision.param_dtype": "bfloat16", "precision.recipe": "fp8_blockwise",
        "precision.quantized_weights": "True",
    },
}  # fmt: skip
Bits = list[torch.Tensor]


class Outcome(NamedTuple):
    """What a run left behind, and the median seconds of its steps."""

    bits: Bits
    seconds: float


class Bench:
    """Runs of one precision."""

    def __init__(self, precision: str, folder: Path, args: argparse.Namespace) -> None:
        self._keys = {
            "train.steps": str(args.steps), "train.eval_interval": "-1", "checkpoint.interval": "-1",
            "observe.tensorboard": "False",
        }  # fmt: skip
        self._keys |= PRECISIONS[precision] | (TINY if args.tiny else LARGE)
        if args.tiny and precision == "fp8":
            self._keys |= {"precision.emulate": "True"}
        self._folder, self._steps = folder, args.steps
        self._meshes: Meshes | None = None

    def run(self, name: str, *, deterministic: bool, load: str = "none", save_at: int = 0) -> Outcome:
        """From the start, or from the checkpoint ``load``, to the end."""
        if deterministic:
            use_fixed_order()
        else:
            torch.use_deterministic_algorithms(False)
        keys = self._keys | {
            "train.deterministic": str(deterministic), "checkpoint.load": load,
            "train.output_dir": str(self._folder / name),
        }  # fmt: skip
        given = ["--config", str(ROOT / "configs/quickstart.toml"), *(f"--{k}={v}" for k, v in keys.items())]
        with contextlib.redirect_stdout(None):
            config = load_config(given).config
            self._meshes = self._meshes or start_meshes(config)
            outcome = self._step(program.Run(config, self._meshes), save_at)
        gc.collect()
        return outcome

    def _step(self, run: program.Run, save_at: int) -> Outcome:
        times = []
        while run.progress["step"] < self._steps:
            began = time.perf_counter()
            run.train_step()
            times.append(time.perf_counter() - began)
            if run.progress["step"] == save_at:
                run.checkpoints.save(save_at, run.state(), in_background=False)
        bits = [_local(each) for each in run.model.parameters()]
        for state in run.optimizer.state.values():
            bits += [_local(each) for each in state.values() if isinstance(each, torch.Tensor)]
        run.checkpoints.close()
        run.close("finished")
        return Outcome(bits, statistics.median(times[len(times) // 3 :]))

    def checkpoint(self, name: str, step: int) -> str:
        return str(self._folder / name / f"checkpoints/step_{step:08d}")


def _local(tensor: Any) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
    return whole.detach().cpu().contiguous().clone()


def num_different(one: Bits, other: Bits) -> int:
    """Tensors whose bits are not the same."""
    pairs = zip(one, other, strict=True)
    return sum(not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in pairs)


def compare(precision: str, args: argparse.Namespace) -> bool:
    """Print a row; whether all deterministic runs have the same bits."""
    half = args.steps // 2
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(precision, Path(folder), args)
        whole = bench.run("whole", deterministic=True, save_at=half)
        again = bench.run("again", deterministic=True)
        resumed = bench.run("resumed", deterministic=True, load=bench.checkpoint("whole", half))
        free = bench.run("free", deterministic=False)
        free_again = bench.run("free again", deterministic=False)
    found = [num_different(whole.bits, other.bits) for other in (again, resumed)]
    price = again.seconds / free_again.seconds - 1
    print(
        f"| {precision} | {len(whole.bits)} | {found[0]} | {found[1]} "
        f"| {num_different(free.bits, free_again.bits)} | {free_again.seconds * 1e3:.1f} "
        f"| {again.seconds * 1e3:.1f} | {price:+.1%} |",
        flush=True,
    )
    return not any(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--tiny", action="store_true", help="a small model, 4 steps")
    args = parser.parse_args()
    args.steps = 4 if args.tiny else args.steps
    if not args.tiny:
        require_gpu("try --tiny")
    print(f"{args.steps} steps; tensors (weights and moments) that differ:\n")
    print("| precision | tensors | rerun | resumed | rerun without the key | ms | with the key | price |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    results = [compare(precision, args) for precision in args.precisions]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
