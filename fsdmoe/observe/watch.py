"""The page of runs that are going on, served to this machine alone. A browser asks again every other second,
and the page is drawn anew where files of the runs have changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path

from fsdmoe.core.errors import ConfigError
from fsdmoe.observe.compare import LOADS, METRICS
from fsdmoe.observe.server import HOST, QuietHandler, serve_until_interrupted


class WatchServer(ThreadingHTTPServer):
    """Holds the page of the moment."""

    daemon_threads = True

    def __init__(self, draw: Callable[[], str], folders: Sequence[str], port: int) -> None:
        super().__init__((HOST, port), _WatchHandler)
        self._draw = draw
        self._files = [Path(folder) / name for folder in folders for name in (METRICS, LOADS, "config.toml")]
        self._lock = threading.Lock()  # matplotlib's settings are the process's
        self._tag = ""
        self._body = b""

    def tag(self) -> str:
        """What it depends on: changes with the runs' files."""
        return '"' + "-".join(_state_of(path) for path in self._files) + '"'

    def body(self) -> tuple[str, bytes]:
        """The page and its tag."""
        with self._lock:
            tag = self.tag()
            if tag != self._tag:
                self._body = self._draw().encode()
                self._tag = tag
            return self._tag, self._body


def _state_of(path: Path) -> str:
    """Changes with the file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return "none"
    return f"{stat.st_mtime_ns}.{stat.st_size}"


class _WatchHandler(QuietHandler):
    server: WatchServer

    def do_HEAD(self) -> None:
        if self._is_meant():
            self._send(self.server.tag(), b"")

    def do_GET(self) -> None:
        if self._is_meant():
            try:
                tag, body = self.server.body()
            except (ConfigError, OSError) as error:  # a folder was moved away
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
                return
            with contextlib.suppress(ConnectionError):  # the browser has gone
                self._send(tag, body)

    def _is_meant(self) -> bool:
        """A page of the web that resolves its own name to this address gets nothing."""
        names = {f"{host}:{self.server.server_port}" for host in (HOST, "localhost")}
        if self.headers.get("Host") not in names:
            self.send_error(HTTPStatus.FORBIDDEN, f"expected a request to {HOST}:{self.server.server_port}")
            return False
        if self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND, "the page is at /")
            return False
        return True

    def _send(self, tag: str, body: bytes) -> None:
        self.send(HTTPStatus.OK, body, "text/html; charset=utf-8", ETag=tag, Cache_Control="no-store")


def watch(draw: Callable[[], str], folders: Sequence[str], port: int) -> int:
    """Serve until interrupted; returns the exit code.

    Args:
        draw: Makes the page.
        folders: Of the runs whose files it is made of.
        port: Of this machine; 0 takes a free one.
    """
    draw()  # what is wrong with the folders is told here
    return serve_until_interrupted(lambda number: WatchServer(draw, folders, number), port)
