"""Parts that backward runs again: their memory goes in forward, and neither losses nor gradients notice."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.memory.layer_call import LayerCall, may_keep_less
from fsdmoe.memory.recompute import drawing_part, hand_out, part

X = torch.randn(5, 4)
WEIGHT = nn.Parameter(torch.randn(4, 4))


def gradients(compute, parts: tuple[str, ...]) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """Of the input and the weight, with ``parts`` recomputed."""
    x = X.clone().requires_grad_()
    call = LayerCall(frozenset(parts), [WEIGHT])
    with call.running():
        out = compute(x * 1)
    return list(torch.autograd.grad(out.square().sum(), (x, WEIGHT)))


def test_a_result_has_no_memory_between_its_last_use_and_backward() -> None:
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    runs = []

    def sine(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin()

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = part("a", sine, x)
        seen.append(weakref.ref(y))  # type: ignore[arg-type]
        return y @ WEIGHT

    x = X.clone().requires_grad_()
    with LayerCall(frozenset({"a"}), [WEIGHT]).running():
        out = compute(x)
    assert seen[0]() is None
    assert runs == [1]
    out.square().sum().backward()
    wanted = torch.autograd.grad((X.clone().requires_grad_().sin() @ WEIGHT).square().sum(), WEIGHT)
    assert runs == [1, 1]
    assert torch.equal(WEIGHT.grad, wanted[0])  # type: ignore[arg-type]
    WEIGHT.grad = None


def two_parts(x: torch.Tensor) -> torch.Tensor:
    first = part("a", lambda x: (x.exp() + 1).log(), x)
    second = part("b", lambda y: (y @ WEIGHT).sin(), first)
    return second * first


@pytest.mark.parametrize("parts", [("a",), ("b",), ("a", "b")])
def test_parts_that_feed_each_other_give_the_same_gradients(parts: tuple[str, ...]) -> None:
    for wanted, found in zip(gradients(two_parts, ()), gradients(two_parts, parts), strict=True):
        assert torch.equal(wanted, found)


def test_a_graph_that_is_kept_runs_backward_twice() -> None:
    x = X.clone().requires_grad_()
    with LayerCall(frozenset({"a", "b"}), [WEIGHT]).running():
        out = two_parts(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(out, x)[0])


def test_a_graph_that_outlives_its_backward_keeps_no_memory() -> None:
    """As between two micro-batches, where the loop still holds the last loss."""
    x = X.clone().requires_grad_()
    inner = x.exp()
    with LayerCall(frozenset({"a"}), [WEIGHT]).running():
        out = (part("a", torch.sin, inner) @ WEIGHT).sum()
    alive = weakref.ref(inner)
    del inner
    out.backward()
    WEIGHT.grad = None
    assert alive() is None


def test_a_result_that_was_written_to_is_kept_as_it_became() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        y = part("a", lambda x: x * 2, x)
        y += 1
        return y @ WEIGHT

    for wanted, found in zip(gradients(compute, ()), gradients(compute, ("a",)), strict=True):
        assert torch.equal(wanted, found)


def test_a_kept_tensor_that_was_written_to_is_an_error_as_without_parts() -> None:
    x = X.clone().requires_grad_() * 1
    with LayerCall(frozenset({"a"}), [WEIGHT]).running():
        out = part("a", torch.sin, x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_random_numbers_are_drawn_alike() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        return drawing_part("a", lambda x: nn.functional.dropout(x, 0.5) @ WEIGHT, x)

    found = []
    for parts in ((), ("a",)):
        torch.manual_seed(3)
        found.append([*gradients(compute, parts), torch.rand(1)])  # and others find the generator as it was
    for wanted, got in zip(*found, strict=True):
        assert torch.equal(wanted, got)


def test_what_follows_a_result_that_is_handed_out_is_not_run_again() -> None:
    runs = []

    def attention(x: torch.Tensor) -> torch.Tensor:
        y = x @ WEIGHT
        hand_out(y)
        runs.append(1)
        return y.sin().exp()

    def compute(x: torch.Tensor) -> torch.Tensor:
        return part("a", attention, x)

    for wanted, found in zip(gradients(compute, ()), gradients(compute, ("a",)), strict=True):
        assert torch.equal(wanted, found)
    assert runs == [1, 1]


def test_a_part_that_runs_otherwise_the_second_time_is_an_error() -> None:
    runs: list[int] = []

    def moody(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin() if len(runs) == 1 else x.sin().exp()

    with pytest.raises(RuntimeError, match="must depend on its arguments alone"):
        gradients(lambda x: part("a", moody, x) @ WEIGHT, ("a",))


def test_nothing_is_kept_apart_in_evaluation_and_under_a_checkpoint() -> None:
    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(may_keep_less())
        return x.sin()

    assert may_keep_less()
    with torch.no_grad():
        look(X)
    checkpoint(look, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert found == [False, False, False]
