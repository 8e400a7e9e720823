"""Outputs that are made again for backward, in place of being kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fsdmoe.memory.saved_outputs import how_to_make, note_output, remade_outputs

WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Norm:
    """A cheap operation that says how its output is made, and counts how often it was."""

    def __init__(self) -> None:
        self.num_made = 0
        self.storage: StorageWeakRef | None = None

    def make(self, x: Tensor) -> Tensor:
        self.num_made += 1
        return x * 2 + 1

    def __call__(self, x: Tensor) -> Tensor:
        out = x * 2 + 1
        note_output(out, lambda: self.make(x.detach()))
        self.storage = StorageWeakRef(out.untyped_storage())
        return out


def layer(x: Tensor, weights: list[Tensor], norm: Norm) -> Tensor:
    out = norm(x)
    return (out @ weights[0]).square() + (out.t() @ weights[1]).t()


def gradients(*, remade: bool, norm: Norm) -> list[Tensor]:
    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    weights = [WEIGHT.clone().requires_grad_(), WEIGHT.t().clone().requires_grad_()]
    if remade:
        with remade_outputs():
            y = layer(x, weights, norm)
    else:
        y = layer(x, weights, norm)
    assert norm.storage is not None
    assert norm.storage.expired() == remade
    y.sum().backward()
    return [t.grad for t in (x, *weights)]  # type: ignore[misc]


def test_an_output_is_not_kept_and_is_made_once_for_all_its_readers() -> None:
    norm = Norm()
    found, expected = gradients(remade=True, norm=norm), gradients(remade=False, norm=Norm())
    assert norm.num_made == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_second_backward_makes_it_again() -> None:
    norm, x = Norm(), torch.ones(4, 4, requires_grad=True)
    weight = WEIGHT.clone().requires_grad_()
    with remade_outputs():
        y = layer(x, [weight] * 2, norm)
    first, second = (torch.autograd.grad(y.sum(), weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert norm.num_made == 2


def test_an_output_that_was_changed_in_place_is_kept_as_it_is() -> None:
    norm, x = Norm(), torch.ones(4, 4, requires_grad=True)
    weight = WEIGHT.clone().requires_grad_()
    with remade_outputs():
        out = norm(x)
        out *= 3
        y = out @ weight
    y.sum().backward()
    assert norm.num_made == 0
    assert torch.equal(weight.grad, torch.full((4, 4), 36.0))


def test_an_output_that_is_used_elsewhere_stays() -> None:
    norm, x = Norm(), torch.ones(4, 4, requires_grad=True)
    with remade_outputs():
        out = norm(x)
        y = out @ WEIGHT.clone().requires_grad_()
    y.sum().backward()
    assert torch.equal(out, torch.full((4, 4), 3.0))


def test_what_is_made_from_it_can_be_made_too() -> None:
    norm, x = Norm(), torch.ones(4, 4, requires_grad=True)
    weight = WEIGHT.clone().requires_grad_()
    with remade_outputs():
        make = how_to_make(view := norm(x).t())
        assert make is not None
        turned = view.cos()
        note_output(turned, lambda: make().cos())
        y = turned @ weight
        storage = StorageWeakRef(turned.untyped_storage())
        assert how_to_make(x) is None
        del view, turned
    assert storage.expired()
    y.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((4, 4), 4 * torch.tensor(3.0).cos()))


@pytest.mark.parametrize("case", ["evaluation", "checkpoint", "outside"])
def test_elsewhere_nothing_is_noted(case: str) -> None:
    norm, x = Norm(), torch.ones(4, 4, requires_grad=True)
    weight = WEIGHT.clone().requires_grad_()

    def run(x: Tensor) -> Tensor:
        with remade_outputs():
            out = norm(x)
            assert how_to_make(out) is None
            return out @ weight

    if case == "evaluation":
        with torch.no_grad():
            run(x)
    elif case == "checkpoint":
        checkpoint(run, x, use_reentrant=False).sum().backward()
    else:
        (norm(x) @ weight).sum().backward()
    assert norm.num_made == 0


def test_a_graph_is_freed_with_its_last_reference() -> None:
    """Not when the garbage collector comes by: an output that its operation saves must not hold itself."""
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(4, 4, requires_grad=True)
        with remade_outputs():
            y = nn.functional.softmax(x, -1)
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()
    finally:
        gc.enable()
