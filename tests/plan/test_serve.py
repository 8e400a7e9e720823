"""The page's server."""

import contextlib
import http.client
import json
import socket
import threading
import tomllib
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.config import build_config
from fsdmoe.core.errors import ConfigError
from fsdmoe.plan import serve
from fsdmoe.plan.serve import FILES, HOST, build_server, request_of

PLAN = {"model": "tiny-qwen3", "gpus": 4, "seq": 64, "tp": 1, "cp": 1, "ep": 4, "micro_batch": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadingHTTPServer]:
    made = build_server(0)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def asked(
    server: ThreadingHTTPServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    """Headers with an underscore in place of a dash."""
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=60)
    text = body if isinstance(body, str) else json.dumps(body)
    given = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request(method, path, text, given)
    with contextlib.closing(connection):
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def sent(server: ThreadingHTTPServer, body: bytes, *, length: str, hangs_up: bool = True) -> int:
    """The status after exactly these bytes."""
    head = (
        f"POST /plan HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )
    with socket.create_connection((HOST, server.server_port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        if hangs_up:
            connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1]) if answer else 0


def test_an_answer_has_the_ranking_and_files_that_are_configurations(server: ThreadingHTTPServer) -> None:
    status, found = asked(server, "POST", "/plan", {"model": "tiny-qwen3", "gpus": "4", "seq": 64, "tp": ""})
    assert status == 200
    for each in (found["best"], *found["others"]):
        problems: list[str] = []
        assert build_config(tomllib.loads(each["toml"]), {}, 4, problems, needs_data=False), problems
    status, fixed = asked(server, "POST", "/plan", {"model": "tiny-qwen3", "gpus": 4, "seq": 64, "ep": 4})
    assert {each["degrees"]["ep"] for each in (fixed["best"], *fixed["others"])} == {4}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"model": "tiny-qwen3", "gpus": "many"}, "gpus: expected a whole number, got 'many'"),
        ({"gpus": 4}, "model: expected a value, got none"),
        ({"model": "tiny-qwen3", "gpus": 4, "colour": 1}, "colour: unknown field"),
        ({"model": "tiny-qwen3", "gpus": 4, "gpu": "h1000"}, "--gpu: expected one of"),
        (
            {"model": "tiny-qwen3", "gpus": 4, "seq": 64, "recompute": "all"},
            "--recompute: expected none, layer, or parts",
        ),
        ([1], "request: expected an object, got list"),
        ("{", "request: expected JSON"),
    ],
)
def test_what_is_wrong_is_answered_in_lines(server: ThreadingHTTPServer, body: Any, problem: str) -> None:
    status, found = asked(server, "POST", "/plan", body)
    assert status == 400
    assert found["problems"][0].startswith(problem)


def test_only_this_machine_is_answered(server: ThreadingHTTPServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server, "GET", "/choices")[0] == 200
    for host in (
        "example.org",
        f"example.org:{server.server_port}",
        HOST,
        f"localhost:{server.server_port + 1}",
    ):
        assert asked(server, "GET", "/choices", Host=host)[0] == 403
        assert asked(server, "POST", "/plan", PLAN, Host=host)[0] == 403
    assert asked(server, "GET", "/choices", Host=f"localhost:{server.server_port}")[0] == 200
    assert asked(server, "GET", "/../pyproject.toml")[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": "application/json; charset=utf-8", "Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_a_page_of_another_site_gets_no_plan(
    server: ThreadingHTTPServer, headers: dict[str, str], status: int
) -> None:
    found, answer = asked(server, "POST", "/plan", PLAN, **headers)
    assert found == status, "a form or script of any site could have a plan made here"
    assert ("best" in answer) == (status == 200)


def test_the_page_itself_gets_one(server: ThreadingHTTPServer) -> None:
    own = f"http://{HOST}:{server.server_port}"
    assert asked(server, "POST", "/plan", PLAN, Origin=own)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"model": ' * 5_000,
        b'{"model": "tiny-qwen3", "gpus": ' + b"9" * 5_000 + b"}",
        b'{"model": "tiny-qwen3", "gpus": "' + b"9" * 5_000 + b'"}',
        b'{"model": "' + b"x" * 5_000 + b'", "gpus": 4}',
        b'{"model": "a\\u0000b", "gpus": 4}',
        b'{"model": "\\ud800", "gpus": 4}',
        b'{"model": {"a": [1]}, "gpus": 4}',
        b'{"model": "tiny-qwen3", "gpus": NaN}',
        b"\xff\xfe",
        b"",
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)
def test_malformed_bodies_are_answered_and_the_server_goes_on(
    server: ThreadingHTTPServer, body: bytes
) -> None:
    assert sent(server, body, length=str(len(body))) == 400, "no answer at all is 0"
    assert asked(server, "GET", "/choices")[0] == 200


@pytest.mark.parametrize(
    ("length", "status"),
    [("100", 400), ("-2", 400), ("2, 2", 400), ("0x2", 400), ("9" * 400, 413), ("70000", 413)],
)
def test_a_wrong_length_is_refused(server: ThreadingHTTPServer, length: str, status: int) -> None:
    assert sent(server, b"{}", length=length) == status


def test_a_body_that_does_not_come_is_not_waited_for(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "MOST_SECONDS", 0.05, raising=False)
    assert sent(server, b"{", length="2", hangs_up=False) == 408


def test_what_the_page_needs_is_installed_with_the_package() -> None:
    root = Path(serve.__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["fsdmoe"]
    installed = {path for glob in globs for path in (root / "fsdmoe").glob(glob)}
    assert {path for path, _ in FILES.values()} <= installed


def test_empty_fields_are_left_to_the_search() -> None:
    request = request_of({"model": " tiny-qwen3 ", "gpus": " 8 ", "ep": "", "seq": None})
    assert (request.model, request.num_gpus, request.seq_len, request.fixed.ep) == (
        "tiny-qwen3",
        8,
        None,
        None,
    )
    with pytest.raises(ConfigError, match="gpus: expected a value"):
        request_of({"model": "tiny-qwen3", "gpus": ""})
