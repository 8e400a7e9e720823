"""Experts in fp8 build for Hopper, every launch of a layer; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.gluon import experts_mlp_fp8, experts_mlp_fp8_low_rank
from fsdmoe.kernels.triton.fp8_panels import gather_panels
from fsdmoe.kernels.triton.fp8_rows import expert_scales, quantize_rows
from fsdmoe.kernels.triton.fp8_weights import quantize_weight
from fsdmoe.kernels.triton.row_map import RowMap
from fsdmoe.precision.formats import FP8_BLOCKWISE
from tests.support.triton.compile_launches import compiling

SHARED_LIMIT = 232448  # of a block


class Sink:
    def __init__(self, weight: torch.Tensor, accumulate: bool) -> None:
        self.buffer, self.accumulate = torch.zeros_like(weight, dtype=torch.float32), accumulate

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, self.accumulate


def named(compiled: dict[str, Any], name: str) -> list[Any]:
    found = [kernel for key, kernel in compiled.items() if key.startswith(name + " ")]
    assert found, f"{name} was not launched"
    return found


def test_the_quantising_kernels_convert_two_numbers_an_instruction() -> None:
    def indices(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    row_map = RowMap(indices(64, 2), indices(256), indices(4), indices(2), indices(2), indices(2))
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    with compiling(90) as compiled:
        rows = quantize_rows(x, row_map, power_of_two=False)
        gather_panels(x, row_map, power_of_two=False)
        gather_panels(x, row_map, power_of_two=False, scales_EB=expert_scales(rows.scales, row_map))
        quantize_weight(torch.zeros(2, 256, 128).bfloat16(), power_of_two=False)
    for name in ("_quantize_rows_kernel", "_panels_kernel", "_quantize_weight_kernel"):
        for kernel in named(compiled, name):
            assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.asm["ptx"], name


@pytest.mark.full
@pytest.mark.parametrize("rank", [8, 128])
def test_the_layer_with_updates_builds(rank: int) -> None:
    x = torch.zeros(64, 256, dtype=torch.bfloat16, requires_grad=True)
    rows = Rows(x, torch.zeros(64, 2, requires_grad=True), torch.zeros(64, 2, dtype=torch.int64))
    weights = ExpertWeights(torch.zeros(2, 256, 256).bfloat16(), torch.zeros(2, 256, 128).bfloat16())
    shapes = ((rank, 256), (256, rank), (rank, 128), (256, rank))
    factors = [torch.zeros(2, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    with compiling(90) as compiled:
        updates = LowRankUpdates(*factors)
        experts_mlp_fp8_low_rank(rows, weights, FP8_BLOCKWISE, None, updates).sum().backward()
    gemms = named(compiled, "fp8_gemm_kernel")
    assert len(gemms) == 2  # gate_up, projections
    for kernel in gemms:
        # For each of two halves of a tile and both warpgroups, 64 ranks are four products of 16.
        products = kernel.asm["ptx"].count("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16")
        assert products == 16 * (1 if rank == 8 else 2)
    for key, kernel in compiled.items():
        assert kernel.metadata.shared <= SHARED_LIMIT, key
        assert kernel.asm["cubin"], key


@pytest.mark.full
@pytest.mark.parametrize("sinks", ["none", "overwrite", "add", "codes"])
def test_the_layer_builds(sinks: str) -> None:
    x = torch.zeros(64, 256, dtype=torch.bfloat16, requires_grad=True)
    weights, ids = torch.zeros(64, 2, requires_grad=True), torch.zeros(64, 2, dtype=torch.int64)
    gate_up = torch.nn.Parameter(torch.zeros(2, 256, 256, dtype=torch.bfloat16))
    down = torch.nn.Parameter(torch.zeros(2, 256, 128, dtype=torch.bfloat16))
    keeps_codes = sinks == "codes"
    if not keeps_codes and sinks != "none":
        for weight in (gate_up, down):
            weight.grad_sink = Sink(weight, sinks == "add")  # type: ignore[attr-defined]
    with compiling(90) as compiled:
        policy = ExpertPolicy(recipe=FP8_BLOCKWISE, keeps_codes=keeps_codes, has_own_rows=keeps_codes)
        experts_mlp_fp8(Rows(x, weights, ids), ExpertWeights(gate_up, down), policy).sum().backward()
    gemms = named(compiled, "fp8_gemm_kernel")
    assert len(gemms) == 3  # gate_up, projections, weight gradients
    for kernel in gemms:
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in kernel.asm["ptx"]
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    named(compiled, "fp8_swiglu_grad_kernel")
    for key, kernel in compiled.items():
        assert kernel.metadata.shared <= SHARED_LIMIT, key
        assert kernel.asm["cubin"], key
