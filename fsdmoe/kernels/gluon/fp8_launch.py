"""Launches of the grouped GEMMs in fp8; see ``fp8_gemm`` for how they work.

Sizes: M sorted rows with padding, K contracted, N columns, E experts; A, B rows and columns of a gradient.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsdmoe.kernels.gluon.fp8_gemm import fp8_gemm_kernel
from fsdmoe.kernels.gluon.fp8_tiles import (
    ADD,
    BULK,
    CODES,
    GATE_UP,
    NOTHING,
    OVERWRITE,
    PROJECT,
    VALUES,
    WEIGHT_GRAD,
)
from fsdmoe.kernels.triton.fp8_rows import Codes, empty_codes
from fsdmoe.kernels.triton.fp8_scale import BLOCK, FP8
from fsdmoe.kernels.triton.grouped_gemm import LowRankTerm
from fsdmoe.kernels.triton.launch import num_programs
from fsdmoe.kernels.triton.row_map import RowMap

KeptAs = Literal["nothing", "values", "codes"]
"""What the first product leaves for backward of its pre-activation."""

_KEEP = {"nothing": NOTHING, "values": VALUES, "codes": CODES}
_LAYOUTS = {
    (dtype, rows): gl.NVMMASharedLayout.get_default_for([rows, BLOCK], element)
    for dtype, element in ((FP8, gl.float8e4nv), (torch.bfloat16, gl.bfloat16))
    for rows in (64, 128)
}
_TERM_RANKS = 64
"""Of a low-rank term that one step takes, see ``fp8_tiles``."""
# Registers of a consumer's thread, see ``fp8_gemm``; all three together share 504 a lane.
_REGISTERS = 216
_STAGES = 4
_GROUP = 16

# Descriptors by everything that their checks look at, as in ``triton/launch.py``; they hold no tensor.
_checked: dict[tuple[Any, ...], dict[str, Any]] = {}
_MAX_CHECKED = 4096


def describe(matrix: torch.Tensor, rows: int, columns: int = BLOCK) -> TensorDescriptor:
    """Of a contiguous matrix whose copies move ``rows`` x ``columns`` elements."""
    key = (matrix.shape, matrix.dtype, rows, columns, matrix.data_ptr() % 16)
    fields = _checked.get(key)
    if fields is None:
        layout = _LAYOUTS[matrix.dtype, rows]
        made = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)
        made.__dict__["trait"] = matrix.dtype, rows, columns  # what a kernel is compiled for
        if len(_checked) >= _MAX_CHECKED:
            _checked.clear()
        _checked[key] = {name: value for name, value in vars(made).items() if name != "base"}
        return made
    copied = TensorDescriptor.__new__(TensorDescriptor)
    copied.__dict__.update(fields)
    copied.base = matrix
    return copied


def _launch(
    operands: tuple[Codes, Codes],
    outputs: tuple[torch.Tensor | Codes, Codes | None],
    row_map: RowMap,
    sizes: tuple[int, int, int],
    what: tuple[gl.constexpr, gl.constexpr, gl.constexpr],
    *,
    weights_RK: torch.Tensor | None = None,
    power_of_two: bool = False,
    term: LowRankTerm | None = None,
) -> None:
    kind, store, keep = what
    (a, a_scales), (b, b_scales) = operands
    out, act = outputs
    # Where stores go that are no bulk copies: the scales of codes, or an output in fp32.
    out, direct = (out, out) if isinstance(out, torch.Tensor) else out
    rows, columns, steps = sizes
    # What a kind does not use is any tensor of a type that compiles.
    act_codes, act_scales = (a, a_scales) if act is None else act
    staged = out if store == BULK else a
    narrow_desc = factor_desc = describe(a.view(-1, a.shape[-1]), 128)
    num_pieces = 0
    if term is not None:
        narrow_MQ, factor_ENQ = term
        num_pieces = -(-narrow_MQ.shape[1] // _TERM_RANKS)
        narrow_desc = describe(narrow_MQ, 128, _TERM_RANKS)
        factor_desc = describe(factor_ENQ.view(-1, factor_ENQ.shape[-1]), 128, _TERM_RANKS)
    programs = num_programs(a.device)
    fp8_gemm_kernel[(programs,)](
        describe(a.view(-1, a.shape[-1]), 128),
        describe(b.view(-1, b.shape[-1]), 128),
        describe(staged.view(-1, staged.shape[-1]), 64),
        describe(act_codes.view(-1, act_codes.shape[-1]), 64),
        direct,
        a_scales,
        b_scales,
        a_scales if weights_RK is None else weights_RK,
        row_map.source_M,
        act_scales,
        row_map.offsets,
        row_map.tile_expert,
        rows,
        columns,
        steps,
        row_map.capacity,
        row_map.num_experts,
        programs,
        narrow_desc,
        factor_desc,
        KIND=kind.value,
        STORE=store.value,
        KEEP=keep.value,
        POWER_OF_TWO=power_of_two,
        GROUP=_GROUP,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS,
        TERM=num_pieces,
        num_warps=4,
        maxnreg=168,
    )


def project(
    a: Codes, weight: Codes, row_map: RowMap, *, dtype: torch.dtype, term: LowRankTerm | None = None
) -> torch.Tensor:
    """``a @ weight[e]^T``, ``[M, N]``: a ``[M, K]`` with scales ``[K/128, M]``, weight ``[E, N, K]`` with
    scales ``[E, N/128, K/128]``. With ``narrow[m] @ factor[e]^T`` added, where a term is given."""
    n, k = weight.codes.shape[1:]
    out_MN = torch.empty(row_map.capacity, n, device=a.codes.device, dtype=dtype)
    _launch((a, weight), (out_MN, None), row_map, (BLOCK, n, k // BLOCK), (PROJECT, BULK, VALUES), term=term)
    return out_MN


def gate_up(
    x: Codes,
    weights_RK: torch.Tensor,
    weight: Codes,
    row_map: RowMap,
    *,
    keep: KeptAs,
    power_of_two: bool,
    dtype: torch.dtype,
    term: LowRankTerm | None = None,
) -> tuple[torch.Tensor | Codes | None, Codes]:
    """First projection with SwiGLU x weight: the pre-activation if it is to be kept, ``[2, M, N]`` or as
    codes ``[2M, N]`` with scales ``[N/128, 2M]``; the activation ``[M, N]`` with scales ``[N/128, M]``."""
    two_n, d = weight.codes.shape[1:]
    n, device = two_n // 2, x.codes.device
    act = empty_codes(row_map.capacity, n, device)
    out: torch.Tensor | Codes
    if keep == "codes":
        out = empty_codes(2 * row_map.capacity, n, device)
    elif keep == "values":
        out = torch.empty(2, row_map.capacity, n, device=device, dtype=dtype)
    else:  # not written: a tensor of the right type and width describes it
        out = torch.empty(64, n, device=device, dtype=dtype)
    _launch(
        (x, weight),
        (out, act),
        row_map,
        (BLOCK, n, d // BLOCK),
        (GATE_UP, BULK, _KEEP[keep]),
        weights_RK=weights_RK,
        power_of_two=power_of_two,
        term=term,
    )
    return None if keep == "nothing" else out, act


def weight_grad(
    left: Codes,
    right: Codes,
    row_map: RowMap,
    out_EAB: torch.Tensor,
    *,
    accumulate: bool,
    first_expert: int = 0,
) -> None:
    """Write or add ``left^T @ right`` of each expert's rows into ``out`` (contiguous, fp32 or bf16), which is
    that of the experts from ``first_expert`` on.

    Panels ``[M/128, A, 128]`` with scales ``[M/128, A]``, and ``[M/128, B, 128]`` with ``[E, B/128]``."""
    store = ADD if accumulate else BULK if out_EAB.dtype == torch.bfloat16 else OVERWRITE
    num_experts, a, b = out_EAB.shape
    if num_experts < row_map.num_experts:
        some = slice(first_expert, first_expert + num_experts)
        row_map = row_map._replace(offsets=row_map.offsets[first_expert:], counts_E=row_map.counts_E[some])
        right = right._replace(scales=right.scales[some])
    _launch((left, right), (out_EAB, None), row_map, (a, b, 1), (WEIGHT_GRAD, store, VALUES))
