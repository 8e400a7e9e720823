"""Launches of the grouped GEMMs that add up in the matrix unit; see ``fp8_fast_gemm`` for how they work.

Scales of rows are ``[1, M]``, those of an expert's operand ``[E]`` in any shape.
Sizes: M sorted rows with padding, K contracted, N columns, E experts; A, B rows and columns of a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl

from fsdmoe.kernels.gluon.fp8_fast_gemm import fp8_fast_gemm_kernel
from fsdmoe.kernels.gluon.fp8_launch import describe
from fsdmoe.kernels.gluon.fp8_tiles import ADD, BULK, GATE_UP, OVERWRITE, PROJECT, WEIGHT_GRAD
from fsdmoe.kernels.triton.fp8_rows import Codes
from fsdmoe.kernels.triton.fp8_scale import BLOCK, FP8
from fsdmoe.kernels.triton.launch import num_programs
from fsdmoe.kernels.triton.row_map import RowMap

# Registers of a consumer's thread: both accumulators stay in them, and nothing else is large.
_REGISTERS = 232
_STAGES = 4
_GROUP = 16


class _Activated(NamedTuple):
    """Beside the pre-activation."""

    weights_RK: torch.Tensor
    act: Codes
    peaks: torch.Tensor
    keep: bool
    """The pre-activation is written."""


def _launch(
    operands: tuple[Codes, Codes],
    out: torch.Tensor,
    row_map: RowMap,
    sizes: tuple[int, int, int],
    what: tuple[gl.constexpr, gl.constexpr],
    activated: _Activated | None = None,
) -> None:
    (kind, store), (a, a_scales), (b, b_scales) = what, *operands
    rows, columns, steps = sizes
    # What a kind does not use is any tensor of a type that compiles.
    unused = _Activated(a_scales, Codes(a, a_scales), a_scales, True)
    weights_RK, (act_codes, act_scales), peaks, keep = activated or unused
    staged = out if store == BULK else a
    programs = num_programs(a.device)
    fp8_fast_gemm_kernel[(programs,)](
        describe(a.view(-1, a.shape[-1]), 128),
        describe(b.view(-1, b.shape[-1]), 128),
        describe(staged.view(-1, staged.shape[-1]), 64),
        describe(act_codes.view(-1, act_codes.shape[-1]), 64),
        out,
        a_scales,
        b_scales,
        weights_RK,
        row_map.source_M,
        act_scales,
        peaks,
        row_map.offsets,
        row_map.tile_expert,
        rows,
        columns,
        steps,
        row_map.capacity,
        row_map.num_experts,
        programs,
        KIND=kind.value,
        STORE=store.value,
        KEEP=keep,
        BY_ROW=a_scales.shape == (1, row_map.capacity),
        GROUP=_GROUP,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS,
        num_warps=4,
        maxnreg=168,
    )


def project(a: Codes, weight: Codes, row_map: RowMap, *, dtype: torch.dtype) -> torch.Tensor:
    """``a @ weight[e]^T``, ``[M, N]``: a ``[M, K]``, weight ``[E, N, K]``."""
    n, k = weight.codes.shape[1:]
    out_MN = torch.empty(row_map.capacity, n, device=a.codes.device, dtype=dtype)
    _launch((a, weight), out_MN, row_map, (BLOCK, n, k // BLOCK), (PROJECT, BULK))
    return out_MN


def gate_up(
    x: Codes,
    weights_RK: torch.Tensor,
    weight: Codes,
    act_scales_E: torch.Tensor,
    row_map: RowMap,
    *,
    keep: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, Codes, torch.Tensor]:
    """First projection with SwiGLU x weight: the pre-activation ``[2, M, N]`` if it is to be kept, the
    activation ``[M, N]`` with the scales that were given, and its largest magnitudes ``[N/128, M]``."""
    two_n, d = weight.codes.shape[1:]
    n, device = two_n // 2, x.codes.device
    act = Codes(torch.empty(row_map.capacity, n, device=device, dtype=FP8), act_scales_E)
    peaks = torch.empty(n // BLOCK, row_map.capacity, device=device, dtype=torch.float32)
    # Not kept, it is not written: a tensor of the right type and width describes it.
    planes = torch.empty(2 if keep else 0, row_map.capacity, n, device=device, dtype=dtype)
    out = planes if keep else torch.empty(64, n, device=device, dtype=dtype)
    activated = _Activated(weights_RK, act, peaks, keep)
    _launch((x, weight), out, row_map, (BLOCK, n, d // BLOCK), (GATE_UP, BULK), activated)
    return planes if keep else None, act, peaks


def weight_grad(
    left: Codes, right: Codes, row_map: RowMap, out_EAB: torch.Tensor, *, accumulate: bool
) -> None:
    """Write or add ``left^T @ right`` of each expert's rows into ``out`` (contiguous, fp32 or bf16); panels
    ``[M/128, A, 128]`` and ``[M/128, B, 128]``."""
    store = ADD if accumulate else BULK if out_EAB.dtype == torch.bfloat16 else OVERWRITE
    _, a, b = out_EAB.shape
    _launch((left, right), out_EAB, row_map, (a, b, 1), (WEIGHT_GRAD, store))
