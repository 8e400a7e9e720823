"""``pytest --draw``: which cases, in which order."""

from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_collection_modifyitems


class _Item(SimpleNamespace):
    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    __hash__ = object.__hash__


def _draw(number: int | None, seed: int) -> list[str]:
    items: list[Any] = [_Item(nodeid=f"test_a.py::{i}", marks=["full"]) for i in range(40)]
    items += [_Item(nodeid="test_quick.py::0", marks=[]), _Item(nodeid="test_b_gpu.py::0", marks=["full"])]
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(getoption={"--draw": number, "--seed": seed}.__getitem__, hook=hook)
    before = len(items)
    pytest_collection_modifyitems(config, items)
    assert len(items) + len(left_out) == before
    return [item.nodeid for item in items]


def test_a_draw_takes_full_cases_without_a_gpu_in_the_order_of_its_seed() -> None:
    drawn = _draw(20, 7)
    assert len(set(drawn)) == 20
    assert all(name.startswith("test_a.py") for name in drawn)
    assert drawn == _draw(20, 7)
    assert drawn != sorted(drawn, key=lambda name: int(name.rpartition(":")[2]))
    assert set(drawn) != set(_draw(20, 8))
    assert len(_draw(100, 7)) == 40, "all there are"


def test_nothing_is_drawn_unless_asked_for() -> None:
    assert len(_draw(None, 7)) == 42
