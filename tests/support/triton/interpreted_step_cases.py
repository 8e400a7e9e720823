"""Cases of the kernels beside the layer (loss, optimizer, positions), in Triton's interpreter, in fp32."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.rms_norm import rms_norm_reference
from fsdmoe.kernels.triton import (
    adamw_,
    cross_entropy_,
    norm_rope_triton,
    rope_triton,
    scale,
    scale_,
    supports_norm_rope,
)
from tests.support.kernel_references import adamw_reference_, cross_entropy_reference_, rope_reference

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("vocabulary", [5, 100, 4099])
def test_cross_entropy_and_its_gradient_equal_their_definition(
    vocabulary: int, generator: torch.Generator
) -> None:
    logits = torch.randn(6, vocabulary, generator=generator) * 5
    labels = torch.randint(0, vocabulary, (6,), generator=generator)
    mask = torch.tensor([True, True, False, True, True, False])
    exact, divisor = logits.double(), torch.tensor(7.0)
    expected = cross_entropy_reference_(exact, labels, mask, divisor)
    losses = cross_entropy_(logits, labels, mask, divisor)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-6)
    assert not losses[~mask].any()
    assert not logits[~mask].any()


def test_cross_entropy_without_gradient_leaves_the_logits_alone(generator: torch.Generator) -> None:
    logits = torch.randn(3, 40, generator=generator)
    before = logits.clone()
    labels = torch.tensor([0, 39, 7])
    mask, divisor = torch.ones(3, dtype=torch.bool), torch.tensor(7.0)
    losses = cross_entropy_(logits, labels, mask, divisor, with_grad=False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, labels, reduction="none"))


def test_cross_entropy_survives_logits_of_minus_infinity(generator: torch.Generator) -> None:
    logits = torch.randn(2, 4100, generator=generator)
    logits[:, 1:4099] = float("-inf")
    labels, mask = torch.tensor([0, 4099]), torch.ones(2, dtype=torch.bool)
    expected = cross_entropy_reference_(logits.double(), labels, mask, torch.ones(()))
    losses = cross_entropy_(logits, labels, mask, torch.ones(()))
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    assert logits.isfinite().all()


@pytest.mark.parametrize("num_elements", [1, 4096, 3 * 4096 + 5])
@pytest.mark.parametrize("factor", [0.3, 1.0])
def test_a_tensor_is_scaled_in_place(
    num_elements: int, factor: float, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "_PROGRAMS", 2)  # so that they walk on
    tensor = torch.randn(num_elements, generator=generator)
    expected = tensor * factor
    assert scale_(tensor, torch.tensor(factor)) is tensor
    torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)


def numbers(step: float, betas: tuple[float, float] = (0.9, 0.999), **tensors: torch.Tensor) -> AdamWStep:
    return AdamWStep(
        lr=1e-2,
        beta1=betas[0],
        beta2=betas[1],
        eps=1e-8,
        weight_decay=0.1,
        step=torch.tensor(step),
        **tensors,
    )


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
@pytest.mark.parametrize("step", [1.0, 2.0, 5000.0])
def test_adamw_equals_its_definition_in_fp64(
    step: float, betas: tuple[float, float], generator: torch.Generator
) -> None:
    main, grad, first, second = (torch.randn(3000, generator=generator) for _ in range(4))
    second.square_()
    exact = [t.double() for t in (main, grad, first, second)]
    weight = torch.full((3000,), float("nan"))
    settings = numbers(step, betas, found_inf=torch.tensor(0.0))
    adamw_(main, grad, first, second, settings, weight=weight)
    adamw_reference_(*exact, settings)
    for ours, expected in zip((main, grad, first, second), exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=2e-6, atol=1e-7)
    assert torch.equal(weight, main)


def test_adamw_equals_that_of_torch(generator: torch.Generator) -> None:
    parameter = torch.nn.Parameter(torch.randn(100, generator=generator))
    main, first, second = parameter.detach().clone(), torch.zeros(100), torch.zeros(100)
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for step in range(1, 5):
        parameter.grad = torch.randn(100, generator=generator)
        optimizer.step()
        adamw_(main, parameter.grad, first, second, numbers(float(step)))
    torch.testing.assert_close(main, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_adamw_changes_nothing_once_an_infinity_was_found(generator: torch.Generator) -> None:
    tensors = [torch.randn(10, generator=generator) for _ in range(4)]
    before = [t.clone() for t in tensors]
    adamw_(*tensors, numbers(1.0, found_inf=torch.tensor(1.0)))
    for ours, expected in zip(tensors, before, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_positions_turn_and_gradients_turn_back(
    interleaved: bool, strided: bool, generator: torch.Generator
) -> None:
    x = torch.randn(2, 3, 5, 24, generator=generator).requires_grad_()
    seen = x[..., :12] if strided else x
    pairs = seen.shape[-1] // 2
    angles = torch.randn(2, 3, pairs, generator=generator)
    dout = torch.randn(2, 5, 3, 2 * pairs, generator=generator).transpose(1, 2)
    out = rope_triton(seen, angles.cos(), angles.sin(), interleaved=interleaved)
    expected = rope_reference(seen, angles.cos(), angles.sin(), interleaved=interleaved)
    torch.testing.assert_close(out, expected)
    ours, exact = (torch.autograd.grad(y, x, dout)[0] for y in (out, expected))
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize(("strided", "both"), [(False, False), (True, True)])
def test_heads_are_normed_and_turned_in_one_pass(
    strided: bool, both: bool, generator: torch.Generator
) -> None:
    x = torch.randn(2, 3, 5, 32, generator=generator).requires_grad_()
    weight = torch.randn(16 if strided else 32, generator=generator).requires_grad_()
    seen = x[..., 8:24] if strided else x
    cos, sin = torch.randn(2, 2, 3, seen.shape[-1] // (1 if both else 2), generator=generator)
    dout = torch.randn(2, 5, 3, seen.shape[-1], generator=generator).transpose(1, 2)
    assert supports_norm_rope(seen, weight, cos)
    assert not supports_norm_rope(seen, weight, cos[..., :4]), "part of a head"
    out = norm_rope_triton(seen, weight, 1e-6, cos, sin)
    expected = rope_reference(rms_norm_reference(seen, weight, 1e-6), cos, sin)
    torch.testing.assert_close(out, expected)
    ours, exact = (torch.autograd.grad(y, (x, weight), dout) for y in (out, expected))
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_member_of_a_pair_may_have_its_own_angle(interleaved: bool, generator: torch.Generator) -> None:
    """As in the tables of transformers' models, one set for all rows, or part of a wider one."""
    x = torch.randn(2, 5, 3, 12, generator=generator).transpose(1, 2).requires_grad_()
    cos, sin = torch.randn(2, 1, 3, 16, generator=generator)[..., :12]
    dout = torch.randn(2, 3, 5, 12, generator=generator)
    out = rope_triton(x, cos, sin, interleaved=interleaved)
    expected = rope_reference(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(out, expected)
    ours, exact = (torch.autograd.grad(y, x, dout)[0] for y in (out, expected))
    torch.testing.assert_close(ours, exact)


def test_angles_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="cos and sin"):
        rope_triton(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 6), torch.zeros(1, 2, 6))
