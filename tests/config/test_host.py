"""Where ranks meet and what a host can hold is asked before torch is loaded."""

import socket

import pytest

from fsdmoe.config import host
from fsdmoe.models import ModelConfig, build_model
from fsdmoe.models.flops import num_parameters
from tests.support.config_building import build


def test_a_host_and_a_port_that_ranks_cannot_meet_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "many")
    assert host.meeting_problems()[0].startswith("MASTER_PORT: expected a number below 65536, got 'many'")
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        (line,) = host.meeting_problems()
        assert line.startswith(
            f"MASTER_PORT: expected a free port, got {port}, which another program listens on"
        )
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        assert host.meeting_problems() == [], "the launcher's own store"


def test_ranks_that_no_launcher_has_numbered_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (line,) = host.meeting_problems()
    assert line.startswith("MASTER_ADDR: expected where the 2 ranks of WORLD_SIZE meet, got none; set")
    monkeypatch.setenv("RANK", "2")
    assert host.meeting_problems() == ["RANK: expected 0 to 1, since WORLD_SIZE is 2, got 2"]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert host.meeting_problems() == []


def test_a_model_that_no_layout_fits_into_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = build({"model": {"preset": "qwen3-30b-a3b"}})
    monkeypatch.setattr(host, "available_host_bytes", lambda: 2**30)
    monkeypatch.setattr(host, "num_gpus", lambda: 0)
    (line,) = host.memory_problems(config, 2)
    assert line.startswith("model.preset: expected a model that fits this host, got 30.5 B parameters")
    assert "moments of the 2 ranks here take 454" in line
    assert "1.00 GiB of memory are available" in line
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert host.memory_problems(config, 1000) == [], "a thousandth of it"
    monkeypatch.setattr(host, "num_gpus", lambda: 1)
    assert host.memory_problems(config, 1) == [], "whose memory only torch knows"


@pytest.mark.parametrize("preset", ["quickstart", "mixtral-8x7b", "deepseek-v3"])
def test_parameters_are_counted_without_building_a_model(preset: str) -> None:
    config, _ = build({"model": {"preset": preset}})
    real = sum(parameter.numel() for parameter in build_model(config.model).parameters())
    assert isinstance(config.model, ModelConfig)
    assert abs(num_parameters(config.model) / real - 1) < 0.01


def test_gpus_are_counted_by_what_a_process_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in {"": 0, "-1": 0, "0": 1, "2,3,5": 3}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert host.num_gpus() == count
