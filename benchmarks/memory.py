"""What each name of ``memory.recompute`` and ``memory.offload`` frees, and what it costs.

One GPU, 8 layers of Qwen3-30B-A3B, 4 x 4,096 tokens, whole training steps (AdamW with a learning rate of
zero, so that all choices see the same weights). Choices take turns, round after round, in one process::

    python benchmarks/memory.py --json memory.json
    python benchmarks/memory.py --preset deepseek-v3 --layers 2 --experts 32 --batch 1

=========  ========================================================================================
time       the median step, and how much longer than keeping everything
peak       device memory at its highest in a step, above what lies there before it
saved      bytes that autograd keeps on the device from forward to backward, by count
host       bytes that wait in host memory
loss       whether the loss is that of keeping everything to the last bit
beside     of the time that copies to and from the host took, the share during which kernels ran
=========  ========================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from timing import require_gpu
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.moe import GroupedExperts
from fsdmoe.fsdp import engine_of
from fsdmoe.memory.config import Activation, MemoryConfig, Part
from fsdmoe.memory.layers import keep_less
from fsdmoe.memory.offload import Offload
from fsdmoe.memory.pinned import PinnedPool
from fsdmoe.mesh import build_meshes
from fsdmoe.models import Decoder, build_model, preset_config
from fsdmoe.models.memory_parts import check_parts, prepare_parts
from fsdmoe.observe import print_table
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

GIB = 2**30
TOGETHER: list[tuple[tuple[Part, ...], tuple[Activation, ...]]] = [
    (("norms", "router"), ()),
    (("norms", "router", "attention_projections"), ()),
    (("norms", "activation", "mla_up"), ()),
    ((), ("layer_input", "mlp_norm_input", "attention_output")),
    (("norms",), ("layer_input", "mlp_norm_input", "attention_output")),
    (("norms",), ("layer_input", "mlp_norm_input", "qkv")),
    (("norms", "router"), ("layer_input", "mlp_norm_input", "attention_output", "qkv")),
    (("norms", "router"), ("expert_pre_activation",)),
    (("layer",), ("layer_input",)),
]


@dataclass
class Choice:
    """One setting, and what was measured of it."""

    memory: MemoryConfig
    offload: Offload | None
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    saved: int = 0
    moved: int = 0
    loss: float = 0.0
    beside: float | None = None

    @property
    def name(self) -> str:
        again, moved = " + ".join(self.memory.recompute), ", ".join(self.memory.offload)
        return " ".join(filter(None, (again, moved and f"-> {moved}"))) or "all kept"


class Bench:
    """A model whose layers can be set to any choice."""

    def __init__(self, args: argparse.Namespace) -> None:
        meshes = build_meshes()
        self.device = meshes.device
        is_gpu = self.device.type == "cuda"
        config = preset_config(args.preset, num_hidden_layers=args.layers)
        if args.experts:
            config = replace(config, num_experts=args.experts)
        dtype: Any = "bfloat16" if is_gpu else "float32"
        precision = PrecisionConfig(param_dtype=dtype, reduce_dtype=dtype, main_dtype=dtype)
        policy = ParallelPolicy(precision=precision, grad_divisor=1.0)
        self.model: Decoder = parallelize(build_model(config), meshes, policy)
        self.model.lm_head.is_lean = True  # for all alike: the peak is then that of the layers
        self.layers: list[nn.Module] = [*self.model.model.layers, *self.model.model.mtp_layers]
        self.optimizer = AdamW(
            self.model, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, moment_dtype=getattr(torch, dtype)
        )
        self.pool = PinnedPool(device=self.device)
        random = torch.Generator().manual_seed(0)
        shape = (args.batch, args.length)
        self.tokens = torch.randint(0, config.vocab_size, shape, generator=random).to(self.device)

    def choices(self) -> Iterator[Choice]:
        singles = [((name,), ()) for name in get_args(Part)] + [
            ((), (name,)) for name in get_args(Activation)
        ]
        for parts, names in [((), ()), *singles, *TOGETHER]:
            memory = MemoryConfig(recompute=parts, offload=names)
            try:
                check_parts(memory, self.model.config)
            except ConfigError:
                continue
            offload = Offload(frozenset(names), self.pool, len(self.layers)) if names else None
            yield Choice(memory, offload)

    def set_to(self, choice: Choice) -> None:
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
            for module in layer.modules():
                if isinstance(module, GroupedExperts):
                    module.policy = module.policy._replace(recompute=False)
        prepare_parts(self.layers, choice.memory)
        keep_less(self.layers, choice.memory, choice.offload)

    def loss(self) -> torch.Tensor:
        return self.model(self.tokens, labels_BS=self.tokens).loss

    def step(self) -> torch.Tensor:
        with engine_of(self.model).micro_batch(last=True):
            loss = self.loss()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def look_at(self, choice: Choice) -> None:
        """Everything but time; also warms it up."""
        self.set_to(choice)
        choice.loss = self.step().item()
        moved = 0 if choice.offload is None else choice.offload.figures.bytes_moved
        with engine_of(self.model).micro_batch(last=True), saved_bytes(self.model) as saved:
            loss = self.loss()
            choice.saved = sum(saved.values())
            loss.backward()
        if choice.offload is not None:
            choice.moved = choice.offload.figures.bytes_moved - moved
        self.optimizer.zero_grad()
        del loss
        self.wait()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            self.wait()
            choice.peak = torch.cuda.max_memory_allocated() - before
            if choice.offload is not None:
                choice.beside = overlap_of(self.step)

    def time(self, choice: Choice, steps: int) -> None:
        self.set_to(choice)
        self.step()
        self.wait()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        choice.seconds.append((time.perf_counter() - begun) / steps)


@contextlib.contextmanager
def saved_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """By storage: what autograd keeps in this block beside weights, as they are gathered."""
    weights: set[int] = set()
    seen: dict[int, int] = {}
    alive = []

    def note(module: nn.Module, args: object) -> None:
        weights.update(p.untyped_storage()._cdata for p in module.parameters(recurse=False))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in seen:
            seen[storage._cdata] = storage.nbytes()
            alive.append(StorageWeakRef(storage))  # or its address would be used again
        return tensor

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen
    for handle in handles:
        handle.remove()


def overlap_of(step: Callable[[], object]) -> float:
    """Of the time of copies between host and device, the share in which some kernel runs, by a trace."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    copies = [_span(e) for e in events if e.get("cat") == "gpu_memcpy" and _is_large_host_copy(e)]
    kernels = sorted(_span(e) for e in events if e.get("cat") == "kernel")
    merged: list[tuple[float, float]] = []
    for begin, end in kernels:
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    total = sum(end - begin for begin, end in copies)
    beside = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in copies for b, e in merged)
    return beside / total if total else 0.0


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _is_large_host_copy(event: dict[str, Any]) -> bool:
    crosses = "DtoH" in event["name"] or "HtoD" in event["name"]
    return crosses and int(event.get("args", {}).get("bytes", 0)) >= 1 << 20


def row_of(choice: Choice, base: Choice) -> tuple[str, ...]:
    seconds, reference = statistics.median(choice.seconds), statistics.median(base.seconds)
    return (
        choice.name,
        f"{1e3 * seconds:.1f} ms",
        f"{100 * (seconds / reference - 1):+.1f} %",
        f"{choice.peak / GIB:.2f} GiB",
        f"{100 * (choice.peak / base.peak - 1):+.0f} %" if base.peak else "",
        f"{choice.saved / GIB:.3f} GiB",
        f"{100 * (choice.saved / base.saved - 1):+.0f} %",
        f"{choice.moved / GIB:.2f} GiB" if choice.moved else "",
        "same" if choice.loss == base.loss else f"{choice.loss - base.loss:+.1e}",
        "" if choice.beside is None else f"{100 * choice.beside:.0f} %",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=0, help="experts of a layer; 0: as the preset has")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="in a row, of one choice in one round")
    parser.add_argument("--tiny", action="store_true", help="a small model on any machine: does it run?")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.tiny:
        require_gpu("try --tiny")
    if args.tiny:
        args.preset, args.layers, args.batch, args.length = "tiny-qwen3", 2, 2, 32
        args.rounds = args.steps = 1
    bench = Bench(args)
    choices = list(bench.choices())
    for choice in choices:
        bench.look_at(choice)
    for _ in range(args.rounds):
        for choice in choices:
            bench.time(choice, args.steps)
    heads = ("choice", "time", "", "peak", "", "saved", "", "host", "loss", "beside")
    rows = [row_of(choice, choices[0]) for choice in choices]
    print_table(f"{args.preset}, {args.layers} layers, {args.batch} x {args.length} tokens", heads, rows)
    pool = bench.pool
    print(f"host memory: {pool.nbytes / GIB:.2f} GiB in {pool.num_blocks} blocks, near: {pool.is_near}")
    if args.json is not None:
        keys = ("seconds", "peak", "saved", "moved", "loss", "beside")
        found = [{"choice": each.name} | {key: getattr(each, key) for key in keys} for each in choices]
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
