"""The newest row of a run for Prometheus: ``http://HOST:PORT/metrics``, in its text format, from a thread."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import ThreadingHTTPServer

from fsdmoe.core.errors import ConfigError
from fsdmoe.observe.server import QuietHandler


class MetricsServer(ThreadingHTTPServer):
    """Serves numbers by name until it is closed."""

    daemon_threads = True

    def __init__(self, address: str, run: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            super().__init__((host, int(port)), _MetricsHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"observe.prometheus: expected an address to listen on, got {address!r} ({error}); choose "
                "another port, or 0 for a free one"
            ) from error
        self._label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._values: dict[str, float] = {}
        threading.Thread(target=self.serve_forever, name="prometheus", daemon=True).start()

    def update(self, values: Mapping[str, float]) -> None:
        """Show these from now on, and those that others have had before."""
        self._values = {**self._values, **values}

    def text(self) -> str:
        """The page."""
        lines = []
        for tag, value in self._values.items():
            name = "fsdmoe_" + re.sub(r"\W", "_", tag)
            lines += [f"# TYPE {name} gauge", f'{name}{{run="{self._label}"}} {float(value)!r}']
        return "\n".join([*lines, ""])

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _MetricsHandler(QuietHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "the page is at /metrics")
            return
        body = self.server.text().encode()
        self.send(HTTPStatus.OK, body, "text/plain; version=0.0.4; charset=utf-8")
