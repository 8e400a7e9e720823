"""Any layout to any other, bit for bit, through our own files."""

import itertools
from pathlib import Path

import pytest
import torch

from fsdmoe.checkpoint.planner import PlanCache
from fsdmoe.checkpoint.session import describe, read_state, write_state
from fsdmoe.checkpoint.storage import LocalStorage
from fsdmoe.checkpoint.tree import split_tree
from fsdmoe.checkpoint.writer import SaveOrder
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.checkpoint.states import LAYOUTS, assert_same, whole_state


def save_under(degrees: dict[str, int], folder: str, name: str, saves: int = 1) -> int:
    meshes, cache = build_meshes(**degrees), PlanCache()
    tensors, values = split_tree(whole_state(meshes))
    for count in range(saves):
        order = SaveOrder(LocalStorage(folder), f"{name}{count or ''}", values, describe({"degrees": degrees}))
        write_state(order, tensors, cache)
    return cache.hits


def load_under(degrees: dict[str, int], folder: str, names: list[str], verify: str = "fast") -> None:
    meshes = build_meshes(**degrees)
    for name in names:
        state = whole_state(meshes, filled=False)
        assert_same(read_state(LocalStorage(folder), name, state, verify=verify))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One checkpoint from every layout."""
    folder = str(tmp_path_factory.mktemp("matrix"))
    for name, (world, degrees) in LAYOUTS.items():
        run_ranks(save_under, world, degrees, folder, name)
    return folder


@pytest.mark.parametrize("name", ["one", "fsdp3", "hsdp 2x2 ep2", "cp2 tp2 ep2 etp2"])
def test_a_checkpoint_of_every_layout_loads_bit_for_bit(saved: str, name: str) -> None:
    world, degrees = LAYOUTS[name]
    run_ranks(load_under, world, degrees, saved, list(LAYOUTS))


@pytest.mark.full
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_loads_every_layout(saved: str, name: str) -> None:
    world, degrees = LAYOUTS[name]
    run_ranks(load_under, world, degrees, saved, list(LAYOUTS), "full")
