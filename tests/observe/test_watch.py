"""The page of runs that go on, over HTTP."""

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdmoe.observe.watch import WatchServer, watch


class Drawn:
    """Counts how often the page is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        return (self.folder / "metrics.jsonl").read_text()


@pytest.fixture
def drawn(tmp_path: Path) -> Drawn:
    (tmp_path / "metrics.jsonl").write_text("one")
    return Drawn(tmp_path)


@pytest.fixture
def server(drawn: Drawn) -> Iterator[WatchServer]:
    server = WatchServer(drawn, [str(drawn.folder)], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def asked(server: WatchServer, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers.get("ETag", "")
    connection.close()
    return found


def test_the_page_is_drawn_anew_when_a_file_of_the_run_has_changed(server: WatchServer, drawn: Drawn) -> None:
    status, body, tag = asked(server)
    assert (status, body, drawn.times) == (200, "one", 1)
    assert asked(server) == (200, "one", tag)
    assert asked(server, "HEAD") == (200, "", tag)
    assert drawn.times == 1
    (drawn.folder / "metrics.jsonl").write_text("one, two")
    assert asked(server, "HEAD")[2] != tag
    assert asked(server)[1] == "one, two"
    assert drawn.times == 2


def test_only_this_machine_by_its_own_name_is_answered(server: WatchServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server, Host="evil.example")[0] == 403
    assert asked(server, path="/other")[0] == 404


def test_a_folder_that_was_moved_away_is_told_and_the_server_stays(server: WatchServer, drawn: Drawn) -> None:
    (drawn.folder / "metrics.jsonl").rename(drawn.folder / "elsewhere")
    status, body, _ = asked(server)
    assert status == 503
    assert "metrics.jsonl" in body
    (drawn.folder / "elsewhere").rename(drawn.folder / "metrics.jsonl")
    assert asked(server)[0] == 200


def test_a_port_that_is_taken_is_named(
    server: WatchServer, drawn: Drawn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch(drawn, [str(drawn.folder)], server.server_port) == 2
    assert f"--port: cannot listen on {server.server_port}" in capsys.readouterr().err
