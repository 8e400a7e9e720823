"""A page that this machine alone can ask for, served until the command is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from http.server import ThreadingHTTPServer

HOST = "127.0.0.1"


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
