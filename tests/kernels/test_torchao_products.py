"""Products of torchao under fsdmoe's layers, next to our own emulation of the same recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.quantized_linear import LinearPolicy, linear_by_recipe
from fsdmoe.kernels.torchao_products import torchao_parts, torchao_products
from fsdmoe.precision.recipes import RecipeName, build_recipe

EMULATED: list[RecipeName] = ["fp8_tensorwise", "fp8_rowwise", "mxfp8"]


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def with_grads(compute: Any, *tensors: Tensor) -> list[Tensor]:
    """The result, and the gradients of all tensors."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y = compute(*leaves)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("name", EMULATED)
def test_a_linear_layer_is_as_far_from_fp64_as_ours(name: RecipeName) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 27, 128, generator=random, dtype=torch.float32).bfloat16()  # 81 rows are filled up
    weight = (0.05 * torch.randn(96, 128, generator=random)).bfloat16()
    recipe = build_recipe(name)
    assert recipe is not None
    products = torchao_products(name, None)
    wanted = with_grads(nn.functional.linear, x.double(), weight.double())
    by = {
        engine: with_grads(lambda x, w, policy=policy: linear_by_recipe(x, w, policy), x, weight)
        for engine, policy in {
            "own": LinearPolicy(recipe),
            "torchao": LinearPolicy(recipe, products=products),
        }.items()
    }
    for own, theirs, exact in zip(by["own"], by["torchao"], wanted, strict=True):
        assert theirs.shape == exact.shape
        assert 0.01 < relative(theirs, exact) < 1.15 * relative(own, exact) + 0.005


def expert_case() -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=random).bfloat16()
    gate_up = (0.1 * torch.randn(3, 64, 64, generator=random)).bfloat16()
    down = (0.1 * torch.randn(3, 64, 32, generator=random)).bfloat16()
    ids = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(40)])
    ids[ids == 1] = 0  # one expert without rows, choices of the same expert
    ids[3, 1] = ids[5, 0] = ids[5, 1] = -1
    return [x, torch.rand(40, 2, generator=random), gate_up, down], ids


@pytest.mark.parametrize("weight_after", [False, True])
def test_experts_are_as_far_from_fp64_as_ours(weight_after: bool) -> None:
    tensors, ids = expert_case()

    def compute(policy: ExpertPolicy) -> Any:
        return lambda x, weights, gate_up, down: experts_mlp(
            Rows(x, weights, ids), ExpertWeights(gate_up, down), policy
        )

    recipe, products = build_recipe("mxfp8"), torchao_products("mxfp8", None)
    plain = ExpertPolicy(weight_after=weight_after)
    wanted = with_grads(compute(plain), *(tensor.double() for tensor in tensors))
    own = with_grads(compute(plain._replace(recipe=recipe)), *tensors)
    theirs = with_grads(compute(plain._replace(recipe=recipe, products=products)), *tensors)
    for mine, found, exact in zip(own, theirs, wanted, strict=True):
        assert torch.isfinite(found).all()
        assert 0.01 < relative(found, exact) < 1.15 * relative(mine, exact) + 0.01


def test_experts_with_biases_or_updates_are_refused_by_name() -> None:
    (x, weights, gate_up, down), ids = expert_case()
    policy = ExpertPolicy(recipe=build_recipe("mxfp8"), products=torchao_products("mxfp8", None))
    biased = ExpertWeights(gate_up, down, gate_up_bias=torch.zeros(3, 64))
    with pytest.raises(ConfigError, match="expected experts without biases for torchao"):
        experts_mlp(Rows(x, weights, ids), biased, policy)
    updates = LowRankUpdates(torch.zeros(3, 4, 64), torch.zeros(3, 64, 4))
    with pytest.raises(ConfigError, match="expected experts without low-rank updates for torchao"):
        experts_mlp(Rows(x, weights, ids), ExpertWeights(gate_up, down), policy, None, updates)


def test_what_torchao_covers_depends_on_the_architecture() -> None:
    assert torchao_parts("mxfp8", "hopper") == frozenset()
    assert "experts" in torchao_parts("mxfp8", "blackwell")
    assert torchao_parts("fp8_rowwise", "hopper") == torchao_parts("fp8_rowwise", "blackwell")
    assert "experts" not in torchao_parts("fp8_blockwise", "blackwell")
    assert torchao_parts("nvfp4", "blackwell") == torchao_parts("fp8_rowwise", "other") == frozenset()
