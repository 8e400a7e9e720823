"""torchao's products on a Hopper GPU, next to our own: errors against fp64 by the same recipe."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
pytest.importorskip("torchao")

from triton.runtime.autotuner import Autotuner

from fsdmoe.kernels.backend import has_fp8_products
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.quantized_linear import LinearPolicy, linear_by_recipe
from fsdmoe.kernels.torchao_products import torchao_products
from fsdmoe.precision.recipes import RecipeName, build_recipe

pytestmark = pytest.mark.skipif(not has_fp8_products(), reason="needs a Hopper GPU with CUDA 12.9 or later")


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


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


@pytest.mark.parametrize("num_rows", [1024, 1000])
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"])
def test_a_linear_layer_is_as_far_from_fp64_as_ours(name: RecipeName, num_rows: int) -> None:
    x, weight = random(num_rows, 512), random(768, 512, scale=0.05, seed=1)
    recipe = build_recipe(name)
    assert recipe is not None
    exact = with_grads(nn.functional.linear, x.double(), weight.double())
    policies = LinearPolicy(recipe, False), LinearPolicy(recipe, products=torchao_products(name, "hopper"))
    own, theirs = (
        with_grads(lambda x, w, policy=policy: linear_by_recipe(x, w, policy), x, weight)
        for policy in policies
    )
    for mine, found, wanted in zip(own, theirs, exact, strict=True):
        errors = relative(mine, wanted), relative(found, wanted)
        print(f"{name}: own {errors[0]:.4f}, torchao {errors[1]:.4f}")
        assert 0.01 < errors[1] < 1.3 * errors[0] + 0.005


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's kernels with the first of their tile sizes: tuning compiles hundreds, for minutes."""
    folder = "torchao.prototype.moe_training.kernels"
    for name in ("jagged_float8_scales", "float8_rowwise"):
        for kernel in vars(importlib.import_module(f"{folder}.{name}")).values():
            if isinstance(kernel, Autotuner):
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])


@pytest.mark.usefixtures("untuned")
def test_experts_are_as_far_from_fp64_as_our_emulation() -> None:
    tensors = [
        random(600, 256), torch.rand(600, 4, device="cuda"), random(8, 256, 256, scale=0.06, seed=2),
        random(8, 256, 128, scale=0.09, seed=3),
    ]  # fmt: skip
    ids = torch.stack([torch.randperm(8, device="cuda")[:4] for _ in range(600)])
    ids[ids == 5] = -1  # one expert without rows

    def compute(policy: ExpertPolicy) -> Any:
        return lambda x, weights, gate_up, down: experts_mlp(
            Rows(x, weights, ids), ExpertWeights(gate_up, down), policy
        )

    plain, recipe = ExpertPolicy(), build_recipe("fp8_rowwise")
    products = torchao_products("fp8_rowwise", "hopper")
    exact = with_grads(compute(plain), *(tensor.double() for tensor in tensors))
    own = with_grads(compute(plain._replace(recipe=recipe)), *tensors)
    theirs = with_grads(compute(plain._replace(recipe=recipe, products=products)), *tensors)
    for mine, found, wanted in zip(own, theirs, exact, strict=True):
        errors = relative(mine, wanted), relative(found, wanted)
        print(f"experts: own {errors[0]:.4f}, torchao {errors[1]:.4f}")
        assert torch.isfinite(found).all()
        assert 0.01 < errors[1] < 1.3 * errors[0] + 0.01
