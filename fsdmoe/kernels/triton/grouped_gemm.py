"""Grouped GEMMs over rows sorted by expert: persistent loops, operands and results through TMA.

    ``project``      out[m] = a[m] @ w[e]^T  or  a[m] @ w[e]        (second projection, both input gradients)
    ``gate_up``      pre[m] = x[m] @ w1[e]^T + b1[e], act[m] = p[m] · φ(gate) · linear(up), in one pass

e is the expert that row m belongs to. Every segment is a whole number of tiles (see ``row_map``), so a tile
has one expert and its stores need no mask. Each program walks tiles with the stride of the grid; the
flattened loop lets the loads of the next tile start under the epilogue of this one. In ``gate_up`` the
weight is seen as [E, 2, N, D] and one accumulator holds matching gate and up columns side by side, so
the activation needs nothing from another tile; the pre-activation is stored as two planes [2, M, N], and the
descriptor then clips any N.

Either may add a low-rank term, ``narrow[m] @ factor[e]``, before its epilogue: one more step of the depth.
``narrow`` comes from ``project`` with a narrow tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.activations import GPT_OSS_LIMIT
from fsdmoe.kernels.triton.launch import QuickLaunch, describe, num_programs
from fsdmoe.kernels.triton.row_map import GatheredRows, RowMap
from fsdmoe.kernels.triton.swiglu import activated
from fsdmoe.kernels.triton.tile_store import store_tile
from fsdmoe.kernels.triton.tiles import Tile, rank_block


class GateUp(NamedTuple):
    """The first projection, and what follows it."""

    weight_E2ND: torch.Tensor
    bias_E2N: torch.Tensor | None = None
    activation: str = "swiglu"
    limit: float = GPT_OSS_LIMIT


class LowRankTerm(NamedTuple):
    """What is added to a wide product: ``narrow[m] @ factor[e]``."""

    narrow_MQ: torch.Tensor
    factor: torch.Tensor
    """``[E, N, Q]`` next to a transposed weight, else ``[E, Q, N]``."""


# A low-rank term is added in pieces of at most so many ranks: shared memory has no place for more.
_MAX_RANKS = 32


@triton.jit
def _locate(tile, tiles_n, offsets_ptr, tile_expert_ptr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile number -> expert, first row, column tile.

    Within an expert, rows run fastest inside groups of GROUP_M row tiles: programs that run together then
    share weight tiles, and a group's rows stay in the L2 cache while the columns pass by.
    """
    expert = tl.load(tile_expert_ptr + tile // tiles_n)
    start = tl.load(offsets_ptr + expert)
    tiles_m = (tl.load(offsets_ptr + expert + 1) - start) // BLOCK_M
    local = tile - start // BLOCK_M * tiles_n
    first = local // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    rest = local - first * tiles_n
    return expert, start + (first + rest % height) * BLOCK_M, rest // height


@QuickLaunch
@triton.jit(do_not_specialize=["num_experts", "num_programs"])
def _project_kernel(
    a_ptr,
    a_desc,
    w_desc,
    out_desc,
    narrow_desc,
    factor_desc,
    source_ptr,
    offsets_ptr,
    tile_expert_ptr,
    n,
    k,
    num_experts,
    num_programs,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = tl.load(offsets_ptr + num_experts) // BLOCK_M * tiles_n
    for tile in tl.range(tl.program_id(0), num_tiles, num_programs, flatten=True):
        expert, row, tile_n = _locate(tile, tiles_n, offsets_ptr, tile_expert_ptr, BLOCK_M, GROUP_M)
        if GATHER:
            source = tl.load(source_ptr + row + tl.arange(0, BLOCK_M))
            token = tl.maximum(source, 0) // TOP_K
            a_ptrs = a_ptr + token[:, None].to(tl.int64) * k + tl.arange(0, BLOCK_K)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for depth in tl.range(0, k, BLOCK_K):
            if GATHER:
                a = tl.load(a_ptrs + depth)
            else:
                a = a_desc.load([row, depth])
            if TRANSPOSED:
                w = w_desc.load([expert, tile_n * BLOCK_N, depth]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w = w_desc.load([expert, depth, tile_n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(a, w, acc)
        for rank in tl.static_range(0, RANK, RANKS):
            narrow = narrow_desc.load([row, rank])
            if TRANSPOSED:
                factor = factor_desc.load([expert, tile_n * BLOCK_N, rank]).reshape(BLOCK_N, RANKS).T
            else:
                factor = factor_desc.load([expert, rank, tile_n * BLOCK_N]).reshape(RANKS, BLOCK_N)
            acc = tl.dot(narrow, factor, acc)
        if GATHER:  # padding repeats a real row: as zeros it cannot bring an infinity into a gradient
            acc = tl.where((source >= 0)[:, None], acc, 0.0)
        store_tile(out_desc, 0, row, tile_n * BLOCK_N, acc, BLOCK_M, BLOCK_N, PARTS, False)


@QuickLaunch
@triton.jit(do_not_specialize=["num_experts", "num_programs", "capacity"])
def _gate_up_kernel(
    x_ptr,
    x_desc,
    w_desc,
    pre_desc,
    act_desc,
    bias_ptr,
    narrow_desc,
    factor_desc,
    weights_ptr,
    source_ptr,
    offsets_ptr,
    tile_expert_ptr,
    n,
    d,
    capacity,
    num_experts,
    num_programs,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALF_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATHER: tl.constexpr,
    STORE_PRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
):
    tiles_n = tl.cdiv(n, HALF_N)
    num_tiles = tl.load(offsets_ptr + num_experts) // BLOCK_M * tiles_n
    for tile in tl.range(tl.program_id(0), num_tiles, num_programs, flatten=True):
        expert, row, tile_n = _locate(tile, tiles_n, offsets_ptr, tile_expert_ptr, BLOCK_M, GROUP_M)
        rows = row + tl.arange(0, BLOCK_M)
        if GATHER:
            token = tl.maximum(tl.load(source_ptr + rows), 0) // TOP_K
            x_ptrs = x_ptr + token[:, None].to(tl.int64) * d + tl.arange(0, BLOCK_K)[None, :]
        acc = tl.zeros([BLOCK_M, 2 * HALF_N], tl.float32)
        for depth in tl.range(0, d, BLOCK_K):
            if GATHER:
                x = tl.load(x_ptrs + depth)
            else:
                x = x_desc.load([row, depth])
            w = w_desc.load([expert, 0, tile_n * HALF_N, depth]).reshape(2 * HALF_N, BLOCK_K)
            acc = tl.dot(x, w.T, acc)
        for rank in tl.static_range(0, RANK, RANKS):
            narrow = narrow_desc.load([row, rank])
            factor = factor_desc.load([expert, 0, tile_n * HALF_N, rank]).reshape(2 * HALF_N, RANKS)
            acc = tl.dot(narrow, factor.T, acc)
        gate, up = tl.split(acc.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1))
        if HAS_BIAS:
            columns = tile_n * HALF_N + tl.arange(0, HALF_N)
            bias_ptrs = bias_ptr + expert.to(tl.int64) * (2 * n) + columns
            gate += tl.load(bias_ptrs, mask=columns < n, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptrs + n, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        if STORE_PRE:
            pre_desc.store([row, tile_n * HALF_N], gate.to(pre_desc.dtype))
            pre_desc.store([capacity + row, tile_n * HALF_N], up.to(pre_desc.dtype))
        source = tl.load(source_ptr + rows)
        weight = tl.load(weights_ptr + source, mask=source >= 0, other=0.0).to(tl.float32)
        phi, _, linear, _ = activated(gate, up, ACTIVATION, LIMIT)
        act = phi * linear * weight[:, None]
        # Gathered padding repeats a real row; selecting (not multiplying) keeps even an infinity out of it.
        act = tl.where((source >= 0)[:, None], act, 0.0)
        act_desc.store([row, tile_n * HALF_N], act.to(act_desc.dtype))


def _ranks(term: LowRankTerm) -> tuple[int, int]:
    """The rank in which the kernels take a term, and that of its pieces."""
    rank = rank_block(term.narrow_MQ.shape[1])
    return rank, min(rank, _MAX_RANKS)


def project(
    a: torch.Tensor | GatheredRows,
    weight: torch.Tensor,
    row_map: RowMap,
    *,
    transposed: bool,
    tile: Tile,
    term: LowRankTerm | None = None,
) -> torch.Tensor:
    """``a @ weight[e]^T`` for weight ``[E, N, K]`` (transposed) or ``a @ weight[e]`` for ``[E, K, N]``, with
    ``term`` added. ``a`` are rows ``[M, K]``."""
    gathered = isinstance(a, GatheredRows)
    rows = a.x_RD if isinstance(a, GatheredRows) else a
    k = rows.shape[1]
    n = weight.shape[1] if transposed else weight.shape[2]
    out_MN = torch.empty(row_map.capacity, n, device=rows.device, dtype=rows.dtype)
    w_block = (1, tile.n, tile.k) if transposed else (1, tile.k, tile.n)
    programs = tile.per_sm * num_programs(rows.device, tile.spare_sms)
    a_desc = narrow_desc = describe(rows, (tile.m, tile.k))
    w_desc = factor_desc = describe(weight, w_block)
    rank = 0
    ranks = 1
    parts = tile.parts
    if term is not None:
        rank, ranks = _ranks(term)
        narrow_desc = describe(term.narrow_MQ, (tile.m, ranks))
        factor_desc = describe(term.factor, (1, tile.n, ranks) if transposed else (1, ranks, tile.n))
        # Its operands need the shared memory that a whole tile of results would be stored through.
        parts = max(parts, 2)
    _project_kernel[(programs,)](
        rows,
        a_desc,
        w_desc,
        describe(out_MN.unsqueeze(0), (1, tile.m, tile.n // parts)),
        narrow_desc,
        factor_desc,
        row_map.source_M,
        row_map.offsets,
        row_map.tile_expert,
        n,
        k,
        row_map.num_experts,
        programs,
        TOP_K=row_map.top_k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=tile.group,
        TRANSPOSED=transposed,
        GATHER=gathered,
        RANK=rank,
        RANKS=ranks,
        PARTS=parts,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_MN


def gate_up(
    x: torch.Tensor,
    weights_RK: torch.Tensor,
    first: GateUp,
    row_map: RowMap,
    *,
    gathered: bool,
    store_pre: bool,
    tile: Tile,
    term: LowRankTerm | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """First projection with activation × weight: ``(pre-activation [2, M, N] or None, activation [M, N])``.

    ``x`` is the layer's input ``[R, D]`` when ``gathered`` (rows are fetched through the map; D must be a
    multiple of the tile's depth), else the permuted rows ``[M, D]``.
    """
    num_experts, two_n, d = first.weight_E2ND.shape
    n = two_n // 2
    capacity = row_map.capacity
    act_MN = torch.empty(capacity, n, device=x.device, dtype=x.dtype)
    pre_2MN = torch.empty(2, capacity, n, device=x.device, dtype=x.dtype) if store_pre else None
    planes = act_MN if pre_2MN is None else pre_2MN.view(2 * capacity, n)
    half = tile.n // 2
    programs = tile.per_sm * num_programs(x.device, tile.spare_sms)
    x_desc = narrow_desc = describe(x, (tile.m, tile.k))
    w_desc = factor_desc = describe(first.weight_E2ND.view(num_experts, 2, n, d), (1, 2, half, tile.k))
    rank = 0
    ranks = 1
    if term is not None:
        rank, ranks = _ranks(term)
        narrow_desc = describe(term.narrow_MQ, (tile.m, ranks))
        factor_desc = describe(term.factor.view(num_experts, 2, n, -1), (1, 2, half, ranks))
    _gate_up_kernel[(programs,)](
        x,
        x_desc,
        w_desc,
        describe(planes, (tile.m, half)),
        describe(act_MN, (tile.m, half)),
        weights_RK if first.bias_E2N is None else first.bias_E2N,
        narrow_desc,
        factor_desc,
        weights_RK,
        row_map.source_M,
        row_map.offsets,
        row_map.tile_expert,
        n,
        d,
        capacity,
        num_experts,
        programs,
        TOP_K=row_map.top_k,
        BLOCK_M=tile.m,
        HALF_N=half,
        BLOCK_K=tile.k,
        GROUP_M=tile.group,
        GATHER=gathered,
        STORE_PRE=store_pre,
        HAS_BIAS=first.bias_E2N is not None,
        RANK=rank,
        RANKS=ranks,
        ACTIVATION=first.activation,
        LIMIT=first.limit,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return pre_2MN, act_MN
