"""The benchmark runs, checks what it loads, and says what it must say."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint import check_space, measure, medium, report
from fsdmoe.testing import run_ranks


@pytest.mark.full
def test_every_variant_is_measured_and_nothing_is_left_on_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_ranks(measure, 2, str(tmp_path / "checkpoints"), 1e6, 1)
    report(results[0], 2, str(tmp_path))
    told = capsys.readouterr().out
    assert "times the bandwidth of the best plain DCP" in told
    assert medium(str(tmp_path)) in told
    assert {"save", "load", "stall"} <= results[0]["times"]["fsdmoe"].keys()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.distcp"))


def test_on_a_gpu_the_stall_is_set_against_the_host_link(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"save": [6.0], "load": [4.0], "stall": [6.0]}
    times: dict[str, Any] = {"fsdmoe": seconds, "DCP, 1 thread": seconds}
    times["fsdmoe, asynchronous"] = {"save": [6.0], "stall": [0.30, 0.36, 0.90]}
    report({"times": times, "bytes": 18e9, "own_bytes": 18e9, "params": 1.5e9, "link": 60e9}, 1, "/")
    told = capsys.readouterr().out
    assert "60.0 GB/s, the bytes alone take 0.300 s" in told
    assert "is 1.20 of that" in told


def test_a_disk_that_is_too_small_is_refused_before_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="choose another --folder"):
        check_space(str(tmp_path / "checkpoints"), 10**18)
    check_space(str(tmp_path / "checkpoints"), 1000)
