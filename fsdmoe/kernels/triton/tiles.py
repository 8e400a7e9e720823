"""Tile sizes of the grouped GEMMs: a small table measured on an H200, in place of autotuning at run time.

``python benchmarks/expert_tiles.py`` prints the measurements behind it. What they say: 128 × 256 × 64
with eight warps is best nearly everywhere; a fourth stage pays for the first projection and for fp32
results; experts with few rows want 64-row tiles, because a half-empty tile costs as much as a full one.
Two programs a multiprocessor with tiles of 128 × 128 compute 1 to 8 % fewer columns in a second, so they are
chosen where 256 columns would waste more than that.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from fsdmoe.kernels.triton.launch import cdiv, next_power_of_2

# Rows an expert gets on average, below which padding to 128 wastes more than the smaller tile does.
_FEW_ROWS = 192
# Expert width up to which fetching rows through the map beats a permuted copy: the copy's cost over the
# GEMM's falls as 1/n, while fetching slows the GEMM by the same few percent at any width.
_GATHER_WIDTH = 2048
# A tile is too wide where it computes so many times the columns that narrow ones would.
_TOO_WIDE = 1.08
_NARROW = 128
# Elements of one expert's weight above which its gradient is walked in higher groups.
_LARGE_WEIGHT = 2**25


@dataclass(frozen=True)
class Tile:
    """One GEMM's blocking: an accumulator of m × n, fed k deep at a time."""

    m: int = 128
    n: int = 256
    k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    parts: int = 1
    """Column parts in which a tile of results is stored (see ``tile_store``)."""
    group: int = 16
    """Row tiles of one expert that are walked together (see ``grouped_gemm``)."""
    spare_sms: int = 0
    """Multiprocessors that get no program: a concurrent transfer holds as many, and programs that
    found no place would begin when the others are done."""
    per_sm: int = 1
    """Programs a multiprocessor: two where a product is so narrow that loads do not keep up with one."""


@dataclass(frozen=True)
class LayerTiles:
    """The choices for one layer: every expert's rows are padded to ``align``, the height of all row tiles."""

    align: int
    gathered: bool
    """The first projection fetches its rows through the map instead of reading a permuted copy."""
    gate_up: Tile
    project: Tile

    def project_to(self, num_columns: int) -> Tile:
        """The choice for a projection without a low-rank term whose results are so wide."""
        if self.align == 128 and _is_too_wide(self.project.n, num_columns):
            return _narrow_project(self.project.spare_sms)
        return self.project


def _is_too_wide(width: int, num_columns: int) -> bool:
    """Whether tiles of this width waste more columns than narrow ones lose otherwise."""
    return cdiv(num_columns, width) * width > _TOO_WIDE * cdiv(num_columns, _NARROW) * _NARROW


@functools.cache
def _narrow_project(spare_sms: int) -> Tile:
    return Tile(n=_NARROW, num_warps=4, parts=2, spare_sms=spare_sms, per_sm=2)


def tiles_for(num_assignments: int, num_experts: int, d: int, n: int, spare_sms: int = 0) -> LayerTiles:
    """The choice for a layer of E experts of width n over hidden size d, by its number of sorted rows."""
    has_few_rows = num_assignments < _FEW_ROWS * num_experts
    return _tiles(has_few_rows, n <= _GATHER_WIDTH and d % 64 == 0, spare_sms)


@functools.cache
def _tiles(has_few_rows: bool, gathered: bool, spare_sms: int) -> LayerTiles:
    if has_few_rows:
        tile = Tile(m=64, num_warps=4, num_stages=4, parts=4, spare_sms=spare_sms)
        return LayerTiles(64, gathered, gate_up=tile, project=tile)
    tile = Tile(spare_sms=spare_sms)
    return LayerTiles(128, gathered, gate_up=replace(tile, num_stages=4), project=tile)


def grad_tile(buffer: torch.Tensor, accumulate: bool, spare_sms: int = 0) -> Tile:
    """The choice for a weight gradient ``[E, A, B]``, by its type and size and whether it is added to."""
    if accumulate:  # what is read back needs the shared memory of the fourth stage, or of a second program
        return Tile(parts=4, spare_sms=spare_sms)
    if _is_too_wide(Tile.n, buffer.shape[2]):
        parts = 4 if buffer.dtype == torch.float32 else 2
        return Tile(n=_NARROW, num_warps=4, parts=parts, spare_sms=spare_sms, per_sm=2)
    group = 24 if buffer.shape[1] * buffer.shape[2] > _LARGE_WEIGHT else 16
    if buffer.dtype == torch.float32:
        return Tile(num_stages=4, parts=4, group=group, spare_sms=spare_sms)
    return Tile(group=group, spare_sms=spare_sms)


def narrow_tile(align: int, rank: int, spare_sms: int = 0) -> Tile:
    """The choice for a product into the rank of an update: bound by reading its rows."""
    width = rank_block(rank)
    return Tile(align, width, num_warps=4, num_stages=4, spare_sms=spare_sms, per_sm=2 if width <= 64 else 1)


def factor_tiles(rank: int, spare_sms: int = 0) -> tuple[Tile, Tile]:
    """The choices for the gradients of an update's factors, ``[E, Q, I]`` and ``[E, O, Q]``."""
    width = rank_block(rank)
    per_sm = 2 if width <= 64 else 1
    of_a = Tile(m=max(64, width), n=128, num_warps=4, num_stages=4, spare_sms=spare_sms, per_sm=per_sm)
    return of_a, replace(of_a, m=128, n=width)


def rank_block(rank: int) -> int:
    """The width in which a kernel takes this rank: no product is narrower than 16."""
    return max(16, next_power_of_2(rank))
