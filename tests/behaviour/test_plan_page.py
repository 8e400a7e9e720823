"""The planner's page in a real browser: how it looks, what it answers, and how it is used by hand.

``make pictures`` runs it to make the pictures of docs/planning.md.
"""

import threading
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from fsdmoe.config import build_config
from fsdmoe.plan.serve import HOST, build_server
from tests.support.browser import (
    SCHEMES,
    WIDTHS,
    Scheme,
    open_browser,
    open_page,
    problems_of,
    save_picture,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.full
PLAN = "#model=qwen3-30b-a3b&gpus=8&gpu=h100&seq=4096"
WIDE = "#model=qwen3-30b-a3b&gpus=4096&gpu=h200&tp=1&cp=1&dp_outer=8"
"""Long numbers, and the longest of walls."""
QUICK = f"{PLAN}&tp=1&cp=1&dp_outer=1"
PICTURES = {
    (PLAN, 900, "light"): ("plan_page", "h1"),
    (PLAN, 900, "dark"): ("plan_meshes", "h2:has(+ #all)"),
    (PLAN, 500, "light"): ("plan_page_narrow", "h1"),
}
"""By plan, width and scheme: the file's name, and what is at its top."""


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = build_server(0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://{HOST}:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def page(browser: "Browser", address: str) -> "Iterator[Page]":
    with open_page(browser, address + QUICK) as opened:
        wait_for_plans(opened, 1)
        yield opened


def wait_for_plans(page: "Page", number: int) -> None:
    page.wait_for_function(
        "number => Number(document.body.dataset.plans) >= number", arg=number, timeout=120_000
    )


def plan_with(page: "Page", **fields: str) -> None:
    """Fill in fields and submit."""
    before = int(page.evaluate("Number(document.body.dataset.plans)"))
    for name, value in fields.items():
        page.evaluate("([name, value]) => { document.getElementById(name).value = value }", [name, value])
    page.evaluate("document.getElementById('form').requestSubmit()")
    wait_for_plans(page, before + 1)


def column(page: "Page", number: int) -> list[str]:
    return page.locator(f"#ranking td:nth-child({number})").all_text_contents()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("plan", [PLAN, WIDE], ids=["small", "large"])
def test_no_width_breaks_words_or_overflows_and_axe_finds_nothing(
    browser: "Browser", address: str, plan: str, scheme: Scheme, pytestconfig: pytest.Config
) -> None:
    with open_page(browser, address + plan, width=WIDTHS[-1], scheme=scheme) as page:
        wait_for_plans(page, 1)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 1000})
            page.wait_for_function("chart.width === document.getElementById('chart').clientWidth")
            assert problems_of(page) == [], width
            if (plan, width, scheme) in PICTURES:
                name, top = PICTURES[plan, width, scheme]
                page.locator(top).evaluate("element => element.scrollIntoView()")
                save_picture(page, pytestconfig, name)


def test_a_phone_does_not_scroll_sideways(page: "Page") -> None:
    for width in (320, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width


def test_the_table_is_sorted_by_time_and_tells_speed_and_both_memories(page: "Page") -> None:
    names = page.locator("#columns th").all_text_contents()
    assert names[:6] == ["#", "s a step", "tokens/s", "TFLOP/s", "GiB", "host GiB"]
    seconds = [float(text) for text in column(page, 2)]
    assert len(seconds) > 3
    assert seconds == sorted(seconds)
    for number in (4, 5, 6):
        assert all(float(text) >= 0 for text in column(page, number)), names[number - 1]


def test_each_point_of_the_chart_tells_its_mesh_by_pointer_and_by_keyboard(page: "Page") -> None:
    read = page.locator("#reason").text_content
    assert (read() or "").startswith("1 of ")
    page.focus("#point")
    page.keyboard.press("ArrowRight")
    second = read() or ""
    assert second.startswith("2 of ")
    assert "x the time" in second or "does not fit" in second or "as fast" in second
    assert page.get_attribute("#point", "aria-valuetext") == second
    page.keyboard.press("End")
    last = int(page.get_attribute("#point", "max") or 0)
    assert (read() or "").startswith(f"{last + 1} of {last + 1}: ")
    over = page.locator("#chart .u-over")
    first = page.evaluate("[chart.valToPos(chart.data[0][0], 'x'), chart.valToPos(chart.data[1][0], 'y')]")
    over.hover(position={"x": first[0], "y": first[1]})
    assert (read() or "").startswith("1 of ")


def test_what_to_turn_is_ordered_by_what_it_gains(page: "Page") -> None:
    gains = [float(text.split()[0]) for text in page.locator("#turns b").all_text_contents()]
    assert gains
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0
    page.locator("#ranking button").nth(1).click()
    assert "take the fastest mesh" in (page.locator("#turns").text_content() or "")


def test_a_copied_link_opens_the_same_plan(browser: "Browser", address: str, page: "Page") -> None:
    plan_with(page, gpus="16", gpu="l40s", host_memory="96", ep="8")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#link")
    link = page.evaluate("navigator.clipboard.readText()")
    with open_page(browser, link) as other:
        wait_for_plans(other, 1)
        fields = {name: other.input_value(f"#{name}") for name in ("gpus", "gpu", "host_memory", "ep", "tp")}
        assert fields == {"gpus": "16", "gpu": "l40s", "host_memory": "96", "ep": "8", "tp": "1"}
        assert other.locator("#setting").text_content() == page.locator("#setting").text_content()
        assert "of 96 GiB of the host" in (other.locator("#cards").text_content() or "")


def test_the_page_answers_changes_downloads_and_refuses(page: "Page") -> None:
    assert (page.locator("#setting").text_content() or "").startswith("The fastest: ")
    first = page.get_attribute("#memory .bar", "aria-label") or ""
    assert first.count("GiB") > 8
    plan_with(page, gpus="16", gpu="h200")
    assert page.get_attribute("#memory .bar", "aria-label") != first, "more and larger GPUs: the bars change"
    page.locator("#ranking button").nth(1).click()
    assert (page.locator("#setting").text_content() or "").startswith("Number 2: ")
    assert page.evaluate("document.activeElement.id") == "setting"
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "plan.toml"
    problems: list[str] = []
    text = download.value.path().read_text()
    assert build_config(tomllib.loads(text), {}, 16, problems, needs_data=False), problems
    plan_with(page, gpus="sixteen")
    assert "gpus: expected a whole number" in (page.locator("#problems").text_content() or "")
    assert page.locator("#result").is_hidden()
    plan_with(page, gpus="1", gpu="h100")
    assert "nothing fits" in (page.locator("#problems").text_content() or "")
    plan_with(page, gpus="8")
    assert page.locator("#problems").text_content() == ""
    assert page.locator("#result").is_visible()


def test_the_form_is_filled_in_and_sent_by_keyboard(page: "Page") -> None:
    page.focus("#gpus")
    page.keyboard.press("Control+A")
    page.keyboard.type("16")
    page.keyboard.press("Enter")
    wait_for_plans(page, 2)
    assert "on 16 × h100" in (page.locator("#summary").text_content() or "")
    page.focus("#model")
    visited = []
    for _ in range(6):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert visited == ["gpus", "gpu", "seq", "recompute", "plan", "SUMMARY"]
