"""Ranks with different environments (a launcher that sets a variable for some, nodes of different sizes,
locales, time zones, numbers of threads) train as one process does, or all say the same."""

from __future__ import annotations

import locale
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdmoe
from fsdmoe.checkpoint import api, session
from fsdmoe.config import start_meshes
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import MeshConfig, build_meshes
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.parallel_case import Course, Layout, compare, one_process, train_parallel
from tests.support.tiny_run import tiny_config
from tests.support.token_run import write_documents

WORLD = 4
LOCALES = ("C", "C.UTF-8", "POSIX", "C.UTF-8")
ZONES = ("UTC", "XYZ+5", "ABC-9", "UTC")
UNEQUAL_NODES = ("3", "3", "3", "1")
CONTRADICTING = ("4", "2", None, "2")


def _live_apart(node_sizes: tuple[str | None, ...]) -> None:
    """Make this rank's environment another one than that of its neighbours."""
    rank = dist.get_rank()
    os.environ.update(OMP_NUM_THREADS=str(rank + 1), TZ=ZONES[rank], LC_ALL=LOCALES[rank])
    if (size := node_sizes[rank]) is not None:
        os.environ["LOCAL_WORLD_SIZE"] = size
    torch.set_num_threads(rank + 1)  # as torch does where it starts with that variable
    locale.setlocale(locale.LC_ALL, LOCALES[rank])
    time.tzset()


def _course(layout: Layout, node_sizes: tuple[str | None, ...]) -> Course | str:
    _live_apart(node_sizes)
    try:
        return train_parallel("qwen3_moe", layout, 2, ("sgd",))["sgd"]
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("dispatcher", "node_sizes"),
    [
        ("flex", UNEQUAL_NODES),
        ("all_to_all", CONTRADICTING),
        pytest.param("all_to_all", UNEQUAL_NODES, marks=pytest.mark.full),
        pytest.param("allgather", CONTRADICTING, marks=pytest.mark.full),
    ],
)
def test_ranks_with_different_environments_train_as_one_process(
    dispatcher: str, node_sizes: tuple[str | None, ...]
) -> None:
    layout = Layout(MeshConfig(ep=4), dispatcher=dispatcher)
    for course in run_ranks(_course, WORLD, layout, node_sizes):
        assert isinstance(course, Course), course
        compare(course, one_process("qwen3_moe", "sgd"), dispatcher)


def test_flex_refuses_nodes_that_contradict_each_other_alike_on_all_ranks() -> None:
    found = run_ranks(_course, WORLD, Layout(MeshConfig(ep=4), dispatcher="flex"), CONTRADICTING)
    assert found == [found[0]] * WORLD
    assert str(found[0]) == (
        "LOCAL_WORLD_SIZE: expected the number of ranks on a rank's node, the same on all of them, got '4' "
        "on rank 0, '2' on ranks 1, 3, 'none' on rank 2; start all ranks alike with torchrun, or unset it "
        "everywhere"
    )


def _run_refusal(folder: str, own: dict[int, dict[str, Any]]) -> str:
    settings = {
        "data__kind": "tokens", "data__max_bytes": "none", "data__holdout": 0, "data__document_end": 1,
        "train__eval_interval": -1, "train__steps": 1,
    }  # fmt: skip
    config = tiny_config(folder, dist.get_world_size(), **(settings | own[dist.get_rank()]))
    try:
        Run(config, start_meshes(config))
    except ConfigError as error:
        return str(error)
    return "built"


def test_a_run_refuses_ranks_with_different_configurations(tmp_path: Path) -> None:
    common = {"data__path": write_documents(tmp_path), "optim__lr": 0.5}
    own = {0: common, 1: common | {"optim__lr": 0.25, "experts__dispatcher": "allgather"}}
    (found,) = set(run_ranks(_run_refusal, 2, str(tmp_path / "run"), own))
    assert found.splitlines() == [
        "experts.dispatcher: expected the same on all ranks, got 'auto' on rank 0, 'allgather' on rank 1; "
        "start all ranks with the same command line and the same file",
        "optim.lr: expected the same on all ranks, got 0.5 on rank 0, 0.25 on rank 1; start all ranks with "
        "the same command line and the same file",
    ]


def _refusal_of_own_files(folder: str) -> str:
    """The same path leads to the files of this rank's node."""
    os.chdir(f"{folder}/{dist.get_rank()}")
    return _run_refusal(folder, {rank: {"data__path": "tokens.npy"} for rank in range(2)})


def test_a_run_refuses_nodes_that_hold_different_documents_under_the_same_path(tmp_path: Path) -> None:
    for rank in range(2):
        tokens = np.random.default_rng(rank).integers(4, 96, 1024)
        (tmp_path / str(rank)).mkdir()
        np.save(tmp_path / str(rank) / "tokens.npy", tokens.astype(np.uint16))
    (found,) = set(run_ranks(_refusal_of_own_files, 2, str(tmp_path)))
    assert found.startswith("data: expected the same on all ranks, got '")
    assert found.endswith("on rank 1; give all nodes the same documents")


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def _refusal_of_models() -> str:
    """What a rank's own files or versions make of the same lines."""
    model = _Pair()
    if dist.get_rank() == 2:
        model.second = nn.Linear(8, 4)
    try:
        fsdmoe.parallelize(model, build_meshes())
    except ConfigError as error:
        return str(error)
    return "sharded"


def test_ranks_that_built_different_models_are_refused() -> None:
    assert run_ranks(_refusal_of_models, 3) == [
        "parallelize: second.weight: expected the same on all ranks, got '[4, 4] in float32, trained, number "
        "1 over fsdp_tp with the root' on ranks 0-1, '[4, 8] in float32, trained, number 1 over fsdp_tp with "
        "the root' on rank 2; build the model alike on all of them, from the same files and arguments"
    ] * 3  # fmt: skip


def _refusal_of_copies(folder: str) -> str:
    """The second rank's node has another checkpoint under the same name."""
    model = fsdmoe.parallelize(_Pair(), build_meshes())
    fsdmoe.checkpoint.save(f"{folder}/newer", model)
    with torch.no_grad():
        model.first.weight.add_(1)
    fsdmoe.checkpoint.save(f"{folder}/older", model)
    names = {"newer": "older"} if dist.get_rank() == 1 else {}

    def open_own(storage: Any, name: str, *args: Any) -> Any:
        return session.open_verified(storage, names.get(name, name), *args)

    with mock.patch.object(api, "open_verified", open_own):
        try:
            fsdmoe.checkpoint.load(f"{folder}/newer", model)
        except ConfigError as error:
            return str(error)
    return "loaded"


def test_nodes_with_different_checkpoints_of_one_name_are_refused(tmp_path: Path) -> None:
    (found,) = set(run_ranks(_refusal_of_copies, 2, str(tmp_path)))
    assert found.startswith(f"{tmp_path}/newer: expected the same on all ranks, got '")
    assert found.endswith("on rank 1; load it from a folder that all ranks share")
