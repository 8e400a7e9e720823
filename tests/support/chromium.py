"""A headless Chromium, driven through its debugging pipe: messages of JSON, a zero byte after each."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 60.0


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._number, self._rest = 0, b""
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(method, parameters, self._session)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of the page; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        end = time.monotonic() + _SECONDS
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise AssertionError(f"expected {expression} in the page within {_SECONDS:.0f} s")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]  # type: ignore[no-any-return]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], _SECONDS)[0]:
                raise AssertionError(f"expected an answer of the browser within {_SECONDS:.0f} s")
            piece = os.read(self._in, 1 << 16)
            if not piece:
                raise AssertionError("the browser ended")
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)  # type: ignore[no-any-return]


@contextlib.contextmanager
def open_page(chromium: str) -> Iterator[Page]:
    """A browser with a profile of its own; ended at the end."""
    browser_in, to_browser = os.pipe()
    from_browser, browser_out = os.pipe()

    def place_pipes() -> None:  # where the browser expects them
        spare_in, spare_out = os.dup(browser_in), os.dup(browser_out)
        os.dup2(spare_in, 3)
        os.dup2(spare_out, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        browser = subprocess.Popen(
            [chromium, *flags], preexec_fn=place_pipes, pass_fds=(3, 4),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(browser_in)
        os.close(browser_out)
        try:
            yield Page(to_browser, from_browser)
        finally:
            browser.kill()
            browser.wait()
            os.close(to_browser)
            os.close(from_browser)
