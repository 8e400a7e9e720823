"""A hybrid model wrapped with one call, against the same model as transformers runs it, on one GPU.

Qwen3-Next-80B-A3B shapes, 4 layers (three of gated delta rule, one of attention), 4 x 4096 tokens, bf16
weights, gradients and moments in both. Gated delta rule and convolutions are computed by
``flash-linear-attention`` and ``causal-conv1d`` in both, where these packages are installed: transformers
takes them by itself, and the first line says whether it does. The models are built one after the other, since
both with their states do not fit. Each trains on the same tokens, so that losses can be compared step by
step, and whole steps are timed.

    python benchmarks/hybrid.py [--batch 4] [--rounds 5] [--modes eager compiled] [--json out.json]
    python benchmarks/hybrid.py --tiny           the same on a CPU in seconds, to see that it works

Needs the extra ``hf``, and for the kernels the wheels ``flash-linear-attention`` (with ``fla-core`` and
``einops``) and ``causal-conv1d``, built for the installed torch and CUDA.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_wrap import DEVICE, DTYPE, MODES, Contender
from timing import milliseconds, require_gpu
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

NAMES = ("transformers", "fsdmoe")
WARM_UP = 3
RATE = 1e-5
FULL: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def build(name: str, settings: argparse.Namespace) -> Contender:
    """The same random weights for every contender."""
    config = Qwen3NextConfig(**(TINY if settings.tiny else FULL), num_hidden_layers=settings.layers)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation="sdpa").train()
    if name == "transformers":
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        return Contender("plain", model, optimizer)
    dtype = str(DTYPE).removeprefix("torch.")
    precision = PrecisionConfig(param_dtype=dtype, main_dtype=dtype, reduce_dtype=dtype)  # type: ignore[arg-type]
    model = parallelize(model, build_meshes(), ParallelPolicy(precision=precision))
    return Contender(
        "wrapped", model, AdamW(model, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, moment_dtype=DTYPE)
    )


def measure(name: str, settings: argparse.Namespace, tokens: torch.Tensor) -> dict[str, Any]:
    """Losses of the first steps; tokens a second by mode; the most memory."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    contender = build(name, settings)
    losses = []

    def step() -> None:
        losses.append(contender.forward_backward(tokens))
        contender.finish()

    speeds = {}
    for mode in settings.modes:
        contender.use(mode)
        milliseconds(step, WARM_UP, DEVICE)
        times = [milliseconds(step, settings.steps, DEVICE) for _ in range(settings.rounds)]
        speeds[mode] = tokens.numel() / statistics.median(times) * 1e3
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    first = [loss.item() for loss in losses[: WARM_UP + settings.steps]]
    return {"losses": first, "tokens_per_second": speeds, "peak_gib": peak}


def report(found: dict[str, Any]) -> None:
    for name, each in found.items():
        speeds = ", ".join(
            f"{mode} {speed:,.0f} tokens/s" for mode, speed in each["tokens_per_second"].items()
        )
        print(f"{name:14s} {speeds}; at most {each['peak_gib']:.1f} GiB")
        print(f"{'':14s} losses {' '.join(f'{loss:.4f}' for loss in each['losses'])}")
    plain, ours = (found[name] for name in NAMES)
    pairs = zip(plain["losses"], ours["losses"], strict=True)
    print(f"losses differ by at most {max(abs(a - b) / a for a, b in pairs):.1e} of theirs")
    best = [max(each["tokens_per_second"].values()) for each in (ours, plain)]
    print(f"fsdmoe at its best / transformers at its best: {best[0] / best[1]:.2f} (wanted: at least 1.5)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="rows of 4096 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row, per round")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU where there is no GPU")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    if not settings.tiny:
        require_gpu("try --tiny")
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    kernels = [is_flash_linear_attention_available(), is_causal_conv1d_available()]
    print(f"torch {torch.__version__}, {where}; flash-linear-attention, causal-conv1d: {kernels}")
    size = (1, 64) if settings.tiny else (settings.batch, 4096)
    random = torch.Generator().manual_seed(0)
    vocabulary = (TINY if settings.tiny else FULL)["vocab_size"]
    tokens = torch.randint(0, vocabulary, size, generator=random).to(DEVICE)
    found = {}
    for name in NAMES:
        found[name] = measure(name, settings, tokens)
        gc.collect()
        torch.cuda.empty_cache()
    report(found)
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
