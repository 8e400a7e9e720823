"""Labels outside of the vocabulary, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.triton import cross_entropy_
from fsdmoe.models import head
from fsdmoe.models.head import LMHead
from tests.support.kernel_references import cross_entropy_reference_

VOCABULARY = 50


def raise_noted() -> None:
    from fsdmoe.core import labels  # here, so that the assertions before it stand alone

    labels.raise_noted()


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(head, "CHUNK_TOKENS", 4)
    with kernels("triton"):
        yield


def test_a_label_outside_has_no_number_and_no_gradient_and_disturbs_no_other_token() -> None:
    logits = torch.randn(8, VOCABULARY)
    labels = torch.randint(VOCABULARY, (8,))
    labels[2], labels[4], labels[6] = VOCABULARY, -1, VOCABULARY
    mask = torch.arange(8) != 6
    exact, divisor = logits.double(), torch.tensor(3.0)
    expected = cross_entropy_reference_(exact, labels.clamp(0, VOCABULARY - 1), mask, divisor)
    losses = cross_entropy_(logits, labels, mask, divisor)
    outside = torch.tensor([2, 4])
    assert losses[outside].isnan().all(), f"losses {losses[outside].tolist()} for labels outside"
    assert not logits[outside].any()
    inside = torch.tensor([0, 1, 3, 5, 6, 7])  # one of which is masked, its label outside
    torch.testing.assert_close(losses[inside].double(), expected[inside], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits[inside].double(), exact[inside], rtol=1e-5, atol=1e-6)


def test_the_reference_agrees_about_labels_outside() -> None:
    logits, labels = torch.randn(4, VOCABULARY), torch.tensor([VOCABULARY, -100, 3, -100])
    mask, divisor = torch.tensor([True, True, True, False]), torch.tensor(2.0)
    ours, theirs = logits.clone(), logits.clone()
    losses = cross_entropy_(ours, labels, mask, divisor)
    expected = cross_entropy_reference_(theirs, labels, mask, divisor)
    torch.testing.assert_close(losses, expected, equal_nan=True)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_a_label_outside_is_noted_with_rank_and_row(label: int) -> None:
    module = LMHead(16, VOCABULARY)
    nn.init.normal_(module.weight)
    hidden, labels = torch.randn(2, 5, 16, requires_grad=True), torch.randint(VOCABULARY, (2, 5))
    mask = torch.ones(2, 5, dtype=torch.bool)
    bad = labels.clone()
    bad[1, 3] = label
    loss = module(hidden, bad, mask)
    loss.backward()
    assert loss.isnan(), f"a loss of {loss.item()} with the label {label}"
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    with pytest.raises(RuntimeError, match=f"got {label} on rank 0, in row 1 of a micro-batch, token 3"):
        raise_noted()
    raise_noted()  # told once


def test_a_masked_token_may_have_any_label() -> None:
    module = LMHead(16, VOCABULARY)
    nn.init.normal_(module.weight)
    hidden, labels = torch.randn(2, 5, 16), torch.randint(VOCABULARY, (2, 5))
    mask = torch.rand(2, 5) < 0.5
    expected = module(hidden, labels, mask)
    for label in (-100, VOCABULARY):
        assert torch.equal(module(hidden, labels.masked_fill(~mask, label), mask), expected)
    raise_noted()
