"""Experts in fp8 that keep codes for backward (``memory.keep``), in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.expert_mlp import experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.gluon import experts_mlp_fp8
from fsdmoe.kernels.triton.fp8_panels import gather_panels
from fsdmoe.kernels.triton.fp8_rows import Codes, decode_rows, empty_codes, quantize_rows
from fsdmoe.precision.quantize import rounded
from tests.support.triton.long_fp8_layer_cases import (  # noqa: F401 (fixtures)
    RECIPES,
    D,
    N,
    _fp8_as_on_a_gpu,
    _stand_ins,
    draw,
    row_map,
    run,
)

pytestmark = pytest.mark.usefixtures("poisoned")
CODES = {"keeps_codes": True, "has_own_rows": True}
MOST = 1.3
"""Times the error of gradients without codes, both against fp64."""


def errors(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    pairs = zip(ours, exact, strict=True)
    return [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]


def in_fp64(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    x, weights, ids, gate_up, down = inputs
    leaves = [each.double().requires_grad_() for each in (x, weights, gate_up, down)]
    y = experts_mlp_reference(Rows(leaves[0], leaves[1], ids), ExpertWeights(*leaves[2:]))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


@pytest.mark.parametrize("kind", RECIPES)
def test_gradients_of_codes_are_hardly_worse_than_those_of_values(kind: str) -> None:
    inputs = draw(num_rows=400)  # of 120 the routing weights' gradients alone vary by 5 % and more
    exact = in_fp64(inputs)
    values = errors(run(inputs, RECIPES[kind], fused=True), exact)
    codes = errors(run(inputs, RECIPES[kind], fused=True, **CODES), exact)
    assert codes[0] == values[0], "forward is the same"
    # Not the same: codes were used, in each of the gradients but that of the routing weights alone.
    assert all(one != other for one, other in zip(codes[1:], values[1:], strict=True))
    assert all(one <= MOST * other for one, other in zip(codes, values, strict=True)), (codes, values)


@pytest.mark.parametrize("kind", RECIPES)
def test_kept_rows_are_the_codes_of_forward(kind: str) -> None:
    x, _, ids, *_ = draw()
    found, _ = row_map(ids)
    options = {"power_of_two": kind == "power_of_two"}
    kept = empty_codes(*x.shape, x.device)
    made = quantize_rows(x, found, kept=kept, **options)
    assert torch.equal(made.codes.float(), quantize_rows(x, found, **options).codes.float())
    decoded = decode_rows(*kept, torch.float32)
    assert torch.equal(decoded, rounded(x, RECIPES[kind].forward.first))
    # Of what they stand for, panels are the same.
    assert torch.equal(
        gather_panels(Codes(*kept), found, **options).codes.float()[: found.offsets[1] // 128],
        gather_panels(decoded, found, **options).codes.float()[: found.offsets[1] // 128],
    )


def test_a_layer_keeps_codes_instead_of_its_rows_and_pre_activations() -> None:
    x, weights, ids, gate_up, down = draw()
    leaves = [each.clone().requires_grad_() for each in (x, weights, gate_up, down)]

    def kept(**options: bool) -> dict[tuple[int, ...], torch.dtype]:
        found: dict[tuple[int, ...], torch.dtype] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: found.setdefault(tuple(t.shape), t.dtype) and t, lambda t: t
        ):
            policy = ExpertPolicy(recipe=RECIPES["float32"], **options)
            experts_mlp_fp8(Rows(leaves[0], leaves[1], ids), ExpertWeights(*leaves[2:]), policy)
        return found

    values, codes = kept(), kept(**CODES)
    capacity = next(shape[1] for shape in values if shape[0] == 2 and shape[-1] == N)
    assert values[2, capacity, N] == values[len(x), D] == torch.float32
    assert codes[2 * capacity, N] == codes[len(x), D] == torch.float8_e4m3fn
    assert (2, capacity, N) not in codes
