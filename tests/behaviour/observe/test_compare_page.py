"""The comparison of two real runs, as a browser shows it. With ``--pictures docs/pictures`` its pictures go
into the documentation."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fsdmoe.observe.__main__ import main, read_runs
from fsdmoe.observe.compare import page as compare_page
from fsdmoe.observe.watch import WatchServer
from tests.support.browser import SCHEMES, WIDTHS, Scheme, open_browser, open_page, problems_of, save_picture
from tests.support.scripts import run_program

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RUN = """
[model]
preset = "tiny-qwen3"
vocab_size = 264
[precision]
param_dtype = "float32"
[data]
kind = "python-stdlib"
max_bytes = 200_000
seq_len = 64
[observe]
log_interval = 2
[checkpoint]
interval = 0
[optim]
warmup_steps = 10
[train]
steps = 100
global_batch_size = 8
micro_batch_size = 8
eval_interval = 20
eval_batches = 1
"""


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run whose router is balanced, and one without that learns faster."""
    root = tmp_path_factory.mktemp("runs")
    (root / "run.toml").write_text(RUN)
    changes = {
        "balanced": ("--optim.lr", "3e-3", "--experts.balance.sequence", "0.02"),
        "unbalanced": ("--optim.lr", "1e-2", "--experts.balance.sequence", "0"),
    }
    for name, changed in changes.items():
        given = ("--config", str(root / "run.toml"), "--train.output_dir", str(root / name), *changed)
        program = run_program("train.py", *given)
        assert program.wait() == 0, program.stdout + program.stderr
    return [str(root / name) for name in changes]


@pytest.fixture(scope="module")
def address(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the page that the command writes."""
    path = tmp_path_factory.mktemp("page") / "compare.html"
    assert main(["compare", *folders, "--html", str(path)]) == 0
    return path.as_uri()


@pytest.mark.full
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_in_order_at_any_width_in_light_and_dark(
    browser: "Browser", address: str, pytestconfig: pytest.Config, width: int, scheme: Scheme
) -> None:
    with open_page(browser, address, width=width, scheme=scheme) as page:
        assert problems_of(page) == []
        assert page.locator("figure svg").count() == 9 + 2, "charts of all runs, heat maps of each"
        assert page.get_by_role("img", name="Loss over minutes").is_visible()
        assert page.get_by_role("row", name="optim.lr 0.003 0.01").is_visible()
        colours = page.evaluate(
            "() => [getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('figure svg text')).fill]"
        )
        background, ink = (sum(map(int, re.findall(r"\d+", colour))) for colour in colours)
        assert (background > ink) == (scheme == "light"), colours
        if (width, scheme) == (1600, "light"):
            save_picture(page, pytestconfig, "compare_page")


@pytest.mark.full
def test_a_page_that_is_watched_follows_its_run(browser: "Browser", folders: list[str]) -> None:
    metrics = Path(folders[0]) / "metrics.jsonl"
    before = metrics.read_text()
    server = WatchServer(lambda: compare_page(read_runs(folders[:1]), is_live=True), folders[:1], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with open_page(browser, f"http://127.0.0.1:{server.server_port}/") as page:
            steps = page.get_by_role("row", name="steps 100", exact=True)
            steps.wait_for()
            assert problems_of(page) == []
            row = json.loads(before.splitlines()[0]) | {"step": 101}
            metrics.write_text(before + json.dumps(row) + "\n")
            page.get_by_role("row", name="steps 101", exact=True).wait_for()
            assert page.locator("main").count() == 1
    finally:
        metrics.write_text(before)
        server.shutdown()
        thread.join()
        server.server_close()
