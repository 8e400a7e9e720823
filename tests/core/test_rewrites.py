"""Rewrites of forwards: composed in the order of the list, whoever comes first, and assigned in one file."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdmoe
from fsdmoe.core.rewrites import Rewrite, computed_by, foreign_forward, rewrite, rewrites_of

PACKAGE = Path(fsdmoe.__file__).parent
NAME = "forward"
# In the source of any assignment that is looked for: files without it need not be parsed.
MENTION = re.compile(rf"\.\s*{NAME}\b|['\"]{NAME}['\"]")


def assignments(source: str) -> list[int]:
    """Lines that give an object a forward: by assignment, ``setattr`` or its dict."""
    found = []
    for node in ast.walk(ast.parse(source)) if MENTION.search(source) else ():
        targets: list[Any] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
            targets = [node.target]
        elif isinstance(node, ast.With):
            targets = [item.optional_vars for item in node.items]
        inner = [each for target in targets if target is not None for each in ast.walk(target)]
        is_given = any(
            (isinstance(each, ast.Attribute) and each.attr == NAME)
            or (isinstance(each, ast.Subscript) and _is_name(each.slice))
            for each in inner
        )
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        is_set = name in ("setattr", "__setattr__", "delattr") and any(map(_is_name, node.args))  # type: ignore[attr-defined]
        if is_given or is_set:
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == NAME


def test_forward_is_assigned_in_one_file() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := assignments(path.read_text()))
    }
    assert list(found) == ["core/rewrites.py"], (
        f"expected assignments of forward in core/rewrites.py alone, got {found}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "layer.forward = f",
        "a.b, head.forward = g, f",
        "layer.forward: object = f",
        "setattr(layer, 'forward', f)",
        "object.__setattr__(layer, 'forward', f)",
        "vars(layer)['forward'] = f",
        "layer.__dict__['forward'] = f",
    ],
)
def test_every_way_to_assign_a_forward_is_seen(source: str) -> None:
    assert assignments(source) == [1]
    assert assignments("y = layer.forward(x)\nforward = 1\nx[forward] = 2") == []


def test_the_list_has_each_rewrite_after_those_that_it_names() -> None:
    order = [each.name for each in Rewrite]
    for each in Rewrite:
        assert each.form in ("instead", "around", "around own")
        assert all(order.index(other) < order.index(each.name) for other in each.after), each


def told(name: str, forward: Callable[..., Any], x: list[str]) -> list[str]:
    return forward([*x, name])


def fused(self: nn.Module, x: list[str]) -> list[str]:
    return [*x, "fused"]


class Layer(nn.Module):
    def forward(self, x: list[str]) -> list[str]:
        return [*x, "own"]


AROUND = (Rewrite.PART, Rewrite.NAME, Rewrite.LAYER_CALL)


@pytest.mark.parametrize("order", itertools.permutations((*AROUND, Rewrite.FUSED)))
def test_a_forward_is_composed_in_the_order_of_the_list_whoever_comes_first(order: Any) -> None:
    layer = Layer()
    for which in order:
        if which is Rewrite.FUSED:
            rewrite(layer, which, fused)
        else:
            rewrite(layer, which, told, which.name)
    assert layer([]) == ["LAYER_CALL", "NAME", "PART", "fused"]
    assert [each.which for each in rewrites_of(layer)] == [Rewrite.FUSED, *AROUND]


def test_a_second_rewrite_of_one_kind_is_around_the_first() -> None:
    layer = Layer()
    rewrite(layer, Rewrite.NAME, told, "first")
    rewrite(layer, Rewrite.NAME, told, "second")
    rewrite(layer, Rewrite.PART, told, "part")
    assert layer([]) == ["second", "first", "part", "own"]


def test_two_rewrites_that_compute_are_refused() -> None:
    layer = Layer()
    rewrite(layer, Rewrite.TENSOR, fused)
    with pytest.raises(AssertionError, match="expected one to compute a Layer"):
        rewrite(layer, Rewrite.FUSED, fused)


def test_a_forward_that_somebody_put_there_stays_inside_or_between() -> None:
    layer = Layer()
    own = layer.forward
    layer.forward = lambda x: own([*x, "before"])  # type: ignore[method-assign]
    rewrite(layer, Rewrite.NAME, told, "name")
    assert layer([]) == ["name", "before", "own"]
    ours = layer.forward
    layer.forward = lambda x: ours([*x, "after"])  # type: ignore[method-assign]
    rewrite(layer, Rewrite.PART, told, "part")
    assert layer([]) == ["part", "after", "name", "before", "own"]
    assert foreign_forward(layer) is not None
    assert [each.which for each in rewrites_of(layer)] == [Rewrite.NAME, Rewrite.PART]


def test_who_computes_a_module_is_known() -> None:
    layer, watched, alone = Layer(), Layer(), Layer()
    rewrite(layer, Rewrite.TENSOR, fused)
    rewrite(watched, Rewrite.ATTENTION, told, "attention")
    rewrite(alone, Rewrite.PART, told, "part")
    assert [computed_by(each) for each in (layer, watched, alone)] == ["tp", "recomputed attention", None]


def test_a_signature_is_that_of_the_forward_inside() -> None:
    layer = Layer()
    rewrite(layer, Rewrite.NAME, told, "name")
    assert list(inspect.signature(layer.forward).parameters) == ["x"]


def test_a_copy_computes_by_itself() -> None:
    layer = nn.Linear(2, 2)
    rewrite(layer, Rewrite.FUSED, nn.Linear.forward)
    rewrite(layer, Rewrite.PART, told_tensor)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    x = torch.ones(1, 2)
    assert not twin(x).any()
    assert layer(x).any()
    rewrite(twin, Rewrite.NAME, told_tensor)
    assert [each.which for each in rewrites_of(twin)] == [Rewrite.FUSED, Rewrite.PART, Rewrite.NAME]
    assert foreign_forward(twin) is None


def told_tensor(forward: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return forward(x)


def test_a_pickled_module_keeps_what_is_around_its_forward() -> None:
    layer = Layer()
    rewrite(layer, Rewrite.LAYER_CALL, told, "call")
    assert pickle.loads(pickle.dumps(layer))([]) == ["call", "own"]


def test_a_forward_that_was_taken_off_takes_its_rewrites_along() -> None:
    """Otherwise replay would believe that it still follows the module."""
    layer = nn.Linear(2, 2)
    rewrite(layer, Rewrite.PART, lambda forward, x: forward(x) + 1)
    del layer.forward
    assert rewrites_of(layer) == ()
    rewrite(layer, Rewrite.REPLAY, lambda forward, x: forward(x) + 10)
    x = torch.ones(1, 2)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias) + 10)
    assert [each.which for each in rewrites_of(layer)] == [Rewrite.REPLAY]
