"""The checks of pages in a browser find what they look for, and nothing in a page without fault."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import open_browser, open_page, problems_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGE = """<!doctype html><html lang="en"><head><title>page</title></head>
<body><main><h1>A page</h1>{}</main></body></html>"""


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with open_browser() as opened:
        yield opened


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<p>All is well: ep-split, a/b</p>", ""),
        ("<div style='overflow-x:auto' tabindex='0'><p style='width:2000px'>scrolls by itself</p></div>", ""),
        ("<p style='width:2000px'>wide</p>", "overflow: the page scrolls sideways"),
        ("<p style='width:3em'>communication</p>", "overflow: p#: wider than its box: communication"),
        ("<p style='width:3em;overflow-wrap:anywhere'>communication</p>", "broken word: p: communication"),
        ("<p style='color:#aaa'>pale</p>", "axe: color-contrast"),
    ],
    ids=["nothing", "a scroller", "overflow", "wide text", "broken word", "contrast"],
)
def test_each_fault_of_a_page_is_found(browser: "Browser", tmp_path: Path, body: str, problem: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGE.format(body))
    with open_page(browser, path.as_uri(), width=500) as page:
        found = problems_of(page)
    assert any(line.startswith(problem) for line in found) if problem else found == []
