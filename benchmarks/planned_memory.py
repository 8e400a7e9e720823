"""Planned against measured: the peak of device memory in training steps of one GPU, setting by setting.

Each setting trains by the loop of ``train.py`` in a process of its own, three steps; what torch allocates at
the peak is held against the plan of the same configuration (``python -m fsdmoe.plan``, ``--dry-run``) without
the CUDA context and the allocator's slack, which torch does not count.

    python benchmarks/planned_memory.py --json planned.json
    python benchmarks/planned_memory.py --only 0 3
    python benchmarks/planned_memory.py --tiny                on a CPU: plans alone, to see that it works
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fsdmoe.config import Config, build_config
from fsdmoe.mesh import build_meshes
from fsdmoe.plan.estimate import estimate
from fsdmoe.plan.hardware import GPUS
from fsdmoe.plan.job import Job, Setting

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
QWEN = {"preset": "qwen3-30b-a3b", "num_hidden_layers": 8}
LONG_QWEN = {"preset": "qwen3-30b-a3b", "num_hidden_layers": 24}
MIXTRAL = {"preset": "mixtral-8x7b", "num_hidden_layers": 2}
DEEPSEEK = {"preset": "deepseek-v3", "num_hidden_layers": 4, "first_k_dense_replace": 3, "num_experts": 32,
            "num_nextn_predict_layers": 0}  # fmt: skip
LEAN = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "main_dtype": "bfloat16"}
MOVED = ["layer_input", "mlp_norm_input", "attention_output"]

SETTINGS: list[tuple[str, int, dict[str, dict[str, Any]]]] = [
    ("30B-A3B, 8 layers", 4, {"model": QWEN}),
    ("30B-A3B, 8 layers, norms", 4, {"model": QWEN, "memory": {"recompute": ["norms"]}}),
    ("30B-A3B, 8 layers, norms, router, experts", 4,
     {"model": QWEN, "memory": {"recompute": ["norms", "router", "experts"]}}),
    ("30B-A3B, 8 layers, layer", 4, {"model": QWEN, "memory": {"recompute": ["layer"]}}),
    ("30B-A3B, 8 layers, offload", 4, {"model": QWEN, "memory": {"offload": MOVED}}),
    ("30B-A3B, 8 layers, bf16 moments", 2, {"model": QWEN, "optim": {"moment_dtype": "bfloat16"}}),
    ("30B-A3B, 24 layers, all bf16, norms", 1,
     {"model": LONG_QWEN, "precision": LEAN, "optim": {"moment_dtype": "bfloat16"},
      "memory": {"recompute": ["norms"]}}),
    ("30B-A3B, 24 layers, all bf16, layer", 2,
     {"model": LONG_QWEN, "precision": LEAN, "optim": {"moment_dtype": "bfloat16"},
      "memory": {"recompute": ["layer"]}}),
    ("Mixtral 8x7B, 2 layers, norms", 2, {"model": MIXTRAL, "memory": {"recompute": ["norms"]}}),
    ("Mixtral 8x7B, 2 layers", 2, {"model": MIXTRAL}),
    ("DeepSeek-V3, 4 layers, 32 experts", 1, {"model": DEEPSEEK}),
    ("DeepSeek-V3, 4 layers, norms, mla_up", 1,
     {"model": DEEPSEEK, "memory": {"recompute": ["norms", "mla_up"]}}),
]  # fmt: skip


def config_of(index: int, tiny: bool, folder: str) -> Config:
    _, batch, given = SETTINGS[index]
    settings: dict[str, Any] = {name: dict(section) for name, section in given.items()}
    settings["data"] = {"seq_len": 64 if tiny else 4096}
    settings["train"] = {
        "micro_batch_size": batch, "global_batch_size": batch, "steps": 3, "eval_interval": -1,
        "output_dir": folder,
    }  # fmt: skip
    settings["observe"] = {"tensorboard": False}
    settings["checkpoint"] = {"interval": -1}
    problems: list[str] = []
    config = build_config(settings, {}, 1, problems)
    if config is None:
        raise SystemExit("\n".join(problems))
    return config


def measure(config: Config) -> dict[str, float]:
    """In this process, whose GPU is otherwise empty."""
    sys.path.insert(0, str(ROOT))
    from train import Run

    run = Run(config, build_meshes(config.mesh))
    for _ in range(3):
        run.train_step()
    torch.cuda.synchronize()
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    run.data.close()
    return {name: value / GIB for name, value in found.items()}


def planned(config: Config) -> float:
    memory = estimate(Job.of(config), Setting.of(config, 1), GPUS["h200"]).memory
    return (memory.total - memory.context - memory.slack) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, nargs="*", default=list(range(len(SETTINGS))))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.serve is not None:
            print("FOUND " + json.dumps(measure(config_of(args.serve, False, folder))))
            return
        rows = []
        print("| setting | tokens | planned GiB | measured GiB | planned / measured | reserved GiB |")
        print("| --- | --- | --- | --- | --- | --- |")
        for index in args.only:
            name, batch, _ = SETTINGS[index]
            plan = planned(config_of(index, args.tiny, folder))
            row: dict[str, Any] = {"setting": name, "planned": plan}
            if not args.tiny:
                row |= _measured(index)
            allocated, reserved = row.get("allocated", float("nan")), row.get("reserved", float("nan"))
            print(f"| {name} | {batch} x 4096 | {plan:.2f} | {allocated:.2f} | {plan / allocated:.3f} "
                  f"| {reserved:.2f} |", flush=True)  # fmt: skip
            rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def _measured(index: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(index)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not found:
        print(done.stdout[-1500:] + done.stderr[-1500:], file=sys.stderr)
        return {}
    result: dict[str, float] = json.loads(found[0].removeprefix("FOUND "))
    return result


if __name__ == "__main__":
    main()
