"""Measure the candidates behind the table in ``fsdmoe/kernels/triton/tiles.py``.

For every shape and every GEMM of the layer, all candidates and ``F.grouped_mm`` run in alternating order on
random data, and the median time of each is printed, fastest first. ``--tiny`` runs the same kernels on next
to nothing, which compiles them; several such processes with ``--slice 0/8``, ``1/8``, … fill Triton's cache
in parallel.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from timing import require_gpu

from fsdmoe.kernels.triton.grouped_gemm import GateUp, gate_up, project
from fsdmoe.kernels.triton.permute_kernels import combine_rows, permute_rows
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu import swiglu_backward_
from fsdmoe.kernels.triton.tiles import Tile
from fsdmoe.kernels.triton.weight_grad import weight_grad

# (hidden size, expert width, experts, choices a token, tokens)
SHAPES = {
    "qwen3-30b": (2048, 768, 128, 8, 16384),
    "qwen3-30b-short": (2048, 768, 128, 8, 2048),
    "d4096-n1536": (4096, 1536, 16, 8, 8192),
    "d7168-n2048": (7168, 2048, 32, 8, 4096),
    "d1152-n384": (1152, 384, 64, 8, 65536),
    "mixtral": (4096, 14336, 8, 2, 8192),
}
Candidate = tuple[str, str, Callable[[], object]]


def _tiles(m: int = 128) -> Iterator[tuple[str, Tile]]:
    for num_stages, parts in ((3, 1), (4, 4)):
        tile = Tile(m=m, num_warps=m // 16, num_stages=num_stages, parts=parts)
        yield f"rows {m} stages {num_stages} parts {parts}", tile
    if m == 128:
        yield "two programs of 128 x 128", Tile(n=128, num_warps=4, parts=4, per_sm=2)


class _Layer:
    """Random operands of one layer, sorted rows included."""

    def __init__(self, shape: tuple[int, int, int, int, int], align: int) -> None:
        self.d, self.n, self.num_experts, self.top_k, self.num_tokens = shape

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        scores = torch.rand(self.num_tokens, self.num_experts, device="cuda")
        self.ids = scores.topk(self.top_k, dim=-1).indices
        self.weights = torch.rand(self.num_tokens, self.top_k, device="cuda")
        self.x = random(self.num_tokens, self.d)
        self.gate_up = random(self.num_experts, 2 * self.n, self.d) * self.d**-0.5
        self.down = random(self.num_experts, self.d, self.n) * self.n**-0.5
        self.map: RowMap = build_row_map(self.ids, self.num_experts, align=align)
        self.rows_D = permute_rows(self.x, self.map)
        self.rows_N = random(self.map.capacity, self.n)
        self.rows_2N = random(self.map.capacity, 2 * self.n)
        self.pre = random(2, self.map.capacity, self.n)

    def row_candidates(self, align: int) -> Iterator[Candidate]:
        for name, tile in _tiles(align):
            for gathered in (False, True):
                rows = self.x if gathered else self.rows_D
                run = partial(gate_up, rows, self.weights, GateUp(self.gate_up), self.map)
                label = f"{name} gathered {gathered:d}"
                yield "gate_up", label, partial(run, gathered=gathered, store_pre=True, tile=tile)
            plain = partial(project, row_map=self.map, tile=tile)
            yield "down", name, partial(plain, self.rows_N, self.down, transposed=True)
            yield "dact", name, partial(plain, self.rows_D, self.down, transposed=False)
            yield "dx", name, partial(plain, self.rows_2N, self.gate_up, transposed=False)

    def grad_candidates(self) -> Iterator[Candidate]:
        for dtype in (torch.bfloat16, torch.float32):
            outs = [torch.empty_like(weight, dtype=dtype) for weight in (self.gate_up, self.down)]
            for (name, tile), group in product(_tiles(), (16, 24)):
                if dtype == torch.float32 and tile.parts == 1:
                    name, tile = f"{name[:-1]}2", replace(tile, parts=2)
                label = f"{name} group {group} {str(dtype)[6:]}"
                tile = replace(tile, group=group)
                run = partial(weight_grad, row_map=self.map, accumulate=False, tile=tile)
                yield "dgate_up", label, partial(run, self.rows_2N, self.rows_D, out_EAB=outs[0])
                yield "ddown", label, partial(run, self.rows_D, self.rows_N, out_EAB=outs[1])

    def other_candidates(self) -> Iterator[Candidate]:
        run = partial(F.grouped_mm, offs=self.map.offsets[1:-1])
        yield "gate_up", "grouped_mm (no SwiGLU)", partial(run, self.rows_D, self.gate_up.mT)
        yield "down", "grouped_mm", partial(run, self.rows_N, self.down.mT)
        yield "dact", "grouped_mm", partial(run, self.rows_D, self.down)
        yield "dx", "grouped_mm", partial(run, self.rows_2N, self.gate_up)
        yield "dgate_up", "grouped_mm", partial(run, self.rows_2N.mT, self.rows_D)
        yield "ddown", "grouped_mm", partial(run, self.rows_D.mT, self.rows_N)
        yield "rows", "map", partial(build_row_map, self.ids, self.num_experts, align=128)
        yield "rows", "permute", partial(permute_rows, self.x, self.map)
        yield "rows", "combine", partial(combine_rows, self.rows_D, self.map)
        run = partial(swiglu_backward_, self.pre, self.rows_N, self.weights, self.map)
        yield "rows", "swiglu backward", partial(run, torch.zeros_like(self.weights))

    def flops(self, operation: str) -> int:
        """Useful work: padding is not counted."""
        factor = {"gate_up": 4, "dx": 4, "dgate_up": 4, "down": 2, "dact": 2, "ddown": 2}.get(operation, 0)
        return factor * self.num_tokens * self.top_k * self.d * self.n


def _time(candidates: list[Candidate], rounds: int, repeats: int) -> list[float]:
    """Median milliseconds of each candidate, all of them run in turn, the order turned round every time."""
    times: list[list[float]] = [[] for _ in candidates]
    for turn in range(rounds):
        order = range(len(candidates)) if turn % 2 == 0 else reversed(range(len(candidates)))
        for i in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                candidates[i][2]()
            end.record()
            end.synchronize()
            times[i].append(start.elapsed_time(end) / repeats)
    return [statistics.median(t) for t in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument(
        "--tiny", action="store_true", help="compile only: run every candidate once on tiny operands"
    )
    parser.add_argument("--slice", default="0/1", help="run this share of the candidates (with --tiny)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    require_gpu()
    part, num_parts = map(int, args.slice.split("/"))
    for name in ["tiny"] if args.tiny else args.shapes:
        shape = (256, 128, 16, 8, 64) if args.tiny else SHAPES[name]
        layer = _Layer(shape, 128)
        candidates = [*layer.row_candidates(128), *layer.grad_candidates(), *layer.other_candidates()]
        if args.tiny or shape[4] * shape[3] // shape[2] <= 256:
            candidates += _Layer(shape, 64).row_candidates(64)
        if args.tiny:
            for _, _, run in candidates[part::num_parts]:
                run()
            torch.cuda.synchronize()
            continue
        for _, _, run in candidates:
            run()
        times = _time(candidates, args.rounds, args.repeats)
        print(f"\n{name} {shape}")
        rows = sorted(zip(candidates, times), key=lambda row: (row[0][0], row[1]))
        for (operation, label, _), ms in rows:
            rate = layer.flops(operation) / ms / 1e9
            print(f"  {operation:9} {ms:7.3f} ms {rate:6.0f} TFLOP/s  {label}")


if __name__ == "__main__":
    main()
