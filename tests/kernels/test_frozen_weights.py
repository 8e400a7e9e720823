"""Weights that are kept as codes compute as their values do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdmoe.kernels import expert_mlp
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_mlp_grouped import GroupedProducts
from fsdmoe.kernels.expert_operands import NO_UPDATES, ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.frozen_weights import frozen_linear
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantize import dequantize, quantize
from fsdmoe.precision.quantized_weight import QuantizedWeight, WeightScales, decoded

SCALING = Scaling(E4M3, (4, 4))


def coded(weight: torch.Tensor) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight as codes with scales, and what they stand for."""
    found = [quantize(matrix, SCALING) for matrix in weight.view(-1, *weight.shape[-2:])]
    codes = torch.stack([q.codes_RC for q in found]).view(weight.shape).to(torch.float8_e4m3fn)
    scales = torch.stack([q.scales_BB for q in found])
    own = WeightScales(scales.view(*weight.shape[:-2], *scales.shape[1:]), (4, 4))
    values = torch.stack([dequantize(q, SCALING) for q in found]).view(weight.shape)
    return QuantizedWeight(codes, False, scales=own), values


@pytest.mark.parametrize("shape", [(8, 12), (3, 8, 8), (2, 6, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_codes_times_scales_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes, values = coded(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(decoded(codes, codes.scales, dtype), values.to(dtype))
    assert decoded(values, None, dtype) is values


def test_a_linear_layer_equals_one_with_the_values() -> None:
    random = torch.Generator().manual_seed(1)
    codes, values = coded(torch.randn(8, 12, generator=random))
    x, bias = torch.randn(5, 12, generator=random), torch.randn(8, generator=random)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = frozen_linear(ours, codes, bias), F.linear(theirs, values, bias)
    torch.testing.assert_close(y, wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    with pytest.raises(AssertionError, match="one that is trained"):
        frozen_linear(ours, codes.requires_grad_(), bias)


@pytest.mark.parametrize(
    "policy", [ExpertPolicy(), ExpertPolicy(recompute=True), ExpertPolicy(sequential=True)]
)
def test_experts_and_their_updates_equal_those_with_the_values(policy: ExpertPolicy) -> None:
    random = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    pairs = coded(draw(3, 16, 8)), coded(draw(3, 8, 8))
    factors = [draw(3, 4, 8), draw(3, 16, 4), draw(3, 4, 8), draw(3, 8, 4)]
    x, weights_RK, ids_RK = draw(6, 8), draw(6, 2).abs(), torch.tensor([[0, 1], [2, -1], [1, 2]] * 2)
    results = []
    for which in (0, 1):
        own = [tensor.clone().requires_grad_() for tensor in (x, *factors)]
        weights = ExpertWeights(pairs[0][which], pairs[1][which])
        how = policy._replace(coded=which == 0)
        y = experts_mlp(Rows(own[0], weights_RK, ids_RK), weights, how, updates=LowRankUpdates(*own[1:]))
        y.square().sum().backward()
        results.append((y.detach(), *(tensor.grad for tensor in own)))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("has_updates", [False, True])
def test_fused_products_get_the_values(has_updates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, wanted = coded(torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(4)))
    down, _ = coded(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(5)))
    seen: list[str] = []

    class Watched(GroupedProducts):
        def gate_up(self, given: Any, *args: Any, **options: Any) -> Any:
            seen.append("fused")
            torch.testing.assert_close(given.gate_up_E2ND, wanted)
            return super().gate_up(given, *args, **options)

    fused = SimpleNamespace(
        supports_shape=lambda x, down, activation: tuple(down) == (3, 8, 8),
        supports_updates=lambda updates: True,
        FusedProducts=SimpleNamespace(of=Watched),
    )
    monkeypatch.setattr(expert_mlp, "triton_for", lambda x: fused)
    updates = LowRankUpdates(torch.ones(3, 4, 8), torch.ones(3, 16, 4)) if has_updates else NO_UPDATES
    rows = Rows(torch.randn(2, 8, requires_grad=True), torch.ones(2, 1), torch.tensor([[0], [2]]))
    policy = ExpertPolicy(coded=True)
    experts_mlp(rows, ExpertWeights(gate_up, down), policy, updates=updates).sum().backward()
    assert seen == ["fused"]
