"""Transformer Engine's products on a Hopper GPU, next to our own: errors against fp64 by the same recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
pytest.importorskip("transformer_engine")

from fsdmoe.kernels.backend import has_fp8_products
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.quantized_linear import LinearPolicy, linear_by_recipe
from fsdmoe.kernels.te_products import te_products
from fsdmoe.precision import PrecisionConfig
from fsdmoe.precision.recipes import RecipeName, build_recipe
from tests.support.recipe_steps import relative, three_steps

pytestmark = pytest.mark.skipif(not has_fp8_products(), reason="needs a Hopper GPU with CUDA 12.9 or later")
RECIPES: list[RecipeName] = ["fp8_tensorwise", "fp8_blockwise"]
NAMES = ("y", "dx", "dweights", "dgate_up", "ddown")


def with_grads(compute: Any, *tensors: Tensor) -> list[Tensor]:
    """The result, and the gradients of all tensors."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y = compute(*leaves)
    generator = torch.Generator("cuda").manual_seed(7)
    y.backward(torch.randn(y.shape, device="cuda", generator=generator).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, device="cuda", generator=generator)).bfloat16()


class Sink:
    """A float32 buffer that is overwritten first and added to afterwards."""

    def __init__(self, weight: Tensor) -> None:
        self.buffer = torch.full_like(weight, torch.nan, dtype=torch.float32)
        self.is_written = False

    def claim(self, staged: object = None) -> tuple[Tensor, bool]:
        accumulate, self.is_written = self.is_written, True
        return self.buffer, accumulate


@pytest.mark.parametrize("num_rows", [1024, 1000])
@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_layer_is_as_far_from_fp64_as_ours(name: RecipeName, num_rows: int) -> None:
    x, weight = random(num_rows, 512), random(768, 512, scale=0.05, seed=1)
    recipe = build_recipe(name)
    assert recipe is not None
    exact = with_grads(nn.functional.linear, x.double(), weight.double())
    policies = LinearPolicy(recipe, False), LinearPolicy(recipe, products=te_products(name, "hopper"))
    own, theirs = (
        with_grads(lambda x, w, policy=policy: linear_by_recipe(x, w, policy), x, weight)
        for policy in policies
    )
    for what, mine, found, wanted in zip(("y", "dx", "dweight"), own, theirs, exact, strict=True):
        errors = relative(mine, wanted), relative(found, wanted)
        print(f"{name}, {what}: own {errors[0]:.4f}, te {errors[1]:.4f}")
        assert 0.01 < errors[1] < 1.3 * errors[0] + 0.005


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_added_up_in_the_buffer_that_is_reduced(name: RecipeName) -> None:
    linear = te_products(name, "hopper").linear
    weight = random(256, 512, scale=0.05).requires_grad_()
    weight.grad_sink = sink = Sink(weight)  # type: ignore[attr-defined]
    alone = weight.detach().clone().requires_grad_()
    for seed in (1, 2):
        for each in (weight, alone):
            linear(random(384, 512, seed=seed), each).backward(random(384, 256, seed=seed + 10))
    assert weight.grad is None
    assert alone.grad is not None
    assert relative(sink.buffer, alone.grad) < 0.005  # which is rounded to bfloat16 twice


@pytest.mark.parametrize("name", RECIPES)
def test_experts_are_as_far_from_fp64_as_our_emulation(name: RecipeName) -> None:
    tensors = [
        random(600, 256), torch.rand(600, 4, device="cuda"), random(8, 256, 256, scale=0.06, seed=2),
        random(8, 256, 128, scale=0.09, seed=3),
    ]  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(4)
    ids = torch.rand(600, 8, device="cuda", generator=generator).topk(4).indices
    ids[ids == 5] = -1  # one expert without rows

    def compute(policy: ExpertPolicy) -> Any:
        return lambda x, weights, gate_up, down: experts_mlp(
            Rows(x, weights, ids), ExpertWeights(gate_up, down), policy
        )

    plain, recipe = ExpertPolicy(), build_recipe(name)
    exact = with_grads(compute(plain), *(tensor.double() for tensor in tensors))
    own = with_grads(compute(plain._replace(recipe=recipe)), *tensors)
    products = te_products(name, "hopper")
    theirs = with_grads(compute(plain._replace(recipe=recipe, products=products)), *tensors)
    assert not theirs[3][5].any()
    for what, mine, found, wanted in zip(NAMES, own, theirs, exact, strict=True):
        errors = relative(mine, wanted), relative(found, wanted)
        print(f"{name}, experts, {what}: own {errors[0]:.4f}, te {errors[1]:.4f}")
        assert torch.isfinite(found).all()
        assert 0.01 < errors[1] < 1.3 * errors[0] + 0.01


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_no_expert_and_no_rows_compute_nothing(name: RecipeName) -> None:
    products = te_products(name, "hopper")
    weights = ExpertWeights(random(8, 256, 256).requires_grad_(), random(8, 256, 128))
    policy = ExpertPolicy(recipe=build_recipe(name), products=products)
    ids = torch.full((16, 2), -1, device="cuda")
    rows = Rows(random(16, 256), torch.rand(16, 2, device="cuda"), ids)
    experts_mlp(rows, weights, policy).sum().backward()
    assert weights.gate_up_E2ND.grad is not None
    assert not weights.gate_up_E2ND.grad.any()
    weight = random(128, 256).requires_grad_()
    y = products.linear(random(0, 256), weight)
    y.sum().backward()
    assert y.shape == (0, 128)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("name", RECIPES)
def test_three_steps_of_a_model_are_as_far_from_bfloat16_as_ours(name: RecipeName) -> None:
    plain = three_steps(PrecisionConfig())
    own = three_steps(PrecisionConfig(recipe=name, emulate=True, backend="own"))
    theirs = three_steps(PrecisionConfig(recipe=name, backend="te"))
    print(f"{name}: losses in bf16 {plain.losses}, own {own.losses}, te {theirs.losses}")
    assert theirs.losses == pytest.approx(plain.losses, rel=0.01)
    for key, wanted in plain.gradients.items():
        if wanted.dim() > 1:
            errors = relative(own.gradients[key], wanted), relative(theirs.gradients[key], wanted)
            print(f"{name}, {key}: own {errors[0]:.4f}, te {errors[1]:.4f}")
            assert errors[1] < 1.3 * errors[0] + 0.02
