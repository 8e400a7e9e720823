"""What small and far optimizer states cost and save: a step's time and its peak memory on one GPU.

Qwen3-30B-A3B shapes, 8 layers, 4 x 4096 tokens, weights and gradients in bf16, gradients clipped. The model
is built once; every row has an optimizer of its own, a few steps to warm up and a few that are timed.

    python benchmarks/optimizer_state.py              under two minutes on one H200
    python benchmarks/optimizer_state.py --tiny       on a CPU in fp32, to see that it works

``host`` is what of the moments lives in host memory, ``optimizer`` what a step of the optimizer alone takes,
until the last copy is back. ``speed`` refers to bf16 moments on the device; the last column is the rate at
which moments cross the link, if the optimizer's step were nothing else.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from timing import wait
from torch import nn

from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.models import ModelConfig, build_model, preset_config
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.optim.moments import MomentFormat
from fsdmoe.parallel import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

FORMATS: dict[str, MomentFormat] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": "float8"}
ROWS = [
    ("float32", 0.0), ("bfloat16", 0.0), ("float8", 0.0), ("bfloat16", 0.35), ("bfloat16", 0.6),
    ("float8", 0.35), ("float8", 0.6),
]  # fmt: skip
GIB = 2**30


@dataclass
class Row:
    """The figures of one setting."""

    kept: str
    share: float
    ms: float
    optimizer_ms: float
    peak_gib: float
    host_gib: float


def measure(model: nn.Module, tokens: torch.Tensor, kept: str, share: float, steps: int) -> Row:
    """Step ``model`` with an optimizer that keeps its moments so."""
    device = tokens.device
    optimizer = AdamW(model, lr=1e-5, moment_dtype=FORMATS[kept], state_offload=share)
    whole: list[float] = []
    alone: list[float] = []
    for number in range(3 + steps):
        if number == 3 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait(device)
        began = time.perf_counter()
        with engine_of(model).micro_batch(last=True):
            model(tokens, labels_BS=tokens).loss.backward()
        clip_grad_norm(model, 1.0)
        is_probe = number % 2 == 0  # every other step waits in its middle, and is not timed as a whole
        if is_probe:
            wait(device)
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        if number >= 3:
            (alone if is_probe else whole).append(time.perf_counter() - (middle if is_probe else began))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    host = optimizer.moment_bytes.host
    ms, optimizer_ms = (statistics.median(times) * 1e3 for times in (whole, alone))
    return Row(kept, share, ms, optimizer_ms, peak / GIB, host / GIB)


def build(config: ModelConfig, args: argparse.Namespace) -> nn.Module:
    dtype = "float32" if args.tiny else "bfloat16"
    formats: dict[str, Any] = dict.fromkeys(("param_dtype", "reduce_dtype", "main_dtype"), dtype)
    formats["main_dtype"] = args.main_dtype or dtype
    policy = ParallelPolicy(precision=PrecisionConfig(**formats), grad_divisor=1.0, initializer_range=0.02)
    return parallelize(build_model(config), build_meshes(), policy)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8, help="timed, half of them for the optimizer alone")
    parser.add_argument("--main-dtype", choices=("float32", "bfloat16"), help="of main weights and gradients")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    if args.tiny:
        args.batch, args.length, args.steps = 2, 16, 2
    name, layers = ("tiny-qwen3", {}) if args.tiny else ("qwen3-30b-a3b", {"num_hidden_layers": args.layers})
    config = preset_config(name, **layers)
    model = build(config, args)
    tokens = torch.randint(0, config.vocab_size, (args.batch, args.length), device=device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {args.batch} x {args.length} tokens")
    print(f"{'moments':10}{'offload':>9}{'ms':>9}{'speed':>8}{'optimizer ms':>14}{'peak GiB':>10}"
          f"{'host GiB':>10}{'GB/s in':>9}")  # fmt: skip
    reference = 0.0
    for kept, share in ROWS:
        row = measure(model, tokens, kept, share, args.steps)
        gc.collect()  # the optimizer's state, before the next one's is made
        if device.type == "cuda":
            torch.cuda.empty_cache()
        reference = row.ms if (kept, share) == ("bfloat16", 0.0) else reference
        speed = f"{reference / row.ms:.3f}" if reference else "-"
        rate = row.host_gib * GIB / row.optimizer_ms / 1e6
        print(f"{kept:10}{share:9.2f}{row.ms:9.1f}{speed:>8}{row.optimizer_ms:14.1f}{row.peak_gib:10.2f}"
              f"{row.host_gib:10.2f}{rate:9.1f}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
