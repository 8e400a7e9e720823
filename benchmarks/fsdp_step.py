"""One training step under fsdmoe's sharding and under FSDP2, beside the unsharded model, on one GPU.

Each contender runs the same decoder code (Qwen3-30B-A3B shapes, 8 layers, 2 and 4 rows of 4096 tokens) as one
rank of an emulated world of 8, with experts sharded (``ep 1``) and with experts split over the world
(``ep 8``); fsdmoe runs twice, the second time with ``fsdp.lean``. One run prints

    memory      steady peak, allocated and reserved; allocations by the engine after the first steps
    traffic     bytes moved by the engine's own operations in a step, by operation
    step        forward and backward, and the whole step with AdamW; medians of alternating rounds, and ratios
    host        host time that sharding adds per unit and step, on a model small enough to be bound by it
    kernels     device time by kernel name where sharding adds some
    overlap     with four real NCCL ranks on this GPU (benchmarks/fsdp_overlap.py), unless --no-overlap

    python benchmarks/fsdp_step.py [--ep 1 8] [--batch 2 4] [--reduce-dtype bfloat16] [--recompute]
    python benchmarks/fsdp_step.py --tiny          the same on a CPU in seconds, to see that it works
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsdp_count import FSDMOE, FSDP2, Watch, Work, watching
from fsdp_decoder import Decoder, Shape, initialize, place_experts
from fsdp_world import emulated_meshes, emulated_world
from timing import milliseconds, require_gpu, wait
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.optim import AdamW
from fsdmoe.precision.config import PrecisionConfig, torch_dtype

WORLD = 8
TINY = Shape(num_layers=3, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=16, top_k=2,
             expert_width=32, vocab=512, batch=1, length=32)  # fmt: skip
HOST = Shape(num_layers=16, hidden=128, num_heads=4, num_kv_heads=2, head_dim=32, num_experts=16, top_k=2,
             expert_width=128, vocab=512, batch=1, length=128)  # fmt: skip


class Contender:
    """A model, how to run it, and its optimizer."""

    def __init__(
        self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, shape: Shape
    ) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, shape.vocab, (shape.batch, shape.length), generator=generator)
        self.tokens = tokens.to(DEVICE)

    def forward_backward(self) -> None:
        self.model(self.tokens).backward()

    def finish(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()

    def drop_gradients(self) -> None:
        """A step without an optimizer: fsdmoe must not notice that the weights are still the same."""
        (self.optimizer or self.model).zero_grad()
        if self.name in OURS:
            engine_of(self.model).mark_changed()


def decoder(shape: Shape, ep: int, settings: argparse.Namespace) -> Decoder:
    model = Decoder(shape, ep)
    for layer in model.layers if settings.recompute else ():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def build_plain(shape: Shape, ep: int, meshes: Meshes, settings: argparse.Namespace) -> Contender:
    with torch.device("meta"):
        model = decoder(shape, ep, settings).bfloat16()
    model.to_empty(device=DEVICE)
    for name, parameter in model.named_parameters():
        initialize(name, parameter, parameter.data)
    return Contender("unsharded", model, None, shape)


def build_fsdp2(shape: Shape, ep: int, meshes: Meshes, settings: argparse.Namespace) -> Contender:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch_dtype(settings.reduce_dtype))
    with torch.device("meta"):
        model = decoder(shape, ep, settings)
    dense, experts = meshes[Axis.FSDP_TP], meshes[Axis.EDP]
    # FSDP2 casts a module's inputs in forward, but not when checkpointing computes it again: routing weights
    # of experts stay in float32.
    of_experts = dataclasses.replace(precision, cast_forward_inputs=False)
    fsdp2_shard(model.embed, mesh=dense, mp_policy=precision)
    for layer in model.layers:
        if ep > 1:
            fsdp2_shard(layer.get_submodule("experts"), mesh=experts, mp_policy=of_experts)
        fsdp2_shard(layer, mesh=dense, mp_policy=precision)
    # needed again at once in backward, as everybody sets it
    fsdp2_shard(model.head, mesh=dense, mp_policy=precision, reshard_after_forward=False)
    fsdp2_shard(model, mesh=dense, mp_policy=precision)
    model.to_empty(device=DEVICE)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.data, DTensor)
        initialize(name, parameter, parameter.data.to_local())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    return Contender("FSDP2", model, optimizer, shape)


def build_fsdmoe(
    shape: Shape, ep: int, meshes: Meshes, settings: argparse.Namespace, *, lean: bool = False
) -> Contender:
    policy = FSDPPolicy(
        fsdp=FSDPConfig(lean=lean),
        precision=PrecisionConfig(reduce_dtype=settings.reduce_dtype),
        grad_divisor=1.0,
    )
    with torch.device("meta"):
        model = decoder(shape, ep, settings)
    place_experts(model, meshes)
    fully_shard(model, meshes, policy, init_fn=initialize)
    return Contender(LEAN if lean else "fsdmoe", model, AdamW(model, lr=1e-4), shape)


Build = Callable[[Shape, int, Meshes, argparse.Namespace], Contender]
LEAN = "fsdmoe lean"
BUILDS: dict[str, Build] = {
    "unsharded": build_plain,
    "FSDP2": build_fsdp2,
    "fsdmoe": build_fsdmoe,
    LEAN: functools.partial(build_fsdmoe, lean=True),
}
OURS = ("fsdmoe", LEAN)


def free_memory() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def measure_memory(build: Build, *context: Any) -> dict[str, float]:
    """Steady peak of whole steps, in GiB, with nothing else on the device."""
    free_memory()
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0  # workspaces of libraries
    contender = build(*context)
    for _ in range(2):
        contender.forward_backward()
        contender.finish()
    wait(DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        contender.forward_backward()
        contender.finish()
    wait(DEVICE)
    if DEVICE.type != "cuda":
        return {"allocated": 0.0, "reserved": 0.0}
    return {
        "allocated": (torch.cuda.max_memory_allocated() - before) / 2**30,
        "reserved": (torch.cuda.max_memory_reserved() - before) / 2**30,
    }


def measure_work(build: Build, methods: dict[str, tuple[str, ...]], *context: Any) -> Work:
    """What the engine itself does in a steady step."""
    free_memory()
    watch = Watch()
    with watching(watch, methods):
        contender = build(*context)
        for _ in range(2):
            contender.forward_backward()
            contender.finish()
        wait(DEVICE)
        watch.work = Work()
        with watch:
            contender.forward_backward()
        allocations = watch.work.allocations
        contender.finish()
        wait(DEVICE)
    watch.work.allocations = allocations
    return watch.work


def measure_steps(contenders: list[Contender], rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, contenders in turn and in an order that is turned round every round."""
    times: dict[str, dict[str, list[float]]] = {
        c.name: {"forward+backward": [], "step": []} for c in contenders
    }
    for index in range(rounds + 1):
        for contender in contenders if index % 2 else reversed(contenders):
            bare, whole = time_steps(contender, steps)
            if index:  # the first round warms up
                times[contender.name]["forward+backward"].append(bare)
                times[contender.name]["step"].append(whole)
    return {name: {k: statistics.median(v) for k, v in found.items()} for name, found in times.items()}


def time_steps(contender: Contender, steps: int) -> tuple[float, float]:
    """Milliseconds of forward and backward, and of the whole step, each over ``steps`` steps without
    waiting."""

    def run(finish: Callable[[], None]) -> None:
        contender.forward_backward()
        finish()

    bare, whole = (functools.partial(run, f) for f in (contender.drop_gradients, contender.finish))
    return milliseconds(bare, steps, DEVICE), milliseconds(whole, steps, DEVICE)


def measure_host(context: tuple[Any, ...], rounds: int) -> dict[str, float]:
    """Microseconds that sharding adds per unit and step on a model whose device work is negligible."""
    shape = HOST if DEVICE.type == "cuda" else dataclasses.replace(TINY, num_layers=8)
    contenders = [build(shape, *context) for build in BUILDS.values()]
    found = measure_steps(contenders, rounds, 5)
    units = shape.num_layers + 2
    plain = found["unsharded"]["forward+backward"]
    added = {
        c.name: (found[c.name]["forward+backward"] - plain) * 1e3 / units
        for c in contenders
        if c.name != "unsharded"
    }
    return {"unsharded": plain * 1e3 / units, **added}


def measure_kernels(contenders: list[Contender]) -> dict[str, dict[str, float]]:
    """Device milliseconds by kernel name, for kernels to which some kind of sharding adds time."""
    if DEVICE.type != "cuda":
        return {}
    found: dict[str, dict[str, float]] = {}
    for contender in contenders:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            contender.forward_backward()
            wait(DEVICE)
        contender.drop_gradients()
        for event in profile.key_averages():
            time_ms = getattr(event, "self_device_time_total", 0.0) / 1e3
            if time_ms:
                found.setdefault(event.key, {})[contender.name] = time_ms
    plain = {key: times.get("unsharded", 0.0) for key, times in found.items()}
    return {k: t for k, t in found.items() if max(t.values()) > plain[k] + 0.05}


def report_memory(ep: int, memory: dict[str, dict[str, float]], work: dict[str, Work]) -> None:
    print(f"\n== memory, ep {ep} (GiB, steady peak)")
    for name, found in memory.items():
        print(f"{name:12s} allocated {found['allocated']:8.2f}   reserved {found['reserved']:8.2f}")
    print(f"\n== the engine's own work in a step, ep {ep}")
    for name, each in work.items():
        print(
            f"{name:12s} {each.total / 1e9:9.4f} GB moved, {sum(each.calls.values())} operations, "
            f"{each.new_storages} new storages, {each.allocations} allocations"
        )
        for operation, moved in each.bytes_moved.most_common(12):
            print(f"    {moved / 1e9:10.4f} GB  {each.calls[operation]:5d} x  {operation}")
    for name in OURS:
        ratio = work[name].total / max(1, work["FSDP2"].total)
        print(f"{name} moves {ratio:.3f} of FSDP2's bytes (wanted: at most 0.333)")


def report_steps(ep: int, steps: dict[str, dict[str, float]], kernels: dict[str, dict[str, float]]) -> None:
    print(f"\n== step, ep {ep} (ms, median)")
    for name, found in steps.items():
        print(
            f"{name:12s} forward+backward {found['forward+backward']:9.2f}   whole step {found['step']:9.2f}"
        )
    for name in OURS:
        for kind in ("forward+backward", "step"):
            ratio = steps[name][kind] / steps["FSDP2"][kind]
            print(f"{name} / FSDP2, {kind}: {ratio:.3f} (wanted: at most 0.93)")
    if kernels:
        print(f"\n== device time by kernel where sharding adds some, ep {ep} (ms)")
    for name, times in sorted(kernels.items(), key=lambda item: -max(item[1].values()))[:25]:
        row = "  ".join(f"{c} {times.get(c, 0.0):8.3f}" for c in BUILDS)
        print(f"{row}  {name[:90]}")


def run_ep(ep: int, shape: Shape, settings: argparse.Namespace) -> dict[str, Any]:
    print(f"\n#### ep {ep}, {shape.batch} x {shape.length} tokens")
    with emulated_world(WORLD):
        meshes = emulated_meshes(WORLD, ep, DEVICE.type)
        context = (ep, meshes, settings)
        memory = {name: measure_memory(build, shape, *context) for name, build in BUILDS.items()}
        work = {"FSDP2": measure_work(build_fsdp2, FSDP2, shape, *context)}
        for name in OURS:
            work[name] = measure_work(BUILDS[name], FSDMOE, shape, *context)
        report_memory(ep, memory, work)
        free_memory()
        contenders = [build(shape, *context) for build in BUILDS.values()]
        print(f"buffers: {engine_of(contenders[-1].model).pool.report}")
        steps = measure_steps(contenders, settings.rounds, settings.steps)
        kernels = measure_kernels(contenders)
        report_steps(ep, steps, kernels)
        del contenders
        free_memory()
        host = measure_host(context, settings.rounds)
        print(f"\n== host time, ep {ep} (microseconds a unit and step; sharding's addition)")
        for name, value in host.items():
            print(f"{name:12s} {value:9.1f}")
        free_memory()
    return {
        "memory": memory, "steps": steps, "host": host, "kernels": kernels,
        "work": {n: {"total": w.total, "by operation": dict(w.bytes_moved), "allocations": w.allocations}
                 for n, w in work.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ep", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 4], help="rows of 4096 tokens")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row, per contender and round")
    parser.add_argument("--reduce-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--recompute", action="store_true", help="every layer recomputes its activations")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU where there is no GPU")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    if not settings.tiny:
        require_gpu("try --tiny")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}")
    shapes = [dataclasses.replace(Shape(), num_layers=settings.layers, batch=b) for b in settings.batch]
    results = {
        f"ep {ep}, {shape.batch} x {shape.length}": run_ep(ep, shape, settings)
        for shape in ([TINY] if settings.tiny else shapes)
        for ep in settings.ep
    }
    if settings.json:
        settings.json.write_text(json.dumps(results, indent=1))
    if not settings.no_overlap:
        overlap = [sys.executable, str(Path(__file__).with_name("fsdp_overlap.py"))]
        sys.stdout.flush()
        subprocess.run([*overlap, *(["--tiny"] if settings.tiny else [])], check=True)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if __name__ == "__main__":
    main()
