"""On a GPU, Muon's kernels are as exact as plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.backend import kernels, triton_for
from fsdmoe.kernels.newton_schulz import newton_schulz, symmetric_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PUBLISHED = (3.4445, -4.7750, 2.0315)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize(
    "shape", [(5, 768, 2048), (3, 2048, 768), (1, 2048, 4096), (40, 128, 2048), (2, 72, 200)]
)
def test_a_symmetric_product_is_as_exact_as_torchs(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    fused = triton_for(x)
    if fused is None or not fused.supports_symmetric(x):
        pytest.skip("no kernel for this GPU")
    is_tall = shape[1] > shape[2]
    exact = symmetric_product(x.float(), is_tall=is_tall)
    gram = fused.symmetric_product_triton(x, is_tall=is_tall)
    assert error(gram, exact) <= 1.02 * error(symmetric_product(x, is_tall=is_tall), exact)
    assert torch.equal(gram, gram.mT)
    gram = gram / shape[1]
    square = {"alpha": PUBLISHED[2], "added": gram, "beta": PUBLISHED[1], "diagonal": PUBLISHED[0]}
    exact = symmetric_product(gram.double(), **(square | {"added": gram.double()}))
    found = fused.symmetric_product_triton(gram, **square)
    assert error(found, exact) <= 1.02 * error(symmetric_product(gram, **square), exact)


@pytest.mark.parametrize("shape", [(5, 768, 2048), (3, 2048, 768), (2, 1024, 1024)])
def test_newton_schulz_is_as_exact_as_with_plain_products(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    exact = newton_schulz(x.float(), PUBLISHED, 5)
    errors = {}
    for choice in ("auto", "torch"):
        with kernels(choice):
            errors[choice] = error(newton_schulz(x, PUBLISHED, 5), exact)
    assert errors["auto"] <= 1.2 * errors["torch"]


@pytest.mark.parametrize("count", [4096 * 300, 64 * 777 + 5])
def test_passes_over_elements_equal_their_definitions(count: int) -> None:
    generator = torch.Generator("cuda").manual_seed(4)
    grad, momentum, main = torch.randn(3, count, device="cuda", generator=generator)
    fused = triton_for(grad)
    if fused is None:
        pytest.skip("no kernels for this GPU")
    out, cast = torch.empty(2, count, device="cuda", dtype=torch.bfloat16)
    followed = momentum.lerp(grad, 0.05)
    fused.look_ahead_triton(momentum, grad, out, 0.95)
    torch.testing.assert_close(momentum, followed)
    torch.testing.assert_close(out, grad.lerp(followed, 0.95).bfloat16(), rtol=1e-2, atol=1e-6)
    expected = 0.9 * main - 0.3 * out.float()
    fused.apply_update_triton(main, out, cast, 0.9, 0.3)
    torch.testing.assert_close(main, expected)
    assert torch.equal(cast, main.bfloat16())
