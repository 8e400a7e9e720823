"""Every MoE family of transformers on several ranks trains as one process does, or is refused by name; what
``docs/families.md`` says of it is what a run finds."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from fsdmoe.testing import requires_transformers
from tests.support.family_table import PAGE, cell_of, read_page
from tests.support.moe_families import MODEL_TYPES, installed

pytestmark = requires_transformers

# One for each form that is computed in a way of its own.
QUICK = ("dbrx", "llama4_text", "longcat_flash", "nemotron_h")
CASES = [
    pytest.param(axis, family, marks=() if axis == "ep" and family in QUICK else pytest.mark.full)
    for axis in ("ep", "tp", "cp")
    for family in MODEL_TYPES
]


def assert_is_current_version() -> None:
    if f"transformers {version('transformers')}" not in PAGE.read_text():
        pytest.skip("the page is about another version of transformers")


@pytest.mark.parametrize(("axis", "family"), CASES)
def test_the_page_says_what_a_run_finds(axis: str, family: str) -> None:
    assert_is_current_version()
    column = next(name for name in read_page()[family] if name.startswith(f"{axis} "))
    assert read_page()[family][column] == cell_of(axis, family)


def test_every_family_is_equal_or_refused_and_all_but_two_are_split() -> None:
    rows = read_page()
    cells = {(name, axis): row[axis] for name, row in rows.items() for axis in ("ep 4", "tp 2", "cp 2")}
    assert {key: cell for key, cell in cells.items() if not cell.startswith(("equal", "refused"))} == {}
    assert [name for name, row in rows.items() if row["ep 4"] != "equal, split"] == ["doge", "jetmoe"]
    assert set(rows) == set(MODEL_TYPES)


@pytest.mark.full
def test_every_installed_family_is_on_the_page() -> None:
    assert_is_current_version()
    assert set(installed()) == set(read_page())
