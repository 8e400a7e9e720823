"""Small servers: what their handlers share, and a page that this machine alone can ask for, served until the
command is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"


class QuietHandler(BaseHTTPRequestHandler):
    """Sends whole answers, and says nothing of them on the terminal."""

    timeout = 10.0  # of a connection that sends nothing

    def send(self, status: HTTPStatus, body: bytes, kind: str, **headers: str) -> None:
        """An answer of the type ``kind``. In names of ``headers``, ``_`` stands for a dash."""
        headers |= {"Content_Type": kind, "Content_Length": str(len(body))}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the terminal is the run's, or shows the address and nothing else."""


def serve_until_interrupted(build: Callable[[int], ThreadingHTTPServer], port: int) -> int:
    """Serve what ``build`` makes for ``port`` (0 takes a free one); returns the exit code."""
    try:
        server = build(port)
    except (OSError, OverflowError) as error:
        print(
            f"fsdmoe: --port: cannot listen on {port} ({error}); choose another, or 0 for a free one",
            file=sys.stderr,
        )
        return 2
    print(f"http://{HOST}:{server.server_port}/  (this machine alone; Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0
