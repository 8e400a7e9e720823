"""What small and far optimizer states cost and save: a step's time and its peak memory on one GPU.

Qwen3-30B-A3B shapes, 8 layers, 4 x 4096 tokens a micro-batch, weights and gradients in bf16, gradients
clipped. The model is built once; every row has an optimizer of its own, a few steps to warm up and a few that
are timed together, without waiting between them: on the stream that computes, from the end of a step to the
end of a later one. Moments of the last step are still on their way then, as those of the step before the
first were.

    python benchmarks/optimizer_state.py              under two minutes on one H200
    python benchmarks/optimizer_state.py --rows 1 3   some rows; those with moments on the device come first
    python benchmarks/optimizer_state.py --tiny       on a CPU in fp32, to see that it works

``host`` is what of the moments lives in host memory, ``ring`` the device memory that they are stepped in (by
``prefetch``, the share of ``host`` that it holds). ``speed`` refers to bf16 moments on the device with as
many micro-batches.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from timing import require_gpu, wait
from torch import nn

from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.models import ModelConfig, build_model, preset_config
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.optim.moments import MomentFormat
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

FORMATS: dict[str, MomentFormat] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": "float8"}
ROWS = [
    ("float32", 0.0, 0.0, 1), ("bfloat16", 0.0, 0.0, 1), ("bfloat16", 0.0, 0.0, 2), ("float8", 0.0, 0.0, 1),
    ("bfloat16", 0.35, 0.65, 1), ("bfloat16", 0.35, 0.5, 1), ("bfloat16", 0.35, 0.25, 1),
    ("bfloat16", 0.6, 0.75, 2), ("bfloat16", 0.6, 0.65, 2), ("float8", 0.6, 0.6, 1), ("float8", 0.6, 0.45, 1),
]  # fmt: skip
"""Format, share on the host, share of that in the ring, micro-batches."""
WARM_UP = 3
GIB = 2**30


@dataclass
class Row:
    """The figures of one setting."""

    ms: float
    peak_gib: float
    host_gib: float
    ring_gib: float


Instant = torch.cuda.Event | float


def instant(device: torch.device) -> Instant:
    """Now, on the stream that computes, or on the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))


def milliseconds_between(began: Instant, ended: Instant) -> float:
    if isinstance(began, float):
        assert isinstance(ended, float)
        return (ended - began) * 1e3
    assert isinstance(ended, torch.cuda.Event)
    return began.elapsed_time(ended)


def measure(model: nn.Module, tokens: torch.Tensor, optimizer: AdamW, times: int, steps: int) -> Row:
    """Step ``model``, with so many micro-batches a step."""
    device, began = tokens.device, None
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = instant(device)
        for index in range(times):
            with engine_of(model).micro_batch(last=index == times - 1):
                model(tokens, labels_BS=tokens).loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ended = instant(device)
    wait(device)
    assert began is not None
    ms = milliseconds_between(began, ended) / steps
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    held = optimizer.moment_bytes
    return Row(ms, peak / GIB, held.host / GIB, held.staging / GIB)


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
    parser.add_argument("--steps", type=int, default=8, help="timed")
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(len(ROWS))))
    parser.add_argument("--main-dtype", choices=("float32", "bfloat16"), help="of main weights and gradients")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny:
        require_gpu("try --tiny")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    if args.tiny:
        args.batch, args.length, args.steps = 2, 16, 2
    name, layers = ("tiny-qwen3", {}) if args.tiny else ("qwen3-30b-a3b", {"num_hidden_layers": args.layers})
    config = preset_config(name, **layers)
    model = build(config, args)
    tokens = torch.randint(0, config.vocab_size, (args.batch, args.length), device=device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {args.batch} x {args.length} tokens")
    print(f"{'moments':10}{'offload':>9}{'prefetch':>10}{'micro':>7}{'ms':>9}{'speed':>8}{'peak GiB':>10}"
          f"{'host GiB':>10}{'ring GiB':>10}")  # fmt: skip
    references: dict[int, float] = {}
    for index in args.rows:
        kept, share, prefetched, times = ROWS[index]
        optimizer = AdamW(
            model,
            lr=1e-5,
            betas=(0.9, 0.95),
            moment_dtype=FORMATS[kept],
            state_offload=share,
            state_prefetch=prefetched,
        )
        row = measure(model, tokens, optimizer, times, args.steps)
        del optimizer
        gc.collect()  # its state, before the next one's is made
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if (kept, share) == ("bfloat16", 0.0):
            references[times] = row.ms
        speed = f"{references[times] / row.ms:.3f}" if times in references else "-"
        print(f"{kept:10}{share:9.2f}{prefetched:10.2f}{times:7}{row.ms:9.1f}{speed:>8}{row.peak_gib:10.2f}"
              f"{row.host_gib:10.2f}{row.ring_gib:10.2f}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
