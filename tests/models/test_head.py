"""Head and loss: equal to plain cross-entropy, without the logits of all tokens ever existing."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.head_products import EmulatedHead, Fp8Head, fp8_head
from fsdmoe.models import head
from fsdmoe.models.head import LMHead, LossRows, linear_cross_entropies, linear_cross_entropy
from fsdmoe.precision.formats import FP8_BLOCKWISE

T, D, V = 37, 16, 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_TOKENS", 8)


def inputs(
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(T, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(V, (T,)), torch.rand(T) < 0.7


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none")[mask].sum()


def test_loss_and_gradients_equal_plain_cross_entropy() -> None:
    hidden, weight, labels, mask = inputs(torch.float32)
    expected = torch.autograd.grad(reference(hidden, weight, labels, mask) * 0.3, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, mask)
    torch.testing.assert_close(loss, reference(hidden, weight, labels, mask))
    for ours, theirs in zip(torch.autograd.grad(loss * 0.3, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divisor", [7, 3.5, torch.tensor(9), torch.tensor(2.5, dtype=torch.float64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_divisor_divides_the_loss_and_its_gradients(
    divisor: torch.Tensor | float, dtype: torch.dtype
) -> None:
    hidden, weight, labels, mask = inputs(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for keep in (mask, mask & False):
        expected = reference(hidden.float(), weight.float(), labels, keep) / divisor
        loss = linear_cross_entropy(hidden, weight, labels, keep, divisor=divisor)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected.float(), rtol=tolerance, atol=0)
        grads = [torch.autograd.grad(each * 0.3, (hidden, weight)) for each in (loss, expected)]
        for ours, theirs in zip(*grads, strict=True):
            assert (ours - theirs).norm() <= tolerance * theirs.norm()


def test_a_large_divisor_does_not_take_gradients_out_of_the_range_of_fp16() -> None:
    hidden, weight, labels, mask = inputs(torch.float16)
    scale = 1e7  # as of a loss that is scaled for fp16
    loss = linear_cross_entropy(hidden, weight, labels, mask, divisor=scale) * scale
    expected = reference(hidden.float(), weight.float(), labels, mask)
    grads = [torch.autograd.grad(each, (hidden, weight)) for each in (loss, expected)]
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).norm() < 3e-3 * theirs.norm()


def test_a_label_outside_the_mask_changes_nothing() -> None:
    hidden, weight, labels, mask = inputs(torch.float32)
    other = torch.where(mask, labels, (labels + 1) % V)
    assert not torch.equal(labels, other)
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, other, mask), linear_cross_entropy(hidden, weight, labels, mask)
    )


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_no_tensor_is_as_large_as_all_logits() -> None:
    hidden, weight, labels, mask = inputs(torch.float32)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, labels, mask).backward()
    assert largest.numel == V * D  # the weight's gradient; a chunk of logits is 8 * V, all of them T * V


def test_without_gradients_none_are_made() -> None:
    hidden, weight, labels, mask = inputs(torch.float32)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, mask)
    torch.testing.assert_close(loss, reference(hidden, weight, labels, mask))
    assert flops.get_total_flops() == 2 * T * V * D  # the logits


class Sink:
    """A gradient buffer as a sharding engine would own it."""

    def __init__(self, shape: torch.Size) -> None:
        self.buffer, self.uses = torch.full(shape, float("nan")), 0

    def claim(self, staged: object = None) -> tuple[torch.Tensor, bool]:
        self.uses += 1
        return self.buffer, self.uses > 1

    def stage(self) -> None:
        return None


def test_the_weight_gradient_goes_straight_to_its_sink_and_adds_up_over_uses() -> None:
    module = LMHead(D, V)
    torch.nn.init.normal_(module.weight)
    hidden, labels = torch.randn(1, T, D), torch.randint(V, (1, T))
    (expected,) = torch.autograd.grad(module(hidden, labels) * 2, module.weight)
    module.weight.grad_sink = sink = Sink(module.weight.shape)
    for _ in range(2):
        (module(hidden, labels) * 2).backward()
    assert module.weight.grad is None
    torch.testing.assert_close(sink.buffer, 2 * expected)


def test_a_second_backward_needs_a_retained_graph() -> None:
    hidden, weight, labels, mask = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels, mask)
    loss.backward(retain_graph=True)
    once = [tensor.grad.clone() for tensor in (hidden, weight)]
    loss.backward()
    for tensor, gradient in zip((hidden, weight), once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match=r"backward ran twice|backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_losses_of_several_depths_share_one_gradient(dtype: torch.dtype) -> None:
    """As large as the weight in float32: one for every depth would be the head's memory again."""
    first, weight, labels, mask = inputs(dtype)
    second = torch.randn(T, D, dtype=dtype, requires_grad=True)
    further = LossRows(second, labels.roll(1), ~mask, 7.0)
    plain = [
        linear_cross_entropy(first, weight, labels, mask, divisor=3.0),
        linear_cross_entropy(second, weight, labels.roll(1), ~mask, divisor=7.0),
    ]
    expected = torch.autograd.grad(sum(plain), (first, second, weight))
    weight.grad_sink = sink = Sink(weight.shape)
    total, losses = linear_cross_entropies([LossRows(first, labels, mask, 3.0), further], weight)
    total.backward()
    close = {"atol": 1e-3, "rtol": 1e-2} if dtype == torch.float16 else {}
    assert sink.uses == 1
    assert losses is not None
    torch.testing.assert_close(losses, torch.stack(plain), **close)
    torch.testing.assert_close([first.grad, second.grad], list(expected[:2]), **close)
    torch.testing.assert_close(sink.buffer.to(dtype), expected[2], **close)


def fp8_loss(products_of: Any, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The loss, and the gradients of hidden states and of the weight."""
    hidden, weight, labels = inputs
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    rows = [LossRows(leaves[0], labels, torch.ones_like(labels, dtype=torch.bool), 300.0)]
    loss, _ = linear_cross_entropies(rows, leaves[1], products_of=products_of)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("powers", [False, True])
def test_a_head_in_fp8_is_as_close_to_fp64_as_fp8_is(powers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in fp8 and the emulation are the same; the weight's gradient sees rounded logits alone."""
    monkeypatch.setattr(head, "CHUNK_TOKENS", 128)
    recipe = FP8_BLOCKWISE.with_power_of_two_scales() if powers else FP8_BLOCKWISE
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 300, (300,), generator=generator)
    weight = torch.randn(300, 256, generator=generator) / 16
    hidden = torch.randn(300, 256, generator=generator) + 6 * weight[labels]  # which says something of labels
    inputs = (hidden, weight, labels)
    exact = fp8_loss(head.PlainProducts, tuple(t.double() if t.is_floating_point() else t for t in inputs))
    emulated = fp8_loss(partial(EmulatedHead, recipe), inputs)
    found = fp8_loss(partial(Fp8Head, recipe), inputs)
    for ours, other in zip(found, emulated, strict=True):
        assert ((ours - other).norm() / other.norm()).item() < 1e-5
    errors = [((ours - other).norm() / other.norm()).item() for ours, other in zip(found, exact, strict=True)]
    assert 0 < errors[0] < 0.01
    assert 0.01 < errors[1] < 0.06
    assert 1e-3 < errors[2] < 0.03


def test_a_head_that_no_product_in_fp8_takes_is_refused_by_its_key() -> None:
    with pytest.raises(
        ConfigError, match=r"precision\.head: expected a head .* set precision\.emulate = true"
    ):
        fp8_head(FP8_BLOCKWISE, False, torch.zeros(100, 128))


def test_weights_of_tokens_are_refused() -> None:
    hidden, weight, labels, mask = inputs(torch.float32)
    with pytest.raises(TypeError, match=r"loss_mask: expected bool, got torch\.float32"):
        linear_cross_entropy(hidden, weight, labels, mask.float())
