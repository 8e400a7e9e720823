"""Weights & Biases and MLflow: what they get of a run, next to its own files.

Each start of a run is a run of theirs: with the name of its folder, and after a resume with the step it went
on from. Curves of one start are never mixed with those of another that came to the same steps.

A logger has a thread of its own: a server that does not answer delays no step, and one that fails is left out
with a warning. The run goes on, and ``metrics.jsonl`` has every row.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils._pytree import tree_flatten_with_path

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""At the end of a run, for what is still to be sent."""
_MLFLOW_PARAMS = 100  # at most in one request


class RowSink(Protocol):
    """A run of theirs. Used by one thread."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self, status: str) -> None: ...


Opener = Callable[[Path, str, str], RowSink]
"""From the run's folder, the project and the name of this start."""


class RunLogger:
    """Hands rows over to a sink, which is opened with the first of them: by then the run has kept its
    configuration."""

    def __init__(self, name: str, folder: Path, *, project: str, start_step: int) -> None:
        title = folder.resolve().name + (f" from step {start_step}" if start_step else "")
        self._name = name
        self._open = lambda: OPENERS[name](folder, project, title)
        self._items: queue.SimpleQueue[tuple[int, Mapping[str, float]] | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        if self._thread.is_alive():  # not after a failure
            self._items.put((step, scalars))

    def close(self, status: str) -> None:
        """Wait for what is under way, a minute at most."""
        if self._thread is None:
            return
        self._items.put(status)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s has not taken all rows in %.0f s: left behind", self._name, CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            sink = self._open()
            while not isinstance(item := self._items.get(), str):
                sink.log(*item)
            sink.close(item)
        except Exception as error:  # whatever it is, the run does not depend on it
            logger.warning("%s failed and logs no more, the run goes on: %s", self._name, error)


class _Wandb:
    def __init__(self, folder: Path, project: str, title: str) -> None:
        import wandb

        # It would ask whoever sits at the terminal, and without an answer log nothing.
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(timeout=1):
            raise RuntimeError("no login is known; run `wandb login` first, or set WANDB_MODE=offline")
        settings = wandb.Settings(console="off", silent=True)  # the console is ours
        self._run = wandb.init(
            project=project, name=title, group=folder.resolve().name, dir=str(folder), config=_config(folder),
            settings=settings,
        )  # fmt: skip
        logger.info("Weights & Biases: %s", self._run.dir if self._run.offline else self._run.url)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        # An evaluation comes after its step's row: a step of theirs takes more until a later one comes.
        self._run.log(dict(scalars), step=step)

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)


class _Mlflow:
    def __init__(self, folder: Path, project: str, title: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        run = self._client.create_run(number, run_name=title, tags={"folder": str(folder.resolve())})
        self._id = run.info.run_id
        leaves: list[tuple[Any, Any]] = tree_flatten_with_path(
            _config(folder), is_leaf=lambda node: not isinstance(node, dict)
        )[0]
        params = [Param(".".join(part.key for part in path), str(leaf)) for path, leaf in leaves]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MLFLOW_PARAMS])
        logger.info("MLflow: run %s of experiment %s", self._id, project)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        metrics = [self._metric(tag, value, now, step) for tag, value in scalars.items()]
        self._client.log_batch(self._id, metrics)

    def close(self, status: str) -> None:
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, "FINISHED" if status == "finished" else "KILLED")


OPENERS: Mapping[str, Opener] = {"wandb": _Wandb, "mlflow": _Mlflow}


def _config(folder: Path) -> dict[str, Any]:
    """What the run has kept; nothing in a loop of one's own."""
    kept = folder / "config.toml"
    return tomllib.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
