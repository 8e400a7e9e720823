"""Experts in fp8 in Triton's interpreter: the quantising kernels, and everything around the matrix products.

Gluon kernels cannot be interpreted: their plain-torch references take their place, which
``test_fp8_gpu.py`` holds them to. In fp32, where neither the references nor the emulation rounds to bf16, so
that both layers agree but for the few codes that another order of sums turns over.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from fsdmoe.kernels.expert_emulated import experts_mlp_quantized
from fsdmoe.kernels.expert_mlp import experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.gluon import (
    experts_mlp_fp8,
    experts_mlp_fp8_low_rank,
    fp8_launch,
    fp8_swiglu_grad,
)
from fsdmoe.kernels.triton.fp8_rows import quantize_rows
from fsdmoe.kernels.triton.fp8_weights import quantize_weight
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.precision.formats import FP8_BLOCKWISE, Recipe, Scaling
from fsdmoe.precision.quantize import quantize
from fsdmoe.precision.quantized_weight import QuantizedWeight, WeightScales
from tests.support import fp8_reference

pytestmark = pytest.mark.usefixtures("poisoned")
RECIPES = {"float32": FP8_BLOCKWISE, "power_of_two": FP8_BLOCKWISE.with_power_of_two_scales()}
D, N, E, K = 256, 128, 3, 2


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("project", "gate_up", "weight_grad"):
        monkeypatch.setattr(fp8_launch, name, getattr(fp8_reference, name))
    monkeypatch.setattr(fp8_swiglu_grad, "swiglu_grad", fp8_reference.swiglu_grad)


@pytest.fixture(autouse=True)
def _fp8_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry of a number that is rounded up to the next power of two (31.5 becomes
    16), and does not saturate."""
    original = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv:
            return original(values, source, target, rounding)
        wide = torch.from_numpy(values).float().clamp(-448, 448)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def draw(num_rows: int = 90, top_k: int = K, num_experts: int = E) -> tuple[torch.Tensor, ...]:
    """The last expert gets no rows, the first most of them; some ids are -1, a row of x is zero, and
    magnitudes differ by row and by column."""
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(-1, num_experts - 1, (num_rows, top_k), generator=generator)
    ids[: num_rows * 3 // 4] = 0
    spread = torch.randn(num_rows, 1, generator=generator).exp()
    x = torch.randn(num_rows, D, generator=generator) * spread * torch.linspace(0.1, 2, D)
    x[3:4] = 0
    gate_up = torch.randn(num_experts, 2 * N, D, generator=generator) * D**-0.5
    down = torch.randn(num_experts, D, N, generator=generator) * N**-0.5
    return x, torch.rand(num_rows, top_k, generator=generator), ids, gate_up, down


def row_map(ids: torch.Tensor) -> tuple[RowMap, list[torch.Tensor]]:
    """The map, and the rows of each expert in its order."""
    return build_row_map(ids, E, align=128), [(ids == e).nonzero()[:, 0] for e in range(E)]


def check(codes: torch.Tensor, scales: torch.Tensor, values_RC: torch.Tensor, scaling: Scaling) -> None:
    """Equal to the definition, to the bit."""
    expected = quantize(values_RC, scaling)
    seen = expected.scales_BB > 0
    assert torch.equal(scales[seen], expected.scales_BB[seen])
    assert (scales[~seen] <= 2.0**-100).all()
    assert torch.equal(codes.float(), expected.codes_RC)


def test_rows_are_quantised_as_defined() -> None:
    check_rows("power_of_two")


def check_rows(kind: str) -> None:
    x, _, ids, *_ = draw()
    found, rows = row_map(ids)
    codes, scales = quantize_rows(x, found, power_of_two=kind == "power_of_two")
    for expert, row in enumerate(rows):
        first, last = found.offsets[expert : expert + 2].tolist()
        here = slice(first, first + len(row))
        check(codes[here], scales[:, here].t(), x[row], RECIPES[kind].forward.first)
        assert not codes[here.stop : last].float().any()
        assert not scales[:, here.stop : last].any()


@pytest.mark.parametrize("kind", RECIPES)
def test_weights_are_quantised_as_defined_both_ways_round(kind: str) -> None:
    *_, gate_up, down = draw()
    down[0, :128] = 0
    scaling = RECIPES[kind].forward.second
    for weight in (gate_up, down):
        plain, transposed = quantize_weight(weight, power_of_two=kind == "power_of_two")
        for expert in range(E):
            check(plain.codes[expert], plain.scales[expert], weight[expert], scaling)
        assert torch.equal(plain.codes.float().mT, transposed.codes.float())
        assert torch.equal(plain.scales.mT, transposed.scales)


def run(
    inputs: tuple[torch.Tensor, ...],
    recipe: Recipe,
    *,
    fused: bool,
    max_rows: int | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """y and the gradients of x, weights, gate_up and down."""
    x, weights, ids, gate_up, down = inputs
    leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
    rows, matrices = Rows(leaves[0], leaves[1], ids), ExpertWeights(*leaves[2:])
    policy = ExpertPolicy(recipe=recipe, **options)
    if fused:
        y = experts_mlp_fp8(rows, matrices, policy, max_rows)
    else:
        y = experts_mlp_quantized(rows, matrices, policy, recipe)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_close(ours: list[torch.Tensor], exact: list[torch.Tensor], limit: float = 3e-3) -> None:
    for name, found, expected in zip(("y", "dx", "dweights", "dgate_up", "ddown"), ours, exact, strict=True):
        error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
        assert error < limit, f"{name} is off by {error:.1e}"


def test_the_layer_equals_the_emulation() -> None:
    inputs = draw()
    ours, exact = (run(inputs, FP8_BLOCKWISE, fused=fused) for fused in (True, False))
    assert_close(ours, exact)
    assert not ours[2][inputs[2] < 0].any()


def coded(weight: torch.Tensor) -> QuantizedWeight:
    """As a frozen weight is kept."""
    plain, _ = quantize_weight(weight, power_of_two=False)
    return QuantizedWeight(plain.codes, False, scales=WeightScales(plain.scales, (128, 128)))


@pytest.mark.parametrize("adapted", ["both", "gate_up", "down"])
def test_updates_of_frozen_codes_are_as_near_to_float64_as_the_emulation(adapted: str) -> None:
    x, weights, ids, *frozen = draw()
    generator = torch.Generator().manual_seed(5)
    shapes = ((8, D), (2 * N, 8), (8, N), (D, 8))
    factors = [torch.randn(E, *shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]
    wanted = {"both": (0, 1, 2, 3), "gate_up": (0, 1), "down": (2, 3)}[adapted]
    base = ExpertWeights(*map(coded, frozen))
    policy = ExpertPolicy(recipe=FP8_BLOCKWISE)

    def exact(rows: Rows, updates: LowRankUpdates) -> torch.Tensor:
        return experts_mlp_reference(rows, ExpertWeights(*(w.double() for w in frozen)), updates=updates)

    def emulated(rows: Rows, updates: LowRankUpdates) -> torch.Tensor:
        return experts_mlp_quantized(rows, base, policy, FP8_BLOCKWISE, updates)

    def ours(rows: Rows, updates: LowRankUpdates) -> torch.Tensor:
        return experts_mlp_fp8_low_rank(rows, base, FP8_BLOCKWISE, None, updates)

    def gradients(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        chosen = [factors[i] if i in wanted else None for i in range(4)]
        leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (x, weights, *chosen)]
        y = function(Rows(leaves[0], leaves[1], ids), LowRankUpdates(*leaves[2:]))
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        given = [leaf for leaf in leaves if leaf is not None]
        return [y.detach(), *torch.autograd.grad(y, given, dy.to(y.dtype))]

    right = gradients(exact, torch.float64)
    runs = (gradients(emulated, torch.float32), gradients(ours, torch.float32))
    for number, (reference, *found) in enumerate(zip(right, *runs, strict=True)):
        allowed, error = ((each - reference).norm() / reference.norm() for each in found)
        assert 1e-3 < allowed < 0.2
        assert error < 1.2 * allowed, f"number {number} is off by {error:.1e}, the emulation by {allowed:.1e}"
