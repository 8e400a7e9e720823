"""Weights & Biases and MLflow for real, without a network; and loggers that fail."""

import json
import logging
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.observe import ObserveConfig, Observer, RunFacts, StepRecord, loggers

CONFIG = "[optim]\nlr = 0.001\nbetas = [0.9, 0.95]\n[train]\nsteps = 3\n"


def run_with(folder: Path, name: str, *, start_step: int = 0) -> list[str]:
    """A run of three steps and an evaluation; the rows of its own file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    config = ObserveConfig(
        loggers=(name,), project="tests", tensorboard=False, progress="off", log_interval=1
    )
    facts = RunFacts(
        flops_per_token=1e6, total_steps=3, tokens_per_step=10, num_ranks=1, device=torch.device("cpu"),
        start_step=start_step,
    )  # fmt: skip
    observer = Observer(config, facts, output_dir=folder, is_main=True)
    for step in range(start_step + 1, 4):
        loads = {"layer 0": torch.tensor([3.0, 1.0])}
        observer.log_step(
            StepRecord(
                step=step, tokens=10 * step, loss=4.0 - step, lr=1e-3, grad_norm=1.0, seconds=0.5, loads=loads
            )
        )
    observer.log_eval(3, 1.25)
    observer.close("finished")
    return (folder / "metrics.jsonl").read_text().splitlines()


@pytest.mark.full
def test_mlflow_has_metrics_params_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("mlflow", reason="needs mlflow: pip install 'fsdmoe[mlflow]'").MlflowClient
    address = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run_with(tmp_path / "run", "mlflow")
    run_with(tmp_path / "run", "mlflow", start_step=2)
    there = client(tracking_uri=address)
    experiment = there.get_experiment_by_name("tests")
    found = {run.info.run_name: run for run in there.search_runs([experiment.experiment_id])}
    assert set(found) == {"run", "run from step 2"}
    run = found["run"]
    assert run.info.status == "FINISHED"
    assert run.data.params == {"optim.lr": "0.001", "optim.betas": "[0.9, 0.95]", "train.steps": "3"}
    losses = there.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert run.data.metrics["eval/loss"] == 1.25
    assert run.data.metrics["experts_max_over_mean/max"] == 1.5
    assert run.data.tags["folder"] == str(tmp_path / "run")


def test_weights_and_biases_writes_its_own_file_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install 'fsdmoe[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    run_with(tmp_path / "run", "wandb")
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    steps: dict[int, dict[str, float]] = {}
    for data in wandb_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run"):
            assert (record.run.project, record.run.display_name) == ("tests", "run")
            assert record.run.run_group == "run"
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert config["optim"] == {"lr": 0.001, "betas": [0.9, 0.95]}
        if record.HasField("history"):
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            steps.setdefault(record.history.step.num, {}).update(items)
    assert {step: items["train/loss"] for step, items in steps.items()} == {1: 3.0, 2: 2.0, 3: 1.0}
    assert steps[3]["eval/loss"] == 1.25


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Of a file in LevelDB's log format: blocks of 32 KiB, parts with checksum, length and kind."""
    at = 7  # after the file's own header
    record = b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.parametrize("fails_at", ["open", "log", "close"])
def test_a_logger_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails_at: str
) -> None:
    class Failing:
        def __init__(self, *args: object) -> None:
            self.fail("open")

        def fail(self, at: str) -> None:
            if at == fails_at:
                raise RuntimeError("no route to host")

        def log(self, step: int, scalars: Mapping[str, float]) -> None:
            self.fail("log")

        def close(self, status: str) -> None:
            self.fail("close")

    monkeypatch.setattr(loggers, "OPENERS", {"wandb": Failing})
    with caplog.at_level(logging.WARNING):
        assert len(run_with(tmp_path / "run", "wandb")) == 4
    assert "wandb failed and logs no more, the run goes on: no route to host" in caplog.text


def test_a_logger_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    monkeypatch.setattr(loggers, "OPENERS", {"wandb": lambda *args: release.wait()})
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.01)
    assert len(run_with(tmp_path / "run", "wandb")) == 4
    assert "wandb has not taken all rows" in caplog.text
    release.set()


def test_unknown_loggers_and_missing_packages_are_refused_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"observe.loggers: expected one of wandb, mlflow, got 'wanddb'"):
        ObserveConfig(loggers=("wanddb",))  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"observe.loggers: .*pip install 'fsdmoe\[mlflow\]'"):
        ObserveConfig(loggers=("mlflow",))
