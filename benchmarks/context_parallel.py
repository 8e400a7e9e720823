"""How well are packed, long-tailed batches split, and what does a context-parallel size per micro-batch gain?

Without a GPU: plans steps of a log-normal length distribution (median 1,000 tokens, sigma 1.3, at most
131,072) for 64 ranks in nodes of 8, at most 8,192 tokens a rank and micro-batch, and prints for every batch
the attention work imbalance of the ranks ((most - least) / mean, from the tokens each rank really gets), the
padding, and the planned duration against two static ones: one size for all, packed as carefully, and packed
in order of arrival. Half a minute on one core::

    python benchmarks/context_parallel.py
    python benchmarks/context_parallel.py --far-bandwidth 3e11      # as if all ranks were in one node

With one (``--gpu``): first times attention kernels, forward and backward, on the segments that ranks run,
fits the cost model to the timings, and plans with that (``--save`` keeps the coefficients, ``--coefficients``
reads them). Then ``--ranks`` processes on the one GPU compare ring, all-to-all and all-gather over NCCL with
one rank on 16K tokens::

    python benchmarks/context_parallel.py --gpu --ranks 4 --save coefficients.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.block_attention import attend_block, attend_block_backward
from fsdmoe.context_parallel.blocks import Block
from fsdmoe.context_parallel.cost import CostModel, Timing, fit_attention
from fsdmoe.context_parallel.fused_attention import choose_kernel
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.planner import group_sizes, plan_step
from fsdmoe.context_parallel.split import split_documents
from fsdmoe.context_parallel.step_plan import StepPlan, imbalance
from tests.support.attention_work import num_pairs, plan_in_order, work_R

NUM_RANKS, MAX_TOKENS, LONGEST, MICRO_BATCHES = 64, 8192, 131_072, 8
MEDIAN, SIGMA, SHORTEST = 1000, 1.3, 32
HEADS, KV_HEADS, WIDTH = 32, 4, 128
KERNEL_TOKENS = 16_384
DEVICE = "cuda"


def long_tailed_lengths(seed: int) -> list[int]:
    """Documents of one global batch: as many as fill the micro-batches of all ranks."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < NUM_RANKS * MAX_TOKENS * MICRO_BATCHES:
        lengths.append(int(np.clip(np.exp(rng.normal(np.log(MEDIAN), SIGMA)), SHORTEST, LONGEST)))
    return lengths


def measured_work(plan: StepPlan) -> tuple[np.ndarray, float]:
    """Query-key pairs of each rank, and the share of padding, from the split of every micro-batch."""
    work, padding, held = np.zeros(plan.num_ranks), 0, 0
    for mb in (mb for slot in plan.slots for mb in slot):
        split = split_documents([plan.lengths_of(mb)], mb.size)
        work[mb.ranks] += work_R(split).numpy()
        padding, held = padding + split.num_padding, held + split.index_RBL.numel()
    return work, padding / held


def plan_batches(cost: CostModel, num_batches: int) -> None:
    static_size = LONGEST // MAX_TOKENS
    print(f"\n{NUM_RANKS} ranks, {MAX_TOKENS} tokens a rank; static size {static_size}; ms of one layer")
    print("batch  documents  longest   ideal  dynamic  static  in order   static/dyn  order/dyn   "
          "imbalance dyn  static  order   padding")  # fmt: skip
    ratios, worst, planning = [], 0.0, []
    for seed in range(num_batches):
        lengths = long_tailed_lengths(seed)
        arguments = {"num_ranks": NUM_RANKS, "max_tokens": MAX_TOKENS}
        start = time.process_time()
        dynamic = plan_step(lengths, sizes=group_sizes(NUM_RANKS), cost=cost, **arguments)
        planning.append(time.process_time() - start)
        static = plan_step(lengths, sizes=(static_size,), cost=cost, **arguments)
        in_order = plan_in_order(lengths, size=static_size, **arguments)
        milliseconds = [1e3 * plan.seconds(cost) for plan in (dynamic, static, in_order)]
        work, padding = measured_work(dynamic)
        uneven = [imbalance(work), *(imbalance(plan.work_of_ranks()) for plan in (static, in_order))]
        ratios.append((milliseconds[1] / milliseconds[0], milliseconds[2] / milliseconds[0]))
        worst = max(worst, uneven[0])
        print(f"{seed:5d}  {len(lengths):9d}  {max(lengths):7d}  {ideal_milliseconds(lengths, cost):6.1f}"
              f"  {milliseconds[0]:7.1f}  {milliseconds[1]:6.1f}  {milliseconds[2]:8.1f}"
              f"   {ratios[-1][0]:10.2f}  {ratios[-1][1]:9.2f}   {uneven[0]:13.2%}  {uneven[1]:6.1%}"
              f"  {uneven[2]:5.0%}   {padding:7.3%}")  # fmt: skip
    against_static, against_order = (statistics.mean(column) for column in zip(*ratios, strict=True))
    print(f"mean: {against_static:.2f} x static, {against_order:.2f} x in order; worst imbalance {worst:.2%};"
          f" planning a step: {statistics.mean(planning):.2f} s of one core")  # fmt: skip


def ideal_milliseconds(lengths: Sequence[int], cost: CostModel) -> float:
    """Lower bound: all ranks always busy, and no document split more than memory asks for."""
    seconds = 0.0
    for length in lengths:
        size = next(size for size in group_sizes(NUM_RANKS) if size * MAX_TOKENS >= length)
        seconds += size * cost.attention_seconds(length, size) + length * cost.rest_per_token
    return 1e3 * seconds / NUM_RANKS


def uniform_block(num_queries: int, num_keys: int, causal: bool) -> Block:
    """Segments of one shape, as many as make up the tokens of the benchmark."""
    count = max(1, KERNEL_TOKENS // num_queries)
    starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    lengths = (num_queries,) * count, (num_keys,) * count
    return Block(None, None, starts * num_queries, starts * num_keys, *lengths, causal)


def packed_blocks() -> list[Block]:
    """What one rank runs for a row of mixed documents, alone and as one of four."""
    lengths, total = [], 0
    for length in long_tailed_lengths(0):
        lengths.append(min(length, KERNEL_TOKENS - total))
        total += lengths[-1]
        if total == KERNEL_TOKENS:
            break
    alone = AttentionPlan(split_documents([lengths], 1), None, DEVICE).whole
    split = split_documents([lengths, lengths, lengths, lengths], 4)
    group_of_four = _PretendedPlan(split, rank=1)
    return [block for block in (alone, *group_of_four.ring[:2]) if block is not None]


class _PretendedPlan(AttentionPlan):
    """The plan of one rank of a group that is not there."""

    def __init__(self, split: object, rank: int) -> None:
        self.split, self.rank, self.size = split, rank, split.size  # type: ignore[attr-defined, assignment]
        self.group, self.device = None, torch.device(DEVICE)


def seconds_of(run: Callable[[], object], repeats: int = 10) -> float:
    """Median, after warming up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def time_block(block: Block) -> tuple[Timing, str]:
    def tensor(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, WIDTH, dtype=torch.bfloat16, device=DEVICE)

    index = block.query_index, block.key_index
    num_queries, num_keys = (
        sum(lengths) if rows is None else int(rows.max()) + 1
        for rows, lengths in zip(index, (block.query_lengths, block.key_lengths), strict=True)
    )
    q, grad = tensor(num_queries, HEADS), tensor(num_queries, HEADS)
    k, v = tensor(num_keys, KV_HEADS), tensor(num_keys, KV_HEADS)
    lse = torch.full((num_queries, HEADS), 8.0, device=DEVICE)

    def run() -> None:
        attend_block(q, k, v, block, WIDTH**-0.5)
        attend_block_backward(grad, (q, k, v), q, lse, block, WIDTH**-0.5)

    timing = Timing(block.query_lengths, block.key_lengths, block.causal, seconds_of(run))
    return timing, choose_kernel(q, v, block) or "plain"


def fit_on_gpu() -> CostModel:
    """Fitted to the kernel that packed documents of different lengths take. A micro-batch of one document
    takes a faster one; the planner counts it as if it were packed."""
    print(f"{torch.cuda.get_device_name()}, {HEADS} heads of {WIDTH}, {KV_HEADS} key-value heads, bf16")
    print("segments  queries     keys  causal  kernel      ms  TFLOP/s")
    shapes = [(n, n, True) for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)]
    shapes += [(2 * n, n, False) for n in (16, 32, 64, 128, 512, 2048, 8192)]
    blocks = [uniform_block(*shape) for shape in shapes] + packed_blocks()
    timings = []
    for block in blocks:
        timing, kernel = time_block(block)
        if kernel != "cudnn":
            timings.append(timing)
        rate = 14 * HEADS * WIDTH * num_pairs(block) / timing.seconds / 1e12
        print(f"{len(block.query_lengths):8d}  {block.max_queries:7d}  {block.max_keys:7d}"
              f"  {block.causal!s:6}  {kernel:6}  {1e3 * timing.seconds:6.2f}  {rate:7.0f}")  # fmt: skip
    model, error = fit_attention(CostModel(), timings)
    print(f"fitted: {model.per_call:.3g} s a call, {model.per_pair:.3g} s a pair, "
          f"{model.per_token:.3g} s a token; largest relative error {error:.0%}")  # fmt: skip
    return model


def check_over_nccl(rank: int, size: int, port: int) -> None:
    """All ranks share the one GPU, so NCCL is told that each is a host of its own: right, but slow."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size),
        NCCL_HOSTID=f"h{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
    )  # fmt: skip
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    for name, num_kv_heads, width in (("grouped", KV_HEADS, WIDTH), ("latent", HEADS, 192)):
        lengths = [KERNEL_TOKENS - 5000, 3001, 1500, 499]
        generator = torch.Generator().manual_seed(0)
        heads_widths = ((HEADS, width), (num_kv_heads, width), (num_kv_heads, WIDTH), (HEADS, WIDTH))
        whole = [
            torch.randn(1, KERNEL_TOKENS, *shape, generator=generator).bfloat16() for shape in heads_widths
        ]
        expected = run_attention("ring", [x.to(DEVICE) for x in whole], lengths, None)
        for mode in ("ring", "all_to_all", "all_gather"):
            found = run_attention(mode, [x.to(DEVICE) for x in whole], lengths, dist.group.WORLD)
            errors = [
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)
            ]
            if rank == 0:
                text = "  ".join(
                    f"{x} {e:.1e}" for x, e in zip(("out", "dq", "dk", "dv"), errors, strict=True)
                )
                print(f"{size} ranks over NCCL, {name:8} {mode:11} relative errors: {text}", flush=True)
            assert max(errors) < 2e-2, f"rank {rank}, {mode}: {errors}"
    dist.destroy_process_group()


def run_attention(
    mode: str, whole: list[torch.Tensor], lengths: list[int], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Whole output and gradients, gathered."""
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    split = split_documents([lengths], size)
    q, k, v, grad = (split.shard(x, rank) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plan = AttentionPlan(split, group, DEVICE)
    out = ContextAttention(mode).attend(*leaves, plan, leaves[0].shape[-1] ** -0.5)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out, leaves, grad)
    return [split.gather(x.detach().float(), group) for x in (out, *grads)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpu", action="store_true", help="time kernels, fit the cost model, check over NCCL"
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the NCCL check; 0 leaves it out")
    parser.add_argument("--batches", type=int, default=8, help="batches to plan")
    parser.add_argument("--far-bandwidth", type=float, help="bytes a second between nodes, for planning")
    parser.add_argument("--save", type=Path, help="write the fitted cost model here (JSON)")
    parser.add_argument("--coefficients", type=Path, help="plan with a cost model saved before")
    arguments = parser.parse_args()
    cost = CostModel()
    if arguments.coefficients:
        cost = CostModel(**json.loads(arguments.coefficients.read_text()))
    if arguments.gpu:
        cost = fit_on_gpu()
    if arguments.save:
        arguments.save.write_text(json.dumps(dataclasses.asdict(cost), indent=2) + "\n")
    if arguments.far_bandwidth:
        cost = dataclasses.replace(cost, far_bandwidth=arguments.far_bandwidth)
    plan_batches(cost, arguments.batches)
    if arguments.gpu and arguments.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(check_over_nccl, (arguments.ranks, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
