"""Muon's kernels, in Triton's interpreter, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.newton_schulz import newton_schulz, symmetric_product
from fsdmoe.kernels.triton import (
    apply_update_triton,
    look_ahead_triton,
    supports_symmetric,
    symmetric_product_triton,
)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("short", "long"), [(40, 64), (200, 80), (304, 72), (392, 16)])
@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_symmetric_product_equals_its_definition(short: int, long: int, is_tall: bool, adds: bool) -> None:
    generator = torch.Generator().manual_seed(short)
    x = torch.randn((2, long, short) if is_tall else (2, short, long), generator=generator)
    added = torch.randn(2, short, short, generator=generator)
    settings: dict[str, Any] = {"is_tall": is_tall, "alpha": 0.5}
    if adds:
        settings |= {"added": added + added.mT, "beta": -2.0, "diagonal": 3.0}
        settings["factors_N3"] = torch.rand(2, 3, generator=generator) if is_tall else None
    found = symmetric_product_triton(x, **settings)
    torch.testing.assert_close(found, symmetric_product(x, **settings), rtol=1e-5, atol=1e-4)
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("shape", [(2, 136, 40), (2, 40, 136)])
def test_newton_schulz_by_the_kernel_equals_plain_products(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdmoe.kernels.triton.supports_symmetric", lambda x: True)  # float32 too, here
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found = []
    for choice in ("triton", "torch"):
        with kernels(choice):  # type: ignore[arg-type]
            found.append(newton_schulz(x, (3.4445, -4.7750, 2.0315), 5))
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 12, 16), (1, 16, 12), (0, 16, 16)])
def test_matrices_that_bulk_copies_cannot_read_are_left_to_torch(shape: tuple[int, ...]) -> None:
    assert not supports_symmetric(torch.zeros(shape, dtype=torch.bfloat16))
    assert not supports_symmetric(torch.zeros(1, 16, 16))
    assert not supports_symmetric(torch.zeros(1, 16, 24, dtype=torch.bfloat16).mT)


@pytest.mark.parametrize("count", [1, 4096, 9001])
def test_passes_over_elements_equal_their_definitions(count: int) -> None:
    grad, momentum, main = torch.randn(3, count, generator=torch.Generator().manual_seed(5))
    out, cast = torch.empty(2, count)
    followed = 0.95 * momentum + 0.05 * grad
    look_ahead_triton(momentum, grad, out, 0.95)
    torch.testing.assert_close(momentum, followed)
    torch.testing.assert_close(out, 0.05 * grad + 0.95 * followed)
    expected = 0.9 * main - 0.3 * out
    apply_update_triton(main, out, cast, 0.9, 0.3)
    torch.testing.assert_close(main, expected)
    assert torch.equal(cast, main)
    apply_update_triton(main, out, None, 0.9, 0.3)
    torch.testing.assert_close(main, 0.9 * expected - 0.3 * out)
