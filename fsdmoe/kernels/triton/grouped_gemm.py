"""Grouped GEMMs over rows sorted by expert: persistent loops, operands and results through TMA.

    ``project``      out[m] = a[m] @ w[e]^T  or  a[m] @ w[e]        (second projection, both input gradients)
    ``gate_up``      pre[m] = x[m] @ w1[e]^T + b1[e], act[m] = p[m] · silu(gate) · up, in one pass

e is the expert that row m belongs to. Every segment is a whole number of tiles (see ``row_map``), so a tile
has one expert and its stores need no mask. Each program walks tiles with the stride of the grid; the
flattened loop lets the loads of the next tile start under the epilogue of this one. In ``gate_up`` the
weight is seen as [E, 2, N, D] and one accumulator holds matching gate and up columns side by side, so
SwiGLU needs nothing from another tile; the pre-activation is stored as two planes [2, M, N], and the
descriptor then clips any N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, describe, num_programs
from fsdmoe.kernels.triton.row_map import RowMap
from fsdmoe.kernels.triton.swiglu import gated
from fsdmoe.kernels.triton.tile_store import store_tile
from fsdmoe.kernels.triton.tiles import Tile


class GateUp(NamedTuple):
    """The first projection, and what follows it."""

    weight_E2ND: torch.Tensor
    bias_E2N: torch.Tensor | None = None
    clamped: bool = False
    """gpt-oss's activation instead of SwiGLU."""


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
    a_desc,
    w_desc,
    out_desc,
    offsets_ptr,
    tile_expert_ptr,
    n,
    k,
    num_experts,
    num_programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr,
):
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = tl.load(offsets_ptr + num_experts) // BLOCK_M * tiles_n
    for tile in tl.range(tl.program_id(0), num_tiles, num_programs, flatten=True):
        expert, row, tile_n = _locate(tile, tiles_n, offsets_ptr, tile_expert_ptr, BLOCK_M, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for depth in tl.range(0, k, BLOCK_K):
            a = a_desc.load([row, depth])
            if TRANSPOSED:
                w = w_desc.load([expert, tile_n * BLOCK_N, depth]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w = w_desc.load([expert, depth, tile_n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(a, w, acc)
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
    CLAMPED: tl.constexpr,
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
        _, silu, linear = gated(gate, up, CLAMPED)
        act = silu * linear * weight[:, None]
        # Gathered padding repeats a real row; selecting (not multiplying) keeps even an infinity out of it.
        act = tl.where((source >= 0)[:, None], act, 0.0)
        act_desc.store([row, tile_n * HALF_N], act.to(act_desc.dtype))


def project(
    a_MK: torch.Tensor, weight: torch.Tensor, row_map: RowMap, *, transposed: bool, tile: Tile
) -> torch.Tensor:
    """``a @ weight[e]^T`` for weight ``[E, N, K]`` (transposed) or ``a @ weight[e]`` for ``[E, K, N]``."""
    capacity, k = a_MK.shape
    n = weight.shape[1] if transposed else weight.shape[2]
    out_MN = torch.empty(capacity, n, device=a_MK.device, dtype=a_MK.dtype)
    w_block = (1, tile.n, tile.k) if transposed else (1, tile.k, tile.n)
    programs = num_programs(a_MK.device, tile.spare_sms)
    _project_kernel[(programs,)](
        describe(a_MK, (tile.m, tile.k)),
        describe(weight, w_block),
        describe(out_MN.unsqueeze(0), (1, tile.m, tile.n // tile.parts)),
        row_map.offsets,
        row_map.tile_expert,
        n,
        k,
        row_map.num_experts,
        programs,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=tile.group,
        TRANSPOSED=transposed,
        PARTS=tile.parts,
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
    programs = num_programs(x.device, tile.spare_sms)
    _gate_up_kernel[(programs,)](
        x,
        describe(x, (tile.m, tile.k)),
        describe(first.weight_E2ND.view(num_experts, 2, n, d), (1, 2, half, tile.k)),
        describe(planes, (tile.m, half)),
        describe(act_MN, (tile.m, half)),
        weights_RK if first.bias_E2N is None else first.bias_E2N,
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
        CLAMPED=first.clamped,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return pre_2MN, act_MN
