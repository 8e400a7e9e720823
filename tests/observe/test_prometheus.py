"""The page that Prometheus asks for."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.observe import ObserveConfig
from fsdmoe.observe.prometheus import MetricsServer


def test_the_newest_row_is_served_in_the_text_format() -> None:
    server = MetricsServer("127.0.0.1:0", 'run "a"')
    server.update({"step": 3, "train/loss": 2.5})
    server.update({"step": 4})
    address = f"http://127.0.0.1:{server.server_port}"
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{address}/other")
    server.close()
    assert 'fsdmoe_step{run="run \\"a\\""} 4.0\n' in text
    assert '# TYPE fsdmoe_train_loss gauge\nfsdmoe_train_loss{run="run \\"a\\""} 2.5\n' in text


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"observe\.prometheus: expected HOST:PORT, got '9400'"):
        ObserveConfig(prometheus="9400")
