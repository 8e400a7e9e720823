"""Save and load throughput and the stall of training, next to plain torch.distributed.checkpoint, in one run.

::

    python -m benchmarks.checkpoint --ranks 4 --params 60e6                 # CPU, gloo
    python -m benchmarks.checkpoint --device cuda --params 1.5e9 --rounds 1 # one GPU; 18 GB a save

Both sides write the same tensors: parameters and two moments in fp32, as ragged flat shards of MoE decoder
layers. Variants take turns in an order that rotates, after a round that warms up, and the median counts.
Everything is on the disk (fsync) when a save counts as done; files leave the page cache before they are
loaded and are removed after each save. Ours has all checksums on. Beside the bandwidth stands the processor
time of all ranks, which a busy machine does not change. On a GPU the stall of asynchronous saves is set
against what the bytes alone take over the host link, whose bandwidth is measured in the same run.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdmoe.checkpoint import CheckpointConfig, Checkpointer
from fsdmoe.core.placement import Placement
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Axis, Meshes, build_meshes

Tensors = dict[str, ShardedTensor]
MIN_STALLS = 5


def layer_shapes(hidden: int, experts: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (2 * hidden, hidden),
        "self_attn.k_proj.weight": (hidden // 4, hidden),
        "self_attn.v_proj.weight": (hidden // 4, hidden),
        "self_attn.o_proj.weight": (hidden, 2 * hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
    }


def build_state(num_params: float, meshes: Meshes) -> tuple[Tensors, int]:
    """Layers until there are so many parameters; every layer one flat buffer, cut evenly over the ranks."""
    shapes = layer_shapes(2048, 32, 768) if num_params > 3e8 else layer_shapes(512, 8, 384)
    per_layer = sum(map(math.prod, shapes.values()))
    tensors: Tensors = {}
    count = max(1, round(num_params / per_layer))
    rank, num_ranks = meshes.rank(Axis.FSDP_TP), meshes.size(Axis.FSDP_TP)
    own = -(-per_layer // num_ranks)
    for layer in range(count):
        buffers = {key: torch.randn(own, device=meshes.device) for key in ("weight", "exp_avg", "exp_avg_sq")}
        at = 0
        for name, shape in shapes.items():
            start = min(max(rank * own - at, 0), math.prod(shape))
            end = min(max((rank + 1) * own - at, 0), math.prod(shape))
            offset = max(at - rank * own, 0) if start < end else 0
            for key, buffer in buffers.items():
                piece = buffer[offset : offset + end - start]
                full = f"{key}/model.layers.{layer}.{name}"
                tensors[full] = ShardedTensor(piece, Placement.whole(shape), start, end, meshes, Axis.FSDP_TP)
            at += math.prod(shape)
    return tensors, count * per_layer


def timed(act: Callable[[], Any], meshes: Meshes) -> float:
    if meshes.device_type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    act()
    if meshes.device_type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - began


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summed(value: float) -> float:
    """Over all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return sum(found)


def drop_page_cache(folder: Path) -> None:
    """Out of the page cache, so that a load reads the disk."""
    if dist.get_rank() == 0:
        os.sync()
        for path in folder.rglob("*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
    dist.barrier()


def clear(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


class Ours:
    """Our checkpointer, saving in the foreground or in the background."""

    def __init__(self, folder: Path, asynchronous: bool, meshes: Meshes) -> None:
        self.name = "fsdmoe, asynchronous" if asynchronous else "fsdmoe"
        self.asynchronous = asynchronous
        self._folder, self._meshes = folder, meshes
        self._one = Checkpointer(
            CheckpointConfig(asynchronous=asynchronous, keep_last=1), folder, meshes=meshes
        )

    def save(self, tensors: Tensors) -> tuple[float, float]:
        """(seconds the caller stood still, seconds until it is whole)"""
        state = _nested(tensors)
        began = time.perf_counter()
        stall = timed(lambda: self._one.save(1, state), self._meshes)
        self._one.wait()
        dist.barrier()
        return stall, time.perf_counter() - began

    def load(self, tensors: Tensors) -> None:
        self._one.load_latest(_nested(tensors))

    def prepare(self, tensors: Tensors) -> None:
        self._one.prepare(_nested(tensors))

    def close(self) -> None:
        self._one.close()


class PlainDCP:
    """torch.distributed.checkpoint as it comes, in the foreground or in the background."""

    def __init__(self, folder: Path, asynchronous: bool, meshes: Meshes, threads: int = 1) -> None:
        self.name = f"DCP, {threads} thread{'s' * (threads > 1)}" + (", asynchronous" if asynchronous else "")
        self.asynchronous = asynchronous
        self._folder, self._meshes, self._threads = folder, meshes, threads
        self._group = dist.new_group(backend="gloo") if asynchronous else None

    def save(self, tensors: Tensors) -> tuple[float, float]:
        writer = dcp.FileSystemWriter(self._folder / "dcp", thread_count=self._threads)
        began = time.perf_counter()
        if not self.asynchronous:
            stall = timed(lambda: dcp.save(tensors, storage_writer=writer), self._meshes)
            return stall, time.perf_counter() - began
        futures: list[Any] = []
        stall = timed(
            lambda: futures.append(dcp.async_save(tensors, storage_writer=writer, process_group=self._group)),
            self._meshes,
        )
        futures[0].result()
        dist.barrier()
        return stall, time.perf_counter() - began

    def load(self, tensors: Tensors) -> None:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(self._folder / "dcp"))

    def prepare(self, tensors: Tensors) -> None:
        pass

    def close(self) -> None:
        pass


def _nested(tensors: Tensors) -> dict[str, dict[str, ShardedTensor]]:
    state: dict[str, dict[str, ShardedTensor]] = {}
    for full, tensor in tensors.items():
        section, name = full.split("/")
        state.setdefault(section, {})[name] = tensor
    return state


def measure(folder: str, num_params: float, rounds: int) -> dict[str, Any]:
    """All variants in turns on these ranks; seconds by variant, and what they moved."""
    meshes = build_meshes()
    link = pinned_bandwidth() if meshes.device_type == "cuda" else None
    tensors, count = build_state(num_params, meshes)
    check_space(folder, 12 * count)
    wanted = {name: tensor.piece.clone() for name, tensor in list(tensors.items())[:6]}
    path = Path(folder)
    background = Ours(path, True, meshes)
    variants: list[Ours | PlainDCP] = [
        Ours(path, False, meshes), PlainDCP(path, False, meshes), background,
        PlainDCP(path, True, meshes), PlainDCP(path, False, meshes, threads=4),
    ]  # fmt: skip
    times: dict[str, dict[str, list[float]]] = {variant.name: {} for variant in variants}
    for variant in variants:
        variant.prepare(tensors)
    for round_number in range(rounds + (rounds > 1)):
        turn = round_number % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            found = _one_round(variant, tensors, wanted, path)
            if dist.get_rank() == 0:
                figures = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
                print(f"round {round_number}: {variant.name}: {figures}", file=sys.stderr, flush=True)
            if round_number or rounds == 1:  # with several rounds the first only warms up
                for key, value in found.items():
                    times[variant.name].setdefault(key, []).append(value)
    while link and len(times[background.name]["stall"]) < MIN_STALLS:  # quick, and the figure that is claimed
        times[background.name]["stall"].append(background.save(tensors)[0])
        clear(path)
    for variant in variants:
        variant.close()
    own = sum(t.piece.numel() * t.piece.element_size() for t in tensors.values())
    return {
        "times": times, "bytes": 12 * count, "params": count, "own_bytes": own,
        "link": link,
    }  # fmt: skip


def _one_round(
    variant: Ours | PlainDCP, tensors: Tensors, wanted: dict[str, torch.Tensor], path: Path
) -> dict[str, float]:
    """Save, load and remove once."""
    meshes, before = next(iter(tensors.values())).meshes, processor_seconds()
    stall, whole = variant.save(tensors)
    found = {"stall": stall, "save": whole, "save_cpu": summed(processor_seconds() - before)}
    if not variant.asynchronous:  # loading is the same in the background variants
        drop_page_cache(path)
        before = processor_seconds()
        found["load"] = _load(variant, tensors, wanted, meshes)
        found["load_cpu"] = summed(processor_seconds() - before)
    clear(path)
    return found


def check_space(folder: str, num_bytes: int) -> None:
    """Say so before the first save, not in the middle of it; there is one checkpoint at a time."""
    parent = next(path for path in Path(folder).parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < 1.1 * num_bytes:
        raise OSError(
            f"{parent} has {free / 1e9:.1f} GB free, a checkpoint needs {num_bytes / 1e9:.1f} GB and some "
            "to spare; choose another --folder or lower --params"
        )


def _load(
    variant: Ours | PlainDCP, tensors: Tensors, wanted: dict[str, torch.Tensor], meshes: Meshes
) -> float:
    for tensor in tensors.values():
        tensor.zero_()
    seconds = timed(lambda: variant.load(tensors), meshes)
    for name, piece in wanted.items():
        assert torch.equal(tensors[name].piece, piece), f"{variant.name} lost {name}"
    return seconds


def pinned_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Device-to-host bytes per second into pinned memory."""
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return num_bytes / statistics.median(seconds)


def report(result: dict[str, Any], ranks: int, folder: str) -> None:
    size, millions = result["bytes"], result["params"] / 1e6
    medians = {
        name: {key: statistics.median(values) for key, values in times.items()}
        for name, times in result["times"].items()
    }
    print(f"{millions:.0f} M parameters with moments, {size / 1e9:.2f} GB, {ranks} rank(s), {medium(folder)}")
    heads = ("save GB/s", "load GB/s", "stall s", "save CPU s", "load CPU s")
    print(f"{'':28s} " + " ".join(f"{head:>10s}" for head in heads))
    for name, median in medians.items():
        speeds = [f"{size / median[key] / 1e9:.2f}" if key in median else "" for key in ("save", "load")]
        seconds = [f"{median[key]:.3f}" if key in median else "" for key in ("stall", "save_cpu", "load_cpu")]
        print(f"{name:28s} " + " ".join(f"{text:>10s}" for text in (*speeds, *seconds)))
    for key in ("save", "load"):
        best = min(
            median[key] for name, median in medians.items() if name.startswith("DCP") and key in median
        )
        print(f"{key}: {best / medians['fsdmoe'][key]:.2f} times the bandwidth of the best plain DCP")
    if result["link"]:
        floor, stall = result["own_bytes"] / result["link"], medians["fsdmoe, asynchronous"]["stall"]
        print(f"pinned device-to-host: {result['link'] / 1e9:.1f} GB/s, the bytes alone take {floor:.3f} s;")
        print(f"the stall of an asynchronous save is {stall / floor:.2f} of that")


def medium(folder: str) -> str:
    """The file system and device behind a folder."""
    try:
        mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return f"in {folder}"
    inside = [mount for mount in mounts if Path(folder).resolve().is_relative_to(mount[1])]
    device, _, kind = max(inside, key=lambda mount: len(mount[1]))
    return f"on {kind} {device}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--params", type=float, default=60e6)
    parser.add_argument("--rounds", type=int, default=5, help="one more warms up, unless there is only one")
    parser.add_argument("--folder", default=None, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fsdmoe-checkpoint-", dir=options.folder) as folder:
        target = str(Path(folder) / "checkpoints")
        if options.device == "cuda":
            build_meshes()
            report(measure(target, options.params, options.rounds), 1, folder)
        else:
            from fsdmoe.testing import run_ranks  # needs pytest, which a GPU machine may not have

            results = run_ranks(measure, options.ranks, target, options.params, options.rounds, timeout=1800)
            report(results[0], options.ranks, folder)


if __name__ == "__main__":
    main()
