"""Gathers and reductions beside computation, with four real NCCL ranks on one GPU, and what NCCL says of the
buffers.

NCCL refuses two ranks on one device unless each claims a host of its own; they then talk over loopback
sockets, which says nothing about bandwidth but everything about streams, hooks and registration. The run
trains a small decoder, traces one step on rank 0, prints how much of the communication ran while something
else computed, and counts the lines of NCCL's log that speak of registration. ``--svg`` draws the traced
step.

    python benchmarks/fsdp_overlap.py [--svg docs/results/fsdp_overlap.svg] [--trace trace.json]
    python benchmarks/fsdp_overlap.py --tiny       two gloo ranks on a CPU, to see that it works
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_decoder import Decoder, Shape, initialize, place_experts

from fsdmoe.fsdp import FSDPPolicy, engine_of, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW

SMALL = Shape(num_layers=6, hidden=1024, num_heads=8, num_kv_heads=2, num_experts=16, top_k=4,
              expert_width=512, vocab=8192, batch=4, length=2048)  # fmt: skip
TINY = Shape(num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=4, top_k=2,
             expert_width=32, vocab=256, batch=1, length=16)  # fmt: skip
ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1, "NCCL_P2P_DISABLE": 1,
    "NCCL_SHM_DISABLE": 1, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,REG,ALLOC",
}  # fmt: skip
COLORS = {"gather": "#3b78c2", "reduce": "#c2553b", "other": "#8a8a8a"}


def launch(settings: argparse.Namespace) -> None:
    """Start the ranks as processes of this script and read what they leave."""
    num_ranks = 2 if settings.tiny else 4
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(num_ranks):
            own = {"RANK": rank, "NCCL_HOSTID": f"h{rank}", "NCCL_DEBUG_FILE": f"{folder}/nccl.{rank}"}
            common = {"LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, **ON_ONE_GPU}
            env = os.environ | {key: str(value) for key, value in (own | common).items()}
            command = [
                sys.executable,
                __file__,
                "--rank-folder",
                folder,
                *(["--tiny"] if settings.tiny else []),
            ]
            processes.append(subprocess.Popen(command, env=env))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        report(Path(folder), settings)


def run_rank(folder: Path, tiny: bool) -> None:
    """One rank: train, trace one step, tell what became of the buffers."""
    store = dist.FileStore(str(folder / "store"), int(os.environ["WORLD_SIZE"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
    meshes, shape = build_meshes(), TINY if tiny else SMALL
    with torch.device("meta"):
        model = Decoder(shape)
    place_experts(model, meshes)
    fully_shard(model, meshes, FSDPPolicy(grad_divisor=1.0), init_fn=initialize)
    optimizer = AdamW(model)
    tokens = torch.randint(0, shape.vocab, (shape.batch, shape.length), device=meshes.device)

    def step() -> float:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step() for _ in range(3)]
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        losses.append(step())
    if rank == 0:
        profile.export_chrome_trace(str(folder / "trace.json"))
    (folder / f"report.{rank}").write_text(
        json.dumps({"pool": engine_of(model).pool.report, "losses": losses})
    )
    dist.barrier()
    dist.destroy_process_group()


def report(folder: Path, settings: argparse.Namespace) -> None:
    told = json.loads((folder / "report.0").read_text())
    print(f"\n== real ranks: losses {[round(loss, 4) for loss in told['losses']]}")
    print(f"buffers: {told['pool']}")
    for log in sorted(folder.glob("nccl.*")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if "egister" in line]
        print(
            f"{log.name}: {len(lines)} lines on registration"
            + (f", e.g. {lines[-1][-140:]}" if lines else "")
        )
    trace = json.loads((folder / "trace.json").read_text())
    if settings.trace:
        settings.trace.write_text(json.dumps(trace))
    kernels = device_kernels(trace)
    if not kernels:
        print("no device kernels in the trace: this was a CPU")
        return
    compute, travel = ([k for k in kernels if (k["kind"] == "other") == own] for own in (True, False))
    for kind in ("gather", "reduce"):
        mine = [k for k in travel if k["kind"] == kind]
        total, hidden = overlap(mine, compute)
        if total:
            share = hidden / total
            print(f"{kind:7s} {len(mine):3d} kernels, {total / 1e3:8.2f} ms, {share:.0%} beside computation")
    total, beside = overlap(compute, travel)
    print(
        f"compute {len(compute):3d} kernels, {total / 1e3:8.2f} ms, {beside / total:.0%} beside one of these"
    )
    if settings.svg:
        settings.svg.write_text(draw(kernels))


def device_kernels(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels with start, end, stream and what they are."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") != "kernel":
            continue
        name = event["name"]
        kind = "gather" if "AllGather" in name else "reduce" if "ReduceScatter" in name else "other"
        if kind == "other" and "nccl" in name:
            continue
        start = float(event["ts"])
        stream = event["args"].get("stream", 0)
        found.append(
            {"name": name, "kind": kind, "start": start, "end": start + event["dur"], "stream": stream}
        )
    return found


def overlap(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[float, float]:
    """Time of ``some``, and how much of it one of ``others`` ran too, in microseconds."""
    busy: list[list[float]] = []
    for kernel in sorted(others, key=lambda k: k["start"]):
        if busy and kernel["start"] <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], kernel["end"])
        else:
            busy.append([kernel["start"], kernel["end"]])
    total = hidden = 0.0
    for kernel in some:
        total += kernel["end"] - kernel["start"]
        hidden += sum(max(0.0, min(kernel["end"], e) - max(kernel["start"], s)) for s, e in busy)
    return total, hidden


def draw(kernels: list[dict[str, Any]]) -> str:
    """The step as bars, a row a kind of work."""
    first, last = min(k["start"] for k in kernels), max(k["end"] for k in kernels)
    scale, rows = 1100 / (last - first), {"other": 0, "gather": 1, "reduce": 2}
    bars = [
        f'<rect x="{100 + (k["start"] - first) * scale:.1f}" y="{20 + 40 * rows[k["kind"]]}" '
        f'width="{max(0.3, (k["end"] - k["start"]) * scale):.1f}" height="28" fill="{COLORS[k["kind"]]}"/>'
        for k in kernels
    ]
    names = {"other": "compute", "gather": "all-gather", "reduce": "reduce-scatter"}
    labels = [
        f'<text x="8" y="{39 + 40 * row}" font-size="13">{names[kind]}</text>' for kind, row in rows.items()
    ]
    end = f'<text x="1200" y="150" font-size="12" text-anchor="end">{(last - first) / 1e3:.1f} ms</text>'
    body = "\n".join([*labels, *bars, end])
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="1220" height="160" font-family="sans-serif">'
    return f'{head}\n<rect width="1220" height="160" fill="white"/>\n{body}\n</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.rank_folder:
        run_rank(settings.rank_folder, settings.tiny)
    else:
        launch(settings)


if __name__ == "__main__":
    main()
