"""On a GPU the head never reads outside of its logits, whatever the labels, and says so without a wait."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fsdmoe.kernels.backend import kernels
from fsdmoe.models.head import LMHead
from fsdmoe.testing import requires_gpu

pytestmark = requires_gpu
ROWS, LENGTH, WIDTH, VOCABULARY = 4, 1024, 64, 5000


@pytest.fixture(params=["auto", "torch"])
def choice(request: pytest.FixtureRequest) -> Iterator[str]:
    """The fused kernel, and torch's operations."""
    with kernels(request.param):
        yield request.param


@pytest.fixture
def head() -> LMHead:
    module = LMHead(WIDTH, VOCABULARY).to("cuda", torch.bfloat16)
    nn.init.normal_(module.weight)
    return module


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(ROWS, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), device="cuda")
    return hidden, labels, torch.rand(ROWS, LENGTH, device="cuda") < 0.8


def noted() -> str:
    """What is raised where the host waited for the device."""
    from fsdmoe.core.labels import raise_noted  # here, so that the assertions before it stand alone

    torch.cuda.synchronize()
    try:
        raise_noted()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("label", [VOCABULARY, -1, -100, 2**31 - 1])
def test_a_label_outside_gives_no_number_no_gradient_and_leaves_a_note(
    head: LMHead, choice: str, label: int
) -> None:
    hidden, labels, mask = problem()
    if choice == "auto":  # near enough for a kernel that reads there to live
        label = max(-1, min(label, VOCABULARY))
    labels[2, 700], mask[2, 700] = label, True
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")  # nothing may wait for the device
        try:
            loss = head(hidden, labels, mask)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan(), f"a finite loss of {loss.item()} with the label {label}"
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert not hidden.grad[2, 700].any()
    assert hidden.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()
    message = noted()
    assert f"got {label} on rank 0, in row 2 of a micro-batch, token 700" in message
    assert noted() == "nothing", "told once"


@pytest.mark.parametrize("label", [VOCABULARY, -1, -100])
def test_masked_tokens_may_have_any_label(head: LMHead, choice: str, label: int) -> None:
    hidden, labels, mask = problem()
    expected = head(hidden, labels, mask)
    loss = head(hidden, labels.masked_fill(~mask, label), mask)
    assert torch.equal(loss, expected)
    assert noted() == "nothing"
