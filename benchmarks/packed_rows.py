"""Rows of several documents: the variable-length attention call compared with one masked call, on one GPU.

Trains nothing: forward and backward of a decoder (Qwen3-30B-A3B shapes, 4 layers) on packed rows, with plans
made ahead, and what a plan costs the host. Both must give the same loss.

    python benchmarks/packed_rows.py [--documents 512] [--rows 4] [--length 4096]
    python benchmarks/packed_rows.py --tiny          the same on a CPU in seconds, to see that it works
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from timing import require_gpu, wait

from fsdmoe.context_parallel.config import ContextParallelConfig, Varlen
from fsdmoe.data import Batch
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.feed import Feed
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.models import Decoder, Initializer, ModelConfig, build_model, materialize

LARGE = ModelConfig(
    architecture="qwen3_moe", vocab_size=32_000, hidden_size=2048, num_hidden_layers=4, head_dim=128,
    num_attention_heads=32, num_key_value_heads=4, intermediate_size=768, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8,
)  # fmt: skip
TINY = replace(
    LARGE, vocab_size=256, hidden_size=64, num_hidden_layers=1, head_dim=16, num_attention_heads=4,
    num_key_value_heads=2, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip


def packed_rows(num_rows: int, length: int, mean: int, vocab_size: int) -> Batch:
    """Random tokens in documents of geometrically distributed lengths."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocab_size, (num_rows, length), generator=generator)
    ends = torch.rand((num_rows, length), generator=generator) < 1 / mean
    ends[:, -1] = True
    starts = torch.cat((torch.ones(num_rows, 1, dtype=torch.bool), ends[:, :-1]), 1)
    ids = starts.long().cumsum(1) - 1
    places = torch.arange(length).expand_as(tokens)
    positions = places - torch.where(starts, places, 0).cummax(1).values
    return Batch(tokens, tokens.roll(-1, 1).masked_fill(ends, 0), positions, ids, ~ends)


def measure(model: Decoder, batch: Batch, meshes: Meshes, varlen: Varlen, steps: int) -> str:
    dtype = next(model.parameters()).dtype
    feed = Feed(meshes, ContextParallelConfig(varlen=varlen), dtype=dtype)
    began = time.perf_counter()
    prepared = [feed.prepare([batch]) for _ in range(steps)]
    plan_ms = (time.perf_counter() - began) / steps * 1e3

    def step(index: int) -> torch.Tensor:
        inputs = feed.inputs(prepared[index])
        out = model(**inputs[0], counts=feed.count(model, inputs), routing=feed.routing())
        out.loss.backward()
        model.zero_grad()
        return out.cross_entropy.detach()

    on_gpu = meshes.device.type == "cuda"
    for index in range(steps // 3):
        step(index)
    wait(meshes.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for index in range(steps // 3, steps):
        loss = step(index)
    wait(meshes.device)
    ms = (time.perf_counter() - began) / (steps - steps // 3) * 1e3
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    times = f"plan {plan_ms:6.1f} ms   step {ms:7.1f} ms"
    return f"{varlen:7} {times}   peak {peak:6.2f} GiB   loss {loss.item():.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=512, help="tokens of a document on average")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=15, help="the first third warms up")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny:
        require_gpu("try --tiny")
    config = TINY if args.tiny else LARGE
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(backend, store=dist.FileStore(store.name, 1), rank=0, world_size=1)
        meshes = build_meshes()
        model = build_model(config, ExpertsConfig())
        materialize(model, meshes.device, Initializer(0, 0.02, meshes))
        model.to(torch.bfloat16)
        args.steps = 3 if args.tiny else args.steps
        if args.tiny:
            args.rows, args.length, args.documents = 2, 64, 16
        batch = packed_rows(args.rows, args.length, args.documents, config.vocab_size)
        kinds: tuple[Varlen, ...] = ("never", "always")
        for varlen in kinds * 2:
            print(measure(model, batch, meshes, varlen, args.steps), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
