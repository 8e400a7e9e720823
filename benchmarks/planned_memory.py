"""Planned against measured: the peak of memory and the time of training steps of one GPU, setting by setting.

Each setting trains three steps on random tokens; what torch allocates at the peak of the last two, less what
was there before the setting began, is held against the plan of the same configuration (``python -m
fsdmoe.plan``, ``--dry-run``) without the CUDA context and the allocator's slack, which torch does not count.
Six more steps are timed, from the wait for one gradient's norm to that for the next, as training waits; their
median is held against the planned time.
Weights are drawn on the GPU and all settings share a process, so that a setting takes a few seconds.

    python benchmarks/planned_memory.py --json planned.json
    python benchmarks/planned_memory.py --only 0 3
    python benchmarks/planned_memory.py --tiny                on a CPU: plans alone
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timing import require_gpu

from fsdmoe.config import Config, build_config
from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.optim import build_optimizer, clip_grad_norm
from fsdmoe.parallel.auto_model import as_causal_lm, build_any_model
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.plan.estimate import estimate
from fsdmoe.plan.hardware import GPUS
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.step_time import estimate_time

GIB = 2**30
MEMORY_STEPS, TIMED_STEPS = 3, 6
QWEN = {"preset": "qwen3-30b-a3b", "num_hidden_layers": 8}
LONG_QWEN = {"preset": "qwen3-30b-a3b", "num_hidden_layers": 24}
MIXTRAL = {"preset": "mixtral-8x7b", "num_hidden_layers": 2}
DEEPSEEK = {"preset": "deepseek-v3", "num_hidden_layers": 4, "first_k_dense_replace": 3, "num_experts": 32,
            "num_nextn_predict_layers": 0}  # fmt: skip
WRAPPED = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936,
    "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,    "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
LEAN = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "main_dtype": "bfloat16"}
ALL_BF16: dict[str, Any] = {"precision": LEAN, "optim": {"moment_dtype": "bfloat16"}}
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
    ("30B-A3B, 8 layers, fp8_blockwise", 4, {"model": QWEN, "precision": {"recipe": "fp8_blockwise"}}),
    ("30B-A3B, 8 layers, 8-bit moments", 4, {"model": QWEN, "optim": {"moment_dtype": "float8"}}),
    ("30B-A3B, 8 layers, 60 % of moments on the host", 4,
     {"model": QWEN, "optim": {"moment_dtype": "bfloat16", "state_offload": 0.6}}),
    ("transformers' Qwen3-MoE, 4 layers", 2, {"model": WRAPPED}),
    ("transformers' Qwen3-MoE, 4 layers, layer", 4, {"model": WRAPPED, "memory": {"recompute": ["layer"]}}),
    # from here on planned after the time of those above was known, and before their own was
    ("30B-A3B, 12 layers, all bf16", 2, {"model": QWEN | {"num_hidden_layers": 12}, **ALL_BF16}),
    ("30B-A3B, 16 layers, all bf16, layer", 4,
     {"model": QWEN | {"num_hidden_layers": 16}, **ALL_BF16, "memory": {"recompute": ["layer"]}}),
    ("30B-A3B, 8 layers, all bf16, rows of 16,384", 1,
     {"model": QWEN, **ALL_BF16, "data": {"seq_len": 16_384}}),
    ("30B-A3B, 8 layers, all bf16, attention, experts", 4,
     {"model": QWEN, **ALL_BF16, "memory": {"recompute": ["attention", "experts"]}}),
    ("235B-A22B, 2 layers", 2, {"model": {"preset": "qwen3-235b-a22b", "num_hidden_layers": 2}}),
    ("235B-A22B, 3 layers, all bf16, layer", 4,
     {"model": {"preset": "qwen3-235b-a22b", "num_hidden_layers": 3}, **ALL_BF16,
      "memory": {"recompute": ["layer"]}}),
    ("GLM-4.5-Air, 2 layers", 2, {"model": {"preset": "glm-4.5-air", "num_hidden_layers": 2}}),
    ("GLM-4.5-Air, 6 layers, all bf16, norms", 2,
     {"model": {"preset": "glm-4.5-air", "num_hidden_layers": 6}, **ALL_BF16,
      "memory": {"recompute": ["norms"]}}),
    ("gpt-oss-20b, 4 layers", 4, {"model": {"preset": "gpt-oss-20b", "num_hidden_layers": 4}}),
    ("Mixtral 8x7B, 4 layers, all bf16, layer", 4,
     {"model": MIXTRAL | {"num_hidden_layers": 4}, **ALL_BF16, "memory": {"recompute": ["layer"]}}),
    ("DeepSeek-V3, 5 layers, 32 experts, all bf16", 1,
     {"model": DEEPSEEK | {"num_hidden_layers": 5}, **ALL_BF16}),
    ("30B-A3B, 8 layers, fp8_blockwise, all bf16, layer", 4,
     {"model": QWEN, "precision": LEAN | {"recipe": "fp8_blockwise"}, "optim": ALL_BF16["optim"],
      "memory": {"recompute": ["layer"]}}),
    ("30B-A3B, 8 layers, all bf16, a few rows", 1, {"model": QWEN, **ALL_BF16}),
]  # fmt: skip


def config_of(index: int, folder: str) -> Config:
    _, batch, given = SETTINGS[index]
    settings: dict[str, Any] = {name: dict(section) for name, section in given.items()}
    if settings["model"] == WRAPPED:
        settings["model"] = {"hf": folder}
        (Path(folder) / "config.json").write_text(json.dumps(WRAPPED))
    if "recipe" in settings.get("precision", {}) and not torch.cuda.is_available():
        settings["precision"]["emulate"] = True  # there are no kernels; a plan needs none
    settings.setdefault("data", {"seq_len": 4096})
    settings["train"] = {"micro_batch_size": batch, "global_batch_size": batch, "output_dir": folder}
    problems: list[str] = []
    config = build_config(settings, {}, 1, problems, needs_data=False)
    if config is None:
        raise SystemExit("\n".join(problems))
    return config


def measure(config: Config, meshes: Meshes) -> dict[str, float]:
    """GiB at the peak and as they stand between steps, and milliseconds a step."""
    device, before = meshes.device, torch.cuda.memory_allocated()
    policy = ParallelPolicy.from_config(config)
    model = parallelize(build_any_model(config.model, config.experts)[0], meshes, policy)
    decoder, optimizer = as_causal_lm(model), build_optimizer(model, config.optim)
    shape = (config.train.micro_batch_size, config.data.seq_len)
    found: dict[str, float] = {}
    stamps: list[float] = []
    for number in range(MEMORY_STEPS + TIMED_STEPS):
        if number == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            found["between steps"] = torch.cuda.memory_allocated() - before
        if number == MEMORY_STEPS:
            found["allocated"] = torch.cuda.max_memory_allocated() - before
            found["reserved"] = torch.cuda.max_memory_reserved()
        tokens_BS = torch.randint(config.model.vocab_size, shape, device=device)
        everywhere_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
        with engine_of(model).micro_batch(last=True):
            out = decoder(tokens_BS, labels_BS=tokens_BS, loss_mask_BS=everywhere_BS)
            found["kept for backward"] = torch.cuda.memory_allocated() - before
            out.loss.backward()
        float(clip_grad_norm(model, 1.0).total)  # the step's one wait, as in training
        stamps.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        del out
    torch.cuda.synchronize()
    found["kept for backward"] -= found["between steps"]
    sizes = {name: value / GIB for name, value in found.items()}
    seconds = [after - before for before, after in itertools.pairwise(stamps[-TIMED_STEPS - 1 :])]
    return sizes | {"ms": 1e3 * statistics.median(seconds)}


def planned(config: Config) -> tuple[float, dict[str, float]]:
    """The peak, and by what it is for."""
    memory = estimate(Job.of(config), Setting.of(config, 1), GPUS["h200"]).memory
    parts = {name: value / GIB for name, value in vars(memory).items() if value and name != "host"}
    return (memory.total - memory.context - memory.slack) / GIB, parts


def planned_ms(config: Config) -> float:
    """Milliseconds a step, with kernels also where this machine has none."""
    setting = Setting.of(config, 1)
    with_kernels = replace(setting, precision=replace(setting.precision, emulate=False))
    return 1e3 * estimate_time(Job.of(config), with_kernels, GPUS["h200"]).total


def row_of(index: int, meshes: Meshes | None, folder: str) -> dict[str, Any]:
    """Of one setting; without ``meshes`` nothing is measured."""
    name, batch, _ = SETTINGS[index]
    config = config_of(index, folder)
    plan, parts = planned(config)
    row: dict[str, Any] = {"setting": name, "planned": plan, "tokens": f"{batch} x {config.data.seq_len}"}
    row["planned ms"] = planned_ms(config)
    if meshes is not None:
        began = time.perf_counter()
        try:
            row |= measure(config, meshes)
        except torch.OutOfMemoryError as error:
            row["problem"] = str(error).splitlines()[0]
        gc.collect()  # models and engines know each other
        torch.cuda.empty_cache()
        row["seconds"] = time.perf_counter() - began
    return row | {"parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, nargs="*", default=list(range(len(SETTINGS))))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.tiny:
        require_gpu("try --tiny")
    meshes = None if args.tiny else build_meshes()
    rows = []
    print("| setting | tokens | planned GiB | measured GiB | planned / measured | reserved GiB | planned ms "
          "| measured ms | planned / measured | seconds |")  # fmt: skip
    print("|" + " --- |" * 10)
    with tempfile.TemporaryDirectory() as folder:
        for index in args.only:
            row = row_of(index, meshes, folder)
            plan = row["planned"]
            peak, reserved, seconds = (row.get(key, math.nan) for key in ("allocated", "reserved", "seconds"))
            time_planned, time_seen = row["planned ms"], row.get("ms", math.nan)
            print(f"| {row['setting']} | {row['tokens']} | {plan:.2f} | {peak:.2f} | {plan / peak:.3f} "
                  f"| {reserved:.2f} | {time_planned:.1f} | {time_seen:.1f} "
                  f"| {time_planned / time_seen:.3f} | {seconds:.1f} |", flush=True)  # fmt: skip
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
