"""On a GPU, heads that are normed and turned in one pass are those of the two kernels, forward and back."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.backend import triton_for
from tests.support.kernel_references import rope_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("num_heads", [32, 4, 3])
def test_one_pass_is_as_exact_as_two(num_heads: int) -> None:
    fused = triton_for(torch.zeros(1, device="cuda", dtype=torch.bfloat16))
    if fused is None:
        pytest.skip("no kernels for this GPU")
    generator = torch.Generator("cuda").manual_seed(num_heads)
    x, dout = torch.randn(2, 2, 1000, num_heads, 128, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(128, device="cuda", generator=generator).bfloat16()
    angles = torch.randn(2, 1000, 64, device="cuda", generator=generator)
    tables = angles.cos(), angles.sin()
    found = []
    for wide in (False, False, True):
        leaves = [t.double() if wide else t.clone() for t in (x, weight)]
        own_x, own_weight = (leaf.requires_grad_() for leaf in leaves)
        if wide:
            normed = torch.nn.functional.rms_norm(own_x, (128,), own_weight, 1e-6)
            out = rope_reference(normed, *(table.double() for table in tables))
        elif found:
            out = fused.norm_rope_triton(own_x, own_weight, 1e-6, *tables)
        else:
            out = fused.rope_triton(fused.rms_norm_triton(own_x, own_weight, 1e-6), *tables)
        found.append((out, *torch.autograd.grad(out, (own_x, own_weight), dout.to(out.dtype))))
    for two, one, exact in zip(*found, strict=True):
        assert error(one, exact) <= 1.02 * error(two, exact)
        assert error(one, two) < 2e-3
