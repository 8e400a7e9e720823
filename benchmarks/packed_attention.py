"""Attention inside packed documents, forward and backward, by every kernel that takes them, on one GPU.

Rows of several documents whose lengths are drawn (exponential, cut at the row's end), through

    flash4      FlashAttention-4 (the extra ``fa4``), and with sums in a fixed order
    ragged      cuDNN's ragged form (the extra ``cudnn``)
    flash       torch's flash kernel: one variable-length call
    separate    torch's cuDNN, a call for every document
    alike       torch's cuDNN on as many pairs in documents of one length: what packing could reach

Times are medians. TFLOP/s count the pairs inside documents, 2 products forward and 5 backward. The error is
the largest of the output's and the gradients', against float32 in plain torch, relative to its norm.

    python benchmarks/packed_attention.py [--mean 1024]        0: a document a row
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from timing import require_gpu
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block
from fsdmoe.context_parallel.flash4_attention import has_flash4
from fsdmoe.context_parallel.fused_attention import Kernel, fused_backward, fused_forward
from fsdmoe.context_parallel.math_attention import math_backward, math_forward
from fsdmoe.context_parallel.ragged_attention import has_frontend


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    value_width: int
    rows: int
    length: int


SHAPES = (
    Shape(32, 4, 128, 128, 8, 4096),
    Shape(32, 4, 128, 128, 4, 8192),
    Shape(32, 4, 128, 128, 1, 32768),
    Shape(64, 8, 64, 64, 8, 4096),
    Shape(18, 18, 64, 64, 32, 2048),
    Shape(16, 16, 192, 128, 8, 4096),
)

Call = Callable[[], object]


def drawn_lengths(shape: Shape, mean: int) -> list[int]:
    """Of all rows' documents. A mean of 0 stands for a document a row."""
    if not mean:
        return [shape.length] * shape.rows
    source = random.Random(0)
    lengths = []
    for _ in range(shape.rows):
        left = shape.length
        while left:
            lengths.append(min(left, max(16, int(source.expovariate(1 / mean)))))
            left -= lengths[-1]
    return lengths


def block_of(lengths: list[int]) -> Block:
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    return Block(None, None, ends, ends, tuple(lengths), tuple(lengths), causal=True)


def draw(shape: Shape, num_tokens: int) -> list[Tensor]:
    sizes = [
        (shape.heads, shape.width),
        (shape.kv_heads, shape.width),
        (shape.kv_heads, shape.value_width),
        (shape.heads, shape.value_width),
    ]
    return [torch.randn(num_tokens, *size, device="cuda", dtype=torch.bfloat16) for size in sizes]


def milliseconds(call: Call) -> float:
    for _ in range(3):
        call()
    found = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


class Timed(NamedTuple):
    forward: float
    backward: float
    found: tuple[Tensor, ...] = ()
    """The output and the three gradients, where they are those of the packed rows."""


def by_kernel(kernel: Kernel, tensors: list[Tensor], block: Block, scale: float) -> Timed:
    q, k, v, grad = tensors
    out, lse = fused_forward(q, k, v, block, scale, kernel)
    grads = fused_backward(grad, (q, k, v), out, lse, block, scale, kernel)
    forward = milliseconds(lambda: fused_forward(q, k, v, block, scale, kernel))
    backward = milliseconds(lambda: fused_backward(grad, (q, k, v), out, lse, block, scale, kernel))
    return Timed(forward, backward, (out, *grads))


def in_order(run: Callable[[], Timed]) -> Timed:
    torch.use_deterministic_algorithms(True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


def separately(tensors: list[Tensor], lengths: list[int], scale: float) -> Timed:
    parts = list(zip(*(x.split(lengths) for x in tensors), strict=True))
    blocks = [block_of([length]) for length in lengths]

    def forward() -> list[tuple[Tensor, Tensor]]:
        return [
            fused_forward(q, k, v, block, scale, "cudnn")
            for (q, k, v, _), block in zip(parts, blocks, strict=True)
        ]

    kept = forward()

    def backward() -> None:
        for (q, k, v, grad), block, (out, lse) in zip(parts, blocks, kept, strict=True):
            fused_backward(grad, (q, k, v), out, lse, block, scale, "cudnn")

    return Timed(milliseconds(forward), milliseconds(backward))


def alike(shape: Shape, lengths: list[int], scale: float) -> Timed:
    """As many documents, of the length that gives the same number of pairs; scaled to it exactly."""
    length = max(8, int((sum(n * n for n in lengths) / len(lengths)) ** 0.5) // 8 * 8)
    block = block_of([length] * len(lengths))
    found = by_kernel("cudnn", draw(shape, length * len(lengths)), block, scale)
    share = pairs(lengths) / pairs([length] * len(lengths))
    return Timed(found.forward * share, found.backward * share)


def pairs(lengths: list[int]) -> float:
    return sum(n * (n + 1) / 2 for n in lengths)


def largest_error(
    found: tuple[Tensor, ...], tensors: list[Tensor], lengths: list[int], scale: float
) -> float:
    """Over the first documents, up to 4,096 tokens."""
    some = [lengths[0]]
    for length in lengths[1:]:
        if sum(some) + length <= 4096:
            some.append(length)
        else:
            break
    q, k, v, grad = (x[: sum(some)].float() for x in tensors)
    block = block_of(some)
    out, lse = math_forward(q, k, v, block, scale)
    wanted = (out, *math_backward(grad, (q, k, v), out, lse, block, scale))
    return max(
        ((a[: sum(some)].float() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)
    )


def measure(shape: Shape, mean: int) -> None:
    lengths = drawn_lengths(shape, mean)
    block = block_of(lengths)
    scale = shape.width ** (-0.5)
    tensors = draw(shape, sum(lengths))
    kernels: dict[Kernel, bool] = {"flash4": has_flash4(), "ragged": has_frontend(), "flash": True}
    ways: dict[str, Callable[[], Timed]] = {
        kernel: partial(by_kernel, kernel, tensors, block, scale)
        for kernel, there in kernels.items()
        if there
    }
    for kernel in ("flash4", "flash"):
        if kernel in ways:
            ways[f"{kernel}, in a fixed order"] = partial(in_order, ways[kernel])
    if len(set(lengths)) > 1:
        ways["separate"] = lambda: separately(tensors, lengths, scale)
        ways["alike"] = lambda: alike(shape, lengths, scale)
    else:
        ways["cudnn"] = partial(by_kernel, "cudnn", tensors, block, scale)
    one = 2 * pairs(lengths) * shape.heads
    flops = one * (shape.width + shape.value_width), one * (3 * shape.width + 2 * shape.value_width)
    name = f"{shape.heads}/{shape.kv_heads} heads of {shape.width}/{shape.value_width}"
    for way, run in ways.items():
        timed = run()
        rates = [f / t / 1e9 for f, t in zip(flops, timed[:2], strict=True)]
        both = sum(flops) / sum(timed[:2]) / 1e9
        error = f"{largest_error(timed.found, tensors, lengths, scale):.1e}" if timed.found else ""
        print(
            f"| {name} | {shape.rows} × {shape.length}, {len(lengths)} documents | {way} | "
            f"{timed.forward:.2f} | {timed.backward:.2f} | {rates[0]:.0f} | {rates[1]:.0f} | "
            f"{both:.0f} | {error} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mean", type=int, default=1024, help="length of a document; 0 for one a row")
    args = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    print(
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}; cuDNN {torch.backends.cudnn.version()}"
    )
    print("\n| heads | rows | by | forward, ms | backward, ms | TFLOP/s | | both | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        measure(shape, args.mean)


if __name__ == "__main__":
    main()
