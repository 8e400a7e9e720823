"""Experts in fp8 with low-rank updates on a Hopper GPU: products with a term equal their references, the
layer is as near to float32 as the emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fsdmoe.kernels.backend import has_fp8_kernels
from fsdmoe.kernels.expert_emulated import experts_mlp_quantized
from fsdmoe.kernels.expert_mlp import experts_mlp, experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.gluon import fp8_launch
from fsdmoe.kernels.triton.fp8_low_rank_rows import narrow_of_codes
from fsdmoe.kernels.triton.fp8_rows import quantize_rows
from fsdmoe.kernels.triton.fp8_weights import quantize_weight
from fsdmoe.kernels.triton.grouped_gemm import LowRankTerm
from fsdmoe.precision.formats import FP8_BLOCKWISE
from fsdmoe.precision.quantized_weight import QuantizedWeight, WeightScales
from tests.behaviour.kernels.test_fp8_gpu import Layer, error
from tests.support import fp8_reference

pytestmark = pytest.mark.skipif(not has_fp8_kernels(), reason="needs a Hopper GPU")
SMALL, LARGE = (2000, 384, 640, 5, 2), (4096, 2048, 768, 16, 8)
"""Rows, hidden size, expert width, experts, choices a row. SMALL: last tiles of 128 columns everywhere."""
POLICY = ExpertPolicy(recipe=FP8_BLOCKWISE, emulate=False)
NAMES = ("y", "x", "weights", "gate_up_a", "gate_up_b", "down_a", "down_b")


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


@pytest.mark.parametrize(("shape", "rank"), [(SMALL, 8), (LARGE, 8), (SMALL, 96)])
def test_products_with_a_term_equal_their_references(shape: tuple[int, ...], rank: int) -> None:
    layer = Layer(*shape)
    gate_up, down = (quantize_weight(each, power_of_two=False)[0] for each in (layer.gate_up, layer.down))
    x = quantize_rows(layer.x, layer.map, power_of_two=False)
    used, bf16 = slice(layer.used), {"dtype": torch.bfloat16}
    narrow = normal(layer.map.capacity, rank)
    narrow[layer.used :] = torch.nan  # what lies past the last row must not matter
    term = LowRankTerm(narrow, normal(layer.num_experts, 2 * layer.n, rank, scale=0.3))
    given = (x, layer.weights, gate_up, layer.map)
    (pre, act), (expected_pre, expected_act) = (
        package.gate_up(*given, keep="values", power_of_two=False, term=term, **bf16)  # type: ignore[attr-defined]
        for package in (fp8_launch, fp8_reference)
    )
    assert error(pre[:, used], expected_pre[:, used]) < 2e-3
    # A code next to the middle between two may be the other one; those of large values weigh most.
    assert error(fp8_reference.rows_of(act)[used], fp8_reference.rows_of(expected_act)[used]) < 2e-2
    term = LowRankTerm(narrow, normal(layer.num_experts, layer.d, rank, scale=0.3))
    y, expected = (
        package.project(act, down, layer.map, term=term, **bf16)  # type: ignore[attr-defined]
        for package in (fp8_launch, fp8_reference)
    )
    assert error(y[used], expected[used]) < 2e-3
    without = fp8_launch.project(act, down, layer.map, **bf16)
    assert error(without[used], expected[used]) > 0.02
    factor = normal(layer.num_experts, rank, layer.n)
    found = narrow_of_codes(act, factor, layer.map)
    for expert, segment in enumerate(fp8_reference.segments_of(layer.map)):
        right = fp8_reference.rows_of(act)[segment] @ factor[expert].float().t()
        assert error(found[segment], right) < 5e-3


def coded(weight: Tensor) -> QuantizedWeight:
    """As a frozen weight is kept."""
    plain, _ = quantize_weight(weight, power_of_two=False)
    return QuantizedWeight(plain.codes, False, scales=WeightScales(plain.scales, (128, 128)))


@pytest.mark.parametrize(
    ("shape", "rank", "is_coded"), [(SMALL, 16, True), (LARGE, 8, True), (LARGE, 8, False)]
)
def test_the_layer_is_as_near_to_float32_as_the_emulation(
    shape: tuple[int, ...], rank: int, is_coded: bool
) -> None:
    layer = Layer(*shape)
    n, d, num_experts = layer.n, layer.d, layer.num_experts
    shapes = ((rank, d), (2 * n, rank), (rank, n), (d, rank))
    drawn = [layer.x, layer.weights, *(normal(num_experts, *each, scale=each[1] ** -0.5) for each in shapes)]
    frozen = (layer.gate_up, layer.down)
    base = ExpertWeights(*map(coded, frozen)) if is_coded else ExpertWeights(*frozen)

    def run(function: Any, weights: ExpertWeights, dtype: torch.dtype | None = None) -> list[Tensor]:
        leaves = [each.to(dtype or each.dtype, copy=True).requires_grad_() for each in drawn]
        y = function(Rows(leaves[0], leaves[1], layer.ids), weights, LowRankUpdates(*leaves[2:]))
        return [y.detach(), *torch.autograd.grad(y, leaves, layer.dy.to(y.dtype))]

    exact = run(
        lambda rows, weights, updates: experts_mlp_reference(rows, weights, updates=updates),
        ExpertWeights(*(weight.float() for weight in frozen)),
        torch.float32,
    )
    emulated = run(
        lambda rows, weights, updates: experts_mlp_quantized(rows, weights, POLICY, FP8_BLOCKWISE, updates),
        base,
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(lambda rows, weights, updates: experts_mlp(rows, weights, POLICY, updates=updates), base)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, ours, theirs, right in zip(NAMES, found, emulated, exact, strict=True):
        off, allowed = error(ours, right), error(theirs, right)
        print(f"{name} {off:.2e}, emulated {allowed:.2e}")
        # The kernels multiply the codes of the activation by down_a, the emulation its values.
        assert off < 1.3 * allowed + 1e-3, name
        assert off > 5e-3, f"{name} was not computed in fp8"
