"""On a GPU, symmetric products that are computed once are as exact as torch's, and so is Newton–Schulz."""

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
