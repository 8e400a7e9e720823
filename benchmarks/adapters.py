"""Adapters on Qwen3-30B-A3B, all 48 layers, on one GPU: tokens per second, and the memory that it takes.

Random weights, LoRA on attention, or on attention and all experts. Frozen weights are kept once (--base): in
bfloat16 (57 GiB), as codes in float8 (29 GiB) or in nf4 (16 GiB), which are decoded where they are used, or
as fp8, the codes of float8 with products in fp8. Factors have float32 main weights, gradients and moments.
Each row of the table is a model of its own, one after the other in one process: medians, and the peaks of
torch's allocator while it steps, next to what the dry run plans.

    python benchmarks/adapters.py                            16,384 tokens a step, all four settings
    python benchmarks/adapters.py --on all --base bfloat16 fp8 --graphs     both bases, next to each other
    python benchmarks/adapters.py --on all --base bfloat16 fp8 --layers 8   a quick look: 8 layers
    python benchmarks/adapters.py --tokens 4096 --graphs     each step as a CUDA graph too
    python benchmarks/adapters.py --on all --recompute layer --peer eager compiled      transformers with peft
    python benchmarks/adapters.py --tiny         the same on a CPU in seconds, to see that it works
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timing import milliseconds, require_gpu, wait

from fsdmoe.config.train import TrainConfig
from fsdmoe.data.batch import Batch
from fsdmoe.feed import Feed
from fsdmoe.fsdp import FSDPPolicy
from fsdmoe.fsdp.memory_plan import PlannedMeshes, plan_memory
from fsdmoe.graphs import build_micro_batches
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.huggingface.planned import split_wrapped
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import MeshConfig, Meshes, build_meshes, resolve_degrees
from fsdmoe.optim import AdamW
from fsdmoe.parallel.auto_model import kind_of
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.parallel.frozen_layers import keep_frozen_in_codes
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.loss_scale import LossScaler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FOLDER = Path(__file__).parent.parent / "configs/qwen3-30b-a3b"
TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128,
    "num_hidden_layers": 2,
}  # fmt: skip


class Setting(NamedTuple):
    """A row of the table."""

    on: str
    base: str
    recompute: str
    graphs: str

    def adapter(self, rank: int) -> AdapterConfig:
        return AdapterConfig(rank=rank, target_parameters=None if self.on == "all" else ())

    def policy(self, covers: list[Any]) -> ParallelPolicy:
        on_gpu = DEVICE.type == "cuda"
        keys: dict[str, Any] = {"param_dtype": "bfloat16" if on_gpu else "float32"}
        if self.base == "fp8":
            keys |= {"recipe": "fp8_blockwise", "covers": tuple(covers), "emulate": not on_gpu}
        if self.base != "bfloat16":
            keys["frozen_dtype"] = "float8" if self.base == "fp8" else self.base
        return ParallelPolicy(
            precision=PrecisionConfig(**keys),
            memory=MemoryConfig(recompute=("layer",) if self.recompute == "layer" else ()),
        )


def planned_bytes(folder: str, adapter: AdapterConfig, policy: ParallelPolicy) -> int:
    """What engine and optimizer are to hold; activations come on top."""
    model, degrees = build_folder_model(folder, adapter), resolve_degrees(MeshConfig(), 1)
    experts = split_wrapped(model, PlannedMeshes(degrees))
    keep_frozen_in_codes(model, policy.precision, PlannedMeshes(degrees), experts)
    return plan_memory(model, degrees, FSDPPolicy(fsdp=policy.fsdp, precision=policy.precision)).total


def peak_gib() -> tuple[float, float]:
    """Allocated and reserved since the last call."""
    if DEVICE.type != "cuda":
        return 0.0, 0.0
    found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return found[0] / 2**30, found[1] / 2**30


def shape_of(args: argparse.Namespace) -> tuple[int, int]:
    """Rows of a step, and their length."""
    length = 64 if args.tiny else args.length
    return (1 if args.tiny else args.tokens // length), length


def free_memory() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def measure(setting: Setting, args: argparse.Namespace, folder: str, meshes: Meshes) -> dict[str, Any]:
    adapter, policy = setting.adapter(args.rank), setting.policy(args.covers)
    began = time.perf_counter()
    peak_gib()
    model = build_folder_model(folder, adapter)
    parallelize(model, meshes, policy)
    optimizer, decoder = AdamW(model, lr=1e-4), kind_of(model).causal_lm()
    wait(DEVICE)
    built, built_peak = time.perf_counter() - began, peak_gib()
    config: Any = model.config
    train = TrainConfig(graphs=setting.graphs)  # type: ignore[arg-type]
    runner = build_micro_batches(model, decoder, LossScaler(enabled=False), train)
    feed = Feed(meshes, own_attention=True)
    random = torch.Generator().manual_seed(0)
    rows, length = shape_of(args)
    stream = torch.randint(0, config.vocab_size, (rows, length + 1), generator=random)
    positions = torch.arange(length).repeat(rows, 1)
    batch = Batch(
        tokens_BS=stream[:, :-1].contiguous(), labels_BS=stream[:, 1:].contiguous(), positions_BS=positions,
        document_ids_BS=torch.zeros_like(positions),
        loss_mask_BS=torch.ones_like(positions, dtype=torch.bool),
    )  # fmt: skip
    losses = []

    def step() -> None:
        inputs = feed.inputs(feed.prepare([batch]))
        counts = feed.count(decoder, inputs)
        out = runner.run(inputs[0], counts, feed.routing(), last=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.cross_entropy.detach().clone())

    milliseconds(step, args.warm_up, DEVICE)
    peak_gib()
    times = [milliseconds(step, 1, DEVICE) for _ in range(args.steps)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = {
        **setting._asdict(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": trained,
        "planned_gib": planned_bytes(folder, adapter, policy) / 2**30,
        "built_s": built,
        "built_peak_gib": built_peak,
        "peak_gib": peak_gib(),
        "step_ms": times,
        "tokens_per_s": rows * length / statistics.median(times) * 1e3,
        "losses": torch.stack(losses).tolist(),
    }
    runner.close()
    return found


def measure_peer(setting: Setting, mode: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """transformers with peft: grouped products of experts, torch's attention, its own fused AdamW, factors in
    bfloat16 (peft's default of float32 multiplies in it); each layer compiled on request."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    began = time.perf_counter()
    config = AutoConfig.from_pretrained(folder)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if setting.on == "all" else None
    lora = peft.LoraConfig(
        r=args.rank,
        lora_alpha=args.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=experts,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    if setting.recompute == "layer":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if mode == "compiled":
        base: Any = model.get_base_model()
        for layer in base.model.layers:
            layer.compile()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    wait(DEVICE)
    built, built_peak = time.perf_counter() - began, peak_gib()
    rows, length = shape_of(args)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (rows, length), generator=random).to(DEVICE)
    losses = []

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    milliseconds(step, 2, DEVICE)
    peak_gib()
    times = [milliseconds(step, 1, DEVICE) for _ in range(args.steps)]
    return {
        **setting._asdict(),
        "on": f"{setting.on}, transformers and peft, {mode}",
        "base": "bfloat16",
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in trained),
        "planned_gib": None,
        "built_s": built,
        "built_peak_gib": built_peak,
        "peak_gib": peak_gib(),
        "step_ms": times,
        "tokens_per_s": rows * length / statistics.median(times) * 1e3,
        "losses": torch.stack(losses).tolist(),
    }


def report(found: dict[str, Any]) -> None:
    """A line of the table, and what stands behind it."""
    times, (allocated, reserved) = found["step_ms"], found["peak_gib"]
    planned = "" if found["planned_gib"] is None else f"{found['planned_gib']:.1f}"
    print(
        f"| {found['on']} | {found['base']} | {found['recompute']} | {found['graphs']} | "
        f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f}) | "
        f"{found['tokens_per_s']:,.0f} | {allocated:.1f} | {reserved:.1f} | {planned} | "
        f"{found['trained'] / 1e6:.1f} M | {found['losses'][0]:.4f} to {found['losses'][-1]:.4f} |",
        flush=True,
    )


HEADER = """| adapters on | frozen weights | recomputed | graphs | ms a step | tokens/s | \
peak, allocated GiB | reserved | planned before activations | trained | loss |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    """The rows of the table, those to be compared next to each other."""
    for recompute in args.recompute:
        for graphs in ("none", "step") if args.graphs else ("none",):
            for on in args.on:
                for base in args.base:
                    yield Setting(on, base, recompute, graphs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument(
        "--base", nargs="+", default=["bfloat16"], choices=["bfloat16", "fp8", "float8", "nf4", "int4"],
        help="how frozen weights are kept",
    )  # fmt: skip
    parser.add_argument(
        "--covers", nargs="+", default=["experts", "attention"], choices=["experts", "attention"],
        help="whose products --base fp8 has in fp8",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, help="of the model, instead of all 48")
    parser.add_argument("--on", nargs="+", default=["attention", "all"], choices=["attention", "all"])
    parser.add_argument("--recompute", nargs="+", default=["layer", "nothing"], choices=["layer", "nothing"])
    parser.add_argument("--graphs", action="store_true", help="each setting with graphs as well")
    parser.add_argument("--peer", nargs="+", default=[], choices=["eager", "compiled"],
                        help="transformers with peft after each setting")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=4096, help="of a row")
    parser.add_argument("--steps", type=int, default=8, help="that are timed")
    parser.add_argument(
        "--warm-up", type=int, default=5, help="steps before; graphs are captured in the fourth"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU where there is no GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.tiny:
        require_gpu("try --tiny")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}")
    print(f"rank {args.rank}, {args.tokens} tokens a step\n{HEADER}")
    found = []
    meshes = build_meshes()
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((FOLDER / "config.json").read_text()) | (TINY if args.tiny else {})
        if args.layers is not None:
            config["num_hidden_layers"] = args.layers
        Path(folder, "config.json").write_text(json.dumps(config))
        for setting in settings(args):
            found.append(measure(setting, args, folder, meshes))
            report(found[-1])
            free_memory()
            if setting.graphs != "none" or setting.base != "bfloat16":
                continue
            for mode in args.peer:
                try:
                    found.append(measure_peer(setting, mode, args, folder))
                    report(found[-1])
                except Exception as error:  # out of memory, or what the compiler cannot take
                    told = (str(error).splitlines() or [""])[0]
                    print(f"| {setting.on}, transformers and peft, {mode} | {type(error).__name__}: {told} |")
                free_memory()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
