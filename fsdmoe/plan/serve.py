"""The page: ``python -m fsdmoe.plan --serve``. One HTML file, and answers as JSON, for this machine alone.

::

    GET  /             the page
    GET  /choices      models, GPUs, fabrics and recompute choices to choose from
    POST /plan         a request as JSON -> the ranking, or 400 and the problems, a line each

It listens on 127.0.0.1 and answers only requests that call it so: a page of the web that resolves its own
name to this address gets nothing.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fsdmoe.errors import ConfigError
from fsdmoe.models.config import PRESETS, preset_config
from fsdmoe.plan.answer import answer
from fsdmoe.plan.hardware import FABRICS, GPUS
from fsdmoe.plan.memory_section import recompute_choices
from fsdmoe.plan.report import ranking_values
from fsdmoe.plan.source import Fixed, Request

HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("page.html")
MOST_BYTES = 64 * 1024
_NUMBERS = {"gpus", "seq", "tokens_per_step", "tp", "cp", "ep", "dp_outer", "micro_batch"}
_TEXTS = {"model", "gpu", "fabric", "recompute"}


def serve(port: int) -> int:
    """Serve until interrupted; returns the exit code."""
    try:
        server = build_server(port)
    except (OSError, OverflowError) as error:
        print(f"fsdmoe: --port: cannot listen on {port} ({error}); choose another, or 0 for a free one")
        return 2
    print(f"http://{HOST}:{server.server_port}/  (this machine alone; Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


def build_server(port: int) -> ThreadingHTTPServer:
    return ThreadingHTTPServer((HOST, port), _Handler)


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
        values.get("tokens_per_step"), values.get("fabric"), fixed,
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
        "gpus": {name: round(gpu.memory / 2**30) for name, gpu in GPUS.items()},
        "fabrics": list(FABRICS),
        "recompute": list(parts),
    }


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if not self._is_for_us():
            return
        if self.path == "/":
            self._send(HTTPStatus.OK, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/choices":
            self._send_json(HTTPStatus.OK, choices())
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"problems": [f"{self.path}: no such page; see /"]})

    def do_POST(self) -> None:
        if not self._is_for_us():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/plan" or not length.isdecimal() or int(length) > MOST_BYTES:
            self._send_json(HTTPStatus.BAD_REQUEST, {"problems": ["expected a small JSON object at /plan"]})
            return
        try:
            request = request_of(json.loads(self.rfile.read(int(length))))
            wanted, ranking = answer(request)
            self._send_json(HTTPStatus.OK, ranking_values(ranking, wanted, request))
        except json.JSONDecodeError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"problems": [f"request: expected JSON: {error}"]})
        except ConfigError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"problems": list(error.problems)})
        except ImportError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"problems": [str(error)]})

    def _is_for_us(self) -> bool:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host in (HOST, "localhost"):
            return True
        self._send_json(HTTPStatus.FORBIDDEN, {"problems": [f"expected a request to {HOST}, got {host!r}"]})
        return False

    def _send_json(self, status: HTTPStatus, values: dict[str, Any]) -> None:
        self._send(status, json.dumps(values).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the terminal shows the address and nothing else."""
