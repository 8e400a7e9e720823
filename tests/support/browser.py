"""A page in a real browser (playwright, with the machine's Chromium), and what can be wrong with its looks.

::

    with open_browser() as browser, open_page(browser, url, width=500, scheme="dark") as page:
        assert problems_of(page) == []
        save_picture(page, pytestconfig, "name")    # where pytest was given --pictures FOLDER
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (500, 900, 1600)
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")

# What reaches over the right edge of the window, unless something around it scrolls or cuts it off, and text
# that is wider than its box.
_OVERFLOW = """() => {
  const edge = document.documentElement.clientWidth, found = [];
  const isCut = e => e && (getComputedStyle(e).overflowX !== "visible" || isCut(e.parentElement));
  for (const each of document.body.querySelectorAll("*")) {
    const box = each.getBoundingClientRect();
    if (!each.children.length && each.clientWidth && each.scrollWidth > each.clientWidth + 1 && !isCut(each))
      found.push(`${each.tagName.toLowerCase()}#${each.id}: wider than its box: ${each.textContent}`);
    if (box.width && box.right > edge + 1 && !isCut(each.parentElement))
      found.push(`${each.tagName.toLowerCase()}#${each.id}: ends at ${Math.round(box.right)} of ${edge} px`);
  }
  if (document.documentElement.scrollWidth > edge) found.push("the page scrolls sideways");
  return found;
}"""

# Letters and digits of one word on two lines. A hyphen, a slash or a comma may end a line.
_BROKEN_WORDS = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) {
    const text = texts.currentNode, range = document.createRange();
    if (["SCRIPT", "STYLE"].includes(text.parentElement.tagName)) continue;
    for (const word of text.data.matchAll(/[\\p{L}\\p{N}_.%]+/gu)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter(r => r.width > 0).map(r => Math.round(r.top)));
      if (lines.size > 1) found.push(`${text.parentElement.tagName.toLowerCase()}: ${word[0]}`);
    }
  }
  return found;
}"""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Skips the test where there is no browser, or nothing to drive it with."""
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install '.[dev]')"
    )
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def open_page(browser: Browser, url: str, *, width: int = 900, scheme: Scheme = "light") -> Iterator[Page]:
    """A tab with a profile of its own. At its end no script may have failed, and nothing may have been asked
    of another server."""
    with browser.new_context(
        viewport={"width": width, "height": 1000}, color_scheme=scheme, reduced_motion="reduce"
    ) as context:
        page = context.new_page()
        wrong: list[str] = []
        origin = "/".join(url.split("/")[:3])
        page.on("pageerror", lambda error: wrong.append(f"a script failed: {error}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((origin, "data:", "blob:"))
                else wrong.append(f"asked for {request.url}")
            ),
        )
        page.goto(url)
        yield page
        assert wrong == []


def problems_of(page: Page) -> list[str]:
    """Horizontal overflow, broken words, and what axe finds against accessibility, a line each."""
    why = "axe-playwright-python is not installed (pip install '.[dev]')"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=why).Axe()
    violations = axe.run(page).response["violations"]
    return [
        *(f"overflow: {line}" for line in page.evaluate(_OVERFLOW)),
        *(f"broken word: {line}" for line in page.evaluate(_BROKEN_WORDS)),
        *(f"axe: {v['id']}: {v['help']}: {node['html'][:200]}" for v in violations for node in v["nodes"]),
    ]


def save_picture(page: Page, config: pytest.Config, name: str) -> None:
    """As ``name.png`` of the folder that pytest was given as ``--pictures``; without it nothing is done."""
    folder: str | None = config.getoption("--pictures")
    if folder is not None:
        page.screenshot(path=Path(folder) / f"{name}.png")
