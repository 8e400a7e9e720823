"""The kernels of emulated recipes build for Hopper and Blackwell; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.triton import experts_mlp_rounded
from fsdmoe.precision.recipes import build_recipe
from tests.behaviour.kernels.test_triton_compile import check
from tests.support.triton.compile_launches import compiling


@pytest.mark.full
@pytest.mark.parametrize(("name", "architecture"), [("nvfp4", 90), ("fp8_rowwise", 100)])
def test_emulated_experts_build(name: str, architecture: int) -> None:
    recipe = build_recipe(name)  # type: ignore[arg-type]
    assert recipe is not None
    x = torch.zeros(600, 128, dtype=torch.bfloat16, requires_grad=True)
    weights, ids = torch.zeros(600, 2, requires_grad=True), torch.zeros(600, 2, dtype=torch.int64)
    gate_up = torch.zeros(2, 128, 128, dtype=torch.bfloat16, requires_grad=True)
    down = torch.zeros(2, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    with compiling(architecture) as compiled:
        experts_mlp_rounded(x, weights, ids, gate_up, down, recipe).sum().backward()
    check(compiled, "_amax_kernel", "_round_kernel", "_product_kernel", "_activate_kernel")
