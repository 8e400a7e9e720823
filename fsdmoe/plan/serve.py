"""The page: ``python -m fsdmoe.plan --serve``. One HTML file, and answers as JSON, for this machine alone.

::

    GET  /             the page; /uplot.js and /uplot.css, which it draws with
    GET  /choices      models, GPUs, fabrics and recompute choices to choose from
    POST /plan         a request as JSON -> the ranking, or 400 and the problems, a line each

It listens on 127.0.0.1 and answers only requests that call it so: a page of the web that resolves its own
name to this address gets nothing. A plan is made for the page itself and for programs of this machine, never
for a page of another site that has a browser send the request. Whatever is wrong with a request is answered,
with 400 or what fits better, and the next one is served.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import traceback
from collections.abc import Callable
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fsdmoe.core.errors import ConfigError
from fsdmoe.models.config import PRESETS, preset_config
from fsdmoe.observe.server import HOST, QuietHandler, serve_until_interrupted
from fsdmoe.plan.answer import answer
from fsdmoe.plan.hardware import FABRICS, GIB, GPUS
from fsdmoe.plan.memory_section import recompute_choices
from fsdmoe.plan.report import ranking_values
from fsdmoe.plan.source import Fixed, Request

_HERE = Path(__file__).parent
_UPLOT = _HERE / "uplot"
FILES = {
    "/": (_HERE / "page.html", "text/html; charset=utf-8"),
    "/uplot.js": (_UPLOT / "uPlot.iife.min.js", "text/javascript"),
    "/uplot.css": (_UPLOT / "uPlot.min.css", "text/css"),
}
"""By path, with their types."""
MOST_BYTES = 64 * 1024
MOST_SECONDS = 10.0
"""For a body to be received; on this machine it takes a millisecond."""
_DRAIN_BYTES = 1 << 24
_DRAIN_SECONDS = 1.0
_NUMBERS = {"gpus", "seq", "tokens_per_step", "host_memory", "tp", "cp", "ep", "dp_outer", "micro_batch"}
_TEXTS = {"model", "gpu", "fabric", "recompute"}


def serve(port: int) -> int:
    """Serve until interrupted; returns the exit code."""
    return serve_until_interrupted(build_server, port)


def build_server(port: int) -> ThreadingHTTPServer:
    return _Server((HOST, port), _Handler)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody who hangs up before the answer is no error of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Refusal(Exception):
    """A request that is not answered with a plan: the status, and why."""

    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status


def request_of(given: Any) -> Request:
    """From the page's JSON; empty fields are left to the search."""
    if not isinstance(given, dict):
        raise ConfigError(f"request: expected an object, got {type(given).__name__}; send one")
    unknown = given.keys() - _NUMBERS - _TEXTS
    problems = [f"{name}: unknown field; drop it" for name in sorted(unknown)]
    values: dict[str, Any] = {}
    for name in (_NUMBERS | _TEXTS) & given.keys():
        value = given[name]
        if value in ("", None):
            continue
        if name in _NUMBERS and not str(value).strip().isdecimal():
            problems.append(f"{name}: expected a whole number, got {value!r}; correct it")
        elif name in _NUMBERS:
            values[name] = int(str(value))
        else:
            values[name] = str(value).strip()
    problems += [f"{name}: expected a value, got none; fill it in" for name in ("model", "gpus")
                 if name not in values and not any(p.startswith(f"{name}:") for p in problems)]  # fmt: skip
    if problems:
        raise ConfigError(*sorted(problems))
    fixed = Fixed(**{name: values.get(name) for name in Fixed._fields})
    return Request(
        values["model"], values["gpus"], values.get("gpu", "h100"), values.get("seq"),
        values.get("tokens_per_step"), values.get("fabric"), fixed, values.get("host_memory"),
    )  # fmt: skip


def choices() -> dict[str, Any]:
    """What the page offers."""
    parts = {
        ",".join(sorted(each)) or "none": None
        for preset in ("qwen3-30b-a3b", "deepseek-v3")
        for each in recompute_choices(preset_config(preset))
    }
    return {
        "models": [name for name in PRESETS if not name.startswith(("tiny-", "quickstart"))],
        "gpus": {
            name: {"memory": round(gpu.memory / GIB), "host_memory": gpu.host_memory // GIB}
            for name, gpu in GPUS.items()
        },
        "fabrics": list(FABRICS),
        "recompute": list(parts),
    }


class _Handler(QuietHandler):
    server: ThreadingHTTPServer

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, make: Callable[[], None]) -> None:
        """Whatever goes wrong ends this request, with a status and the reason, and not the server."""
        try:
            self._require_own_name()
            make()
        except _Refusal as error:
            self._send_problems(error.status, [str(error)])
        except ConfigError as error:
            self._send_problems(HTTPStatus.BAD_REQUEST, list(error.problems))
        except ImportError as error:
            self._send_problems(HTTPStatus.BAD_REQUEST, [str(error)])
        except (ConnectionError, TimeoutError):
            raise  # nobody is there to be answered
        except (ValueError, OSError, RecursionError) as error:
            # Of a field: a number of thousands of digits, a path that no file system takes.
            self._send_problems(HTTPStatus.BAD_REQUEST, [f"request: {type(error).__name__}: {error}"])
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}; the terminal has the traceback"
            self._send_problems(HTTPStatus.INTERNAL_SERVER_ERROR, [problem])

    def _get(self) -> None:
        if self.path in FILES:
            file, kind = FILES[self.path]
            self._send(HTTPStatus.OK, file.read_bytes(), kind)
        elif self.path == "/choices":
            self._send_json(HTTPStatus.OK, choices())
        else:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"{self.path}: no such page; see /")

    def _post(self) -> None:
        if self.path != "/plan":
            raise _Refusal(HTTPStatus.NOT_FOUND, f"{self.path}: no such page; plans are made at /plan")
        self._refuse_other_sites()
        body = self._body()
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"request: expected JSON: {error}") from error
        request = request_of(given)
        wanted, ranking = answer(request)
        self._send_json(HTTPStatus.OK, ranking_values(ranking, wanted, request))

    def _names(self) -> set[str]:
        """What this server is called by those who mean it."""
        port = self.server.server_port
        return {f"{host}:{port}" for host in (HOST, "localhost")} | (
            {HOST, "localhost"} if port == 80 else set()
        )

    def _require_own_name(self) -> None:
        """Refuse a page of the web that resolves its own name to this address."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in self._names():
            name = f"{HOST}:{self.server.server_port}"
            raise _Refusal(HTTPStatus.FORBIDDEN, f"Host: expected a request to {name}, got {hosts}; use that")

    def _refuse_other_sites(self) -> None:
        """A browser says whose page sends a request, and sends JSON to another site only with its leave."""
        origins = self.headers.get_all("Origin", [])
        own = {f"http://{name}" for name in self._names()}
        if not own.issuperset(origins):
            raise _Refusal(
                HTTPStatus.FORBIDDEN,
                f"Origin: expected none, or this server's own page, got {origins}; open that",
            )
        site = self.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin"):
            raise _Refusal(
                HTTPStatus.FORBIDDEN,
                f"Sec-Fetch-Site: expected this server's own page, got {site!r}; open that",
            )
        if self.headers.get_content_type() != "application/json":
            raise _Refusal(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Type: expected application/json, got {self.headers.get('Content-Type')!r}; set it",
            )

    def _body(self) -> bytes:
        """As many bytes as the header says, within MOST_SECONDS however slowly it comes."""
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or not lengths[0].strip().isdecimal() or "Transfer-Encoding" in self.headers:
            raise _Refusal(
                HTTPStatus.BAD_REQUEST,
                f"Content-Length: expected one number of bytes, got {lengths}; send it",
            )
        length = int(lengths[0]) if len(lengths[0]) < 20 else sys.maxsize
        if length > MOST_BYTES:
            problem = f"request: expected at most {MOST_BYTES} bytes, got {lengths[0]:.40}; send less"
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, problem)
        found, deadline = b"", time.monotonic() + MOST_SECONDS
        while len(found) < length:
            try:
                self.connection.settimeout(max(0.001, deadline - time.monotonic()))
                part = self.rfile.read1(length - len(found))
            except TimeoutError:
                problem = f"request: expected {length} bytes within {MOST_SECONDS:g} s, got {len(found)}"
                raise _Refusal(HTTPStatus.REQUEST_TIMEOUT, problem) from None
            if not part:
                problem = (
                    f"Content-Length: expected {length} bytes, got {len(found)}; send as many as it says"
                )
                raise _Refusal(HTTPStatus.BAD_REQUEST, problem)
            found += part
        return found

    def _send_problems(self, status: HTTPStatus, problems: list[str]) -> None:
        self._send_json(status, {"problems": problems})
        self._drain()

    def _drain(self) -> None:
        """Take what the other end is still sending: closed before that, a connection loses the answer too."""
        deadline, left = time.monotonic() + _DRAIN_SECONDS, _DRAIN_BYTES
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (seconds := deadline - time.monotonic()) > 0:
                self.connection.settimeout(seconds)
                part = self.rfile.read1(1 << 16)
                if not part:
                    return
                left -= len(part)

    def _send_json(self, status: HTTPStatus, values: dict[str, Any]) -> None:
        self._send(status, json.dumps(values).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        policy = "frame-ancestors 'none'"
        self.send(status, body, kind, Cache_Control="no-store", Content_Security_Policy=policy)
