"""Adapters on Qwen3-30B-A3B, all 48 layers, on one GPU: the memory that it takes, and tokens per second.

Random weights, LoRA on attention and on all experts, 1 x 4,096 tokens a step, every layer recomputed in
backward. Frozen weights are kept once, in bfloat16 (57 GiB), or in fp8 with --base float8 (29 GiB); factors
have float32 main weights, gradients and moments. Printed are the peaks of torch's allocator while the model
is built and while it steps, both against what the dry run plans.

    python benchmarks/adapters.py [--base float8] [--rank 8] [--steps 8] [--json out.json]
    python benchmarks/adapters.py --tiny         the same on a CPU in seconds, to see that it works
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import milliseconds, wait

from fsdmoe.auto_model import kind_of
from fsdmoe.frozen_layers import keep_frozen_in_fp8
from fsdmoe.fsdp import FSDPPolicy
from fsdmoe.fsdp.memory_plan import PlannedMeshes, plan_memory
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.huggingface.planned import split_wrapped
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import MeshConfig, build_meshes, resolve_degrees
from fsdmoe.optim import AdamW
from fsdmoe.parallel import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FOLDER = Path(__file__).parent.parent / "configs/qwen3-30b-a3b"
TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128,
    "num_hidden_layers": 2,
}  # fmt: skip


def policy_of(settings: argparse.Namespace) -> ParallelPolicy:
    dtype: Any = "bfloat16" if DEVICE.type == "cuda" else "float32"
    return ParallelPolicy(
        precision=PrecisionConfig(param_dtype=dtype, frozen_dtype=settings.base),
        memory=MemoryConfig(recompute=("layer",)),
    )


def planned_bytes(folder: str, adapter: AdapterConfig, policy: ParallelPolicy) -> int:
    """What engine and optimizer are to hold; activations come on top."""
    model, degrees = build_folder_model(folder, adapter), resolve_degrees(MeshConfig(), 1)
    experts = split_wrapped(model, PlannedMeshes(degrees))
    keep_frozen_in_fp8(model, policy.precision, PlannedMeshes(degrees), experts)
    return plan_memory(model, degrees, FSDPPolicy(fsdp=policy.fsdp, precision=policy.precision)).total


def peak_gib() -> tuple[float, float]:
    """Allocated and reserved since the last call."""
    if DEVICE.type != "cuda":
        return 0.0, 0.0
    found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return found[0] / 2**30, found[1] / 2**30


def measure(settings: argparse.Namespace, folder: str) -> dict[str, Any]:
    adapter, policy = AdapterConfig(rank=settings.rank), policy_of(settings)
    meshes, began = build_meshes(), time.perf_counter()
    peak_gib()
    model = build_folder_model(folder, adapter)
    parallelize(model, meshes, policy)
    optimizer, decoder = AdamW(model, lr=1e-4), kind_of(model).causal_lm()
    wait(DEVICE)
    built, built_peak = time.perf_counter() - began, peak_gib()
    config: Any = model.config
    random = torch.Generator().manual_seed(0)
    size = (1, 64 if settings.tiny else settings.tokens)
    tokens = torch.randint(0, config.vocab_size, size, generator=random).to(DEVICE)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    losses = []

    def step() -> None:
        out = decoder(tokens, labels_BS=tokens, loss_mask_BS=mask)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.cross_entropy.detach())

    milliseconds(step, settings.warm_up, DEVICE)
    peak_gib()
    times = [milliseconds(step, 1, DEVICE) for _ in range(settings.steps)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": trained,
        "planned_gib": planned_bytes(folder, adapter, policy) / 2**30,
        "built_s": built,
        "built_peak_gib": built_peak,
        "peak_gib": peak_gib(),
        "step_ms": times,
        "tokens_per_s": tokens.numel() / statistics.median(times) * 1e3,
        "losses": [losses[0].item(), losses[-1].item()],
    }


def report(found: dict[str, Any]) -> None:
    print(
        f"{found['parameters'] / 1e9:.2f} B parameters, {found['trained'] / 1e6:.1f} M of them trained; "
        f"engine and optimizer hold {found['planned_gib']:.1f} GiB by plan"
    )
    for what, (allocated, reserved) in {
        f"building it ({found['built_s']:.0f} s)": found["built_peak_gib"],
        "its steps": found["peak_gib"],
    }.items():
        print(f"peak of {what:22s} allocated {allocated:6.1f} GiB   reserved {reserved:6.1f} GiB")
    times = found["step_ms"]
    print(
        f"{len(times)} steps, median {statistics.median(times):.0f} ms "
        f"({min(times):.0f} to {max(times):.0f}): {found['tokens_per_s']:.0f} tokens/s; "
        f"loss {found['losses'][0]:.4f} to {found['losses'][1]:.4f}"
    )
    print(f"within 80 GiB: {'yes' if found['peak_gib'][1] < 80 else 'no'}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--base", choices=["float8"], help="of frozen weights; default: bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8, help="that are timed")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU where there is no GPU")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}")
    with tempfile.TemporaryDirectory() as tiny:
        config = json.loads((FOLDER / "config.json").read_text())
        Path(tiny, "config.json").write_text(json.dumps(config | TINY))
        found = measure(settings, tiny if settings.tiny else str(FOLDER))
    report(found)
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
