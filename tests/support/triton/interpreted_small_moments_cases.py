"""Cases of AdamW with moments in eight bits, in Triton's interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.adamw_step import AdamWStep, adamw_small_reference_
from fsdmoe.kernels.triton import adamw_
from fsdmoe.precision.block_floats import (
    BlockFloats,
    ElementPlace,
    Moment,
    encode,
    num_blocks,
    read,
)

pytestmark = pytest.mark.usefixtures("poisoned")

PLACE = ElementPlace(salt=0x7ABCDEF1, start=128, run=192, stride=576, offset=384)


def clone(moment: Moment) -> Moment:
    if isinstance(moment, torch.Tensor):
        return moment.clone()
    return BlockFloats(moment.codes.clone(), moment.exponents.clone())


def small(values: torch.Tensor, *, signed: bool) -> BlockFloats:
    return encode(values, torch.full(values.shape, 1 << 15, dtype=torch.int32), signed=signed)


@pytest.mark.parametrize("num_elements", [1, 64, 2048 + 64 * 5 + 9])
@pytest.mark.parametrize("kinds", ["both", "first", "second"])
def test_the_kernel_gives_the_codes_of_plain_torch(num_elements: int, kinds: str) -> None:
    generator = torch.Generator().manual_seed(num_elements)
    main, grad, first, second = (torch.randn(num_elements, generator=generator) for _ in range(4))
    second, grad[::7] = second.square(), 0.0
    moments: list[Moment] = [
        first if kinds == "second" else small(first * 1e-3, signed=True),
        second if kinds == "first" else small(second * 1e-6, signed=False),
    ]
    wanted = [main.clone(), *map(clone, moments)]
    numbers = AdamWStep(
        lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=torch.tensor(3.0),
        found_inf=torch.tensor(0.0),
    )  # fmt: skip
    weight = torch.full((num_elements,), float("nan"))
    adamw_(main, grad, *moments, numbers, place=PLACE, weight=weight)
    adamw_small_reference_(wanted[0], grad, *wanted[1:], numbers, PLACE)  # type: ignore[arg-type]
    torch.testing.assert_close(main, wanted[0], rtol=2e-6, atol=1e-6)
    assert torch.equal(weight, main)
    for ours, theirs, signed in zip(moments, wanted[1:], (True, False), strict=True):
        got, expected = read(ours, signed=signed), read(theirs, signed=signed)
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
            continue
        # Where the last bit of a sum decides about rounding up, a code may be the next one.
        assert (got != expected).float().mean() <= 0.002
        torch.testing.assert_close(got, expected, rtol=0.126, atol=0)


def test_the_kernel_changes_nothing_once_an_infinity_was_found() -> None:
    main, grad = torch.randn(100), torch.full((100,), float("inf"))
    first, second = small(torch.randn(100), signed=True), small(torch.rand(100), signed=False)
    before = [main.clone(), clone(first), clone(second)]
    numbers = AdamWStep(
        lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=torch.tensor(3.0),
        found_inf=torch.tensor(1.0),
    )  # fmt: skip
    adamw_(main, grad, first, second, numbers, place=PLACE)
    assert torch.equal(main, before[0])
    for now, then in zip((first, second), before[1:], strict=True):
        assert isinstance(then, BlockFloats)
        assert torch.equal(now.codes, then.codes)
        assert torch.equal(now.exponents, then.exponents)
        assert now.exponents.numel() == num_blocks(100)


@pytest.mark.parametrize("kinds", ["both", "plain"])
def test_the_kernel_rounds_main_weights_by_the_chance_of_plain_torch(kinds: str) -> None:
    generator = torch.Generator().manual_seed(1)
    main, grad, first = (torch.randn(2048 + 9, generator=generator) for _ in range(3))
    main, second = main.bfloat16().float(), first.square()
    moments: list[Moment] = [first * 1e-3, second * 1e-6]
    if kinds == "both":
        moments = [small(first * 1e-3, signed=True), small(second * 1e-6, signed=False)]
    wanted = [main.clone(), *map(clone, moments)]
    numbers = AdamWStep(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=torch.tensor(3.0))
    adamw_(main, grad, *moments, numbers, place=PLACE, stochastic=True)
    adamw_small_reference_(wanted[0], grad, *wanted[1:], numbers, PLACE, stochastic=True)  # type: ignore[arg-type]
    assert torch.equal(main, main.bfloat16().float()), "what bfloat16 has"
    assert (main != wanted[0]).float().mean() <= 0.002, "the last bit of a sum may decide"


def test_a_nan_of_a_gpu_stays_one() -> None:
    generator = torch.Generator().manual_seed(2)
    main, first = torch.randn(64, generator=generator), torch.zeros(64)
    grad = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    numbers = AdamWStep(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=torch.tensor(3.0))
    adamw_(main, grad, first, first.clone(), numbers, place=PLACE, stochastic=True)
    assert main.isnan().all()
