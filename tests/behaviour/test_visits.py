"""What a plain run walks through: the files that ``parallelize``, one MoE layer's forward and a training step
visit where no feature is switched on. Two ranks, experts split over both."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

import fsdmoe
from fsdmoe import train
from fsdmoe.experts.moe import MoE
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.tiny_run import tiny_config

ROOT = f"{Path(fsdmoe.__file__).parent}/"
MOST_FILES = {"parallelize": 33, "MoE forward": 18, "step": 60}
MOST_CALLS_OF_A_STEP = 3664
OFF = (
    "formats.py", "features.py", "rules.py", "frozen_layers.py", "rounded_layers.py", "quantized_",
    "checkpoint/", "config/", "context_parallel/", "experts/capacity.py", "experts/dispatch/flex",
    "experts/dispatch/host_reader.py",
    "experts/replay.py", "experts/shared.py", "fsdp/block_scales.py", "fsdp/dtensor.py", "fsdp/guard.py",
    "fsdp/loss_scaling.py", "fsdp/subclass.py", "graphs/", "huggingface/", "kernels/quantized", "kernels/fp8",
    "memory/", "models/projections.py", "models/sub_batches.py", "precision/", "tensor_parallel/",
)  # fmt: skip
"""Files of features that the run does not use, by how their names begin."""


@contextmanager
def _tracing(files: Counter[str]) -> Iterator[None]:
    def seen(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and name != train.__file__:  # the loop is no part of it
            files[name.removeprefix(ROOT)] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(before)


def _visits(folder: str) -> dict[str, dict[str, int]]:
    config = tiny_config(
        folder, 2, mesh__ep=2, model__preset="quickstart", train__micro_batch_size=4, train__eval_interval=-1
    )
    found: dict[str, Counter[str]] = {name: Counter() for name in MOST_FILES}
    parallelize = train.parallelize

    def traced(*args: Any, **kwargs: Any) -> Any:
        with _tracing(found["parallelize"]):
            return parallelize(*args, **kwargs)

    with mock.patch.object(train, "parallelize", traced):
        run = train.Run(config, build_meshes(config.mesh))
    for _ in range(2):
        run.train_step()
    forward = MoE.forward

    def forward_once(layer: MoE, *args: Any) -> Any:
        MoE.forward = forward  # type: ignore[method-assign]
        with _tracing(found["MoE forward"]):
            return forward(layer, *args)

    with mock.patch.object(MoE, "forward", forward_once):
        run.train_step()
    with _tracing(found["step"]):
        run.train_step()
    run.close("finished")
    return {name: dict(files) for name, files in found.items()}


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    return run_ranks(_visits, 2, str(tmp_path_factory.mktemp("visits")))[0]


@pytest.mark.parametrize("what", MOST_FILES)
def test_a_plain_run_is_short_to_walk(visits: dict[str, dict[str, int]], what: str) -> None:
    assert 10 < len(visits[what]) <= MOST_FILES[what], sorted(visits[what])


@pytest.mark.parametrize("what", MOST_FILES)
def test_no_file_of_a_feature_that_is_off_is_visited(visits: dict[str, dict[str, int]], what: str) -> None:
    assert [name for name in visits[what] if name.startswith(OFF)] == []


def test_a_plain_step_makes_few_calls(visits: dict[str, dict[str, int]]) -> None:
    assert sum(visits["step"].values()) <= MOST_CALLS_OF_A_STEP
