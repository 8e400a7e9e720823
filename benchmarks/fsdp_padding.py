"""Padding of flat buffers over many ranks: fsdmoe's planner and row-aligned chunks of a common multiple.

Row-aligned layouts never cut a row of any matrix, so a slice must be a multiple of all row lengths of its
unit; with rows of 7168, 1536, 512 and 16384 elements in one layer that multiple is large, and what a rank
cannot use is padding. fsdmoe cuts between any two groups of 64 elements, and describes what a rank then
holds by boxes.

    python benchmarks/fsdp_padding.py              the table, and the time to plan each whole model
"""

from __future__ import annotations

import math
import time

from fsdmoe.fsdp.layout import Item, plan_layout
from fsdmoe.fsdp.layout import _plan as plan_cache

RANKS = (8, 64, 256, 1024)
Shapes = dict[str, tuple[int, ...]]

QWEN: Shapes = {"q": (8192, 4096), "k": (512, 4096), "v": (512, 4096), "o": (4096, 8192), "q_norm": (128,),
                "k_norm": (128,), "norm": (4096,), "norm2": (4096,), "gate": (128, 4096)}  # fmt: skip
DEEPSEEK: Shapes = {"q_a": (1536, 7168), "q_norm": (1536,), "q_b": (24576, 1536), "kv_a": (576, 7168),
                    "kv_norm": (512,), "kv_b": (32768, 512), "o": (7168, 16384), "norm": (7168,),
                    "norm2": (7168,), "gate": (256, 7168), "shared_gate": (2048, 7168),
                    "shared_up": (2048, 7168), "shared_down": (7168, 2048)}  # fmt: skip
MIXTRAL: Shapes = {"q": (6144, 6144), "k": (1024, 6144), "v": (1024, 6144), "o": (6144, 6144),
                   "norm": (6144,), "norm2": (6144,), "gate": (8, 6144)}  # fmt: skip
UNITS: dict[str, tuple[Shapes, Shapes, int]] = {
    "Qwen3-235B": (QWEN, {"gate_up": (128, 3072, 4096), "down": (128, 4096, 1536)}, 94),
    "DeepSeek-V3, 32 local experts": (DEEPSEEK, {"gate_up": (32, 4096, 7168), "down": (32, 7168, 2048)}, 61),
    "Mixtral-8x22B": (MIXTRAL, {"gate_up": (8, 32768, 6144), "down": (8, 6144, 16384)}, 56),
}


def flat_padding(shapes: Shapes, num_ranks: int) -> tuple[int, int]:
    layout = plan_layout([Item(name, math.prod(shape)) for name, shape in shapes.items()], num_ranks)
    return layout.padding, layout.numel - layout.padding


def row_padding(shapes: Shapes, num_ranks: int) -> tuple[int, int]:
    """Every matrix starts on its own row length, and slices are a multiple of all of them."""
    rows = [shape[-1] if len(shape) > 1 else 1 for shape in shapes.values()]
    end = 0
    for row, shape in zip(rows, shapes.values(), strict=True):
        end = -(-end // row) * row + math.prod(shape)
    chunk = math.lcm(*rows)
    total = sum(math.prod(shape) for shape in shapes.values())
    return -(-end // (num_ranks * chunk)) * num_ranks * chunk - total, total


def plan_whole_model(name: str, num_ranks: int) -> float:
    """Seconds to plan every layer, nothing remembered from before."""
    dense, experts, num_layers = UNITS[name]
    plan_cache.cache_clear()
    began = time.perf_counter()
    for _ in range(num_layers):
        flat_padding(dense, num_ranks)
        flat_padding(experts, num_ranks)
    return time.perf_counter() - began


def main() -> None:
    print(f"{'padding, % of the parameters':44s}" + "".join(f"{n:>10d} ranks" for n in RANKS))
    for name, (dense, experts, _) in UNITS.items():
        for part, shapes in (
            ("dense unit", [dense]),
            ("experts", [experts]),
            ("whole layer", [dense, experts]),
        ):
            for label, padding in (("64 elements", flat_padding), ("rows", row_padding)):
                cells = []
                for num_ranks in RANKS:
                    found = [padding(s, num_ranks) for s in shapes]
                    cells.append(100 * sum(p for p, _ in found) / sum(n for _, n in found))
                row = "".join(f"{cell:15.3f} " for cell in cells)
                print(f"{name.split(',')[0]:15s} {part:12s} {label:14s} {row}")
    for name in UNITS:
        seconds = [plan_whole_model(name, num_ranks) for num_ranks in RANKS]
        print(f"planning all of {name}: at most {max(seconds) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
